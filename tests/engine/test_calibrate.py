"""Constants measured on a model: what they are, that they predict, and that measuring leaves no trace."""

import dataclasses
import json
import time

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import treetrain as tt
from support.models import BASE, build, make_model
from treetrain.engine import calibrate as calibration
from treetrain.engine import constants_cache, memory
from treetrain.engine.batch import Batch
from treetrain.engine.calibrate import calibrate, cost_model, model_shape, remember
from treetrain.engine.executor import Executor
from treetrain.engine.loss_gradients import KnownGradients, ScoreTable
from treetrain.engine.memory import live_bytes
from treetrain.engine.planning import formula_cost
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import check_model
from treetrain.models.loading import load_model
from treetrain.planning.constants import Constants
from treetrain.planning.partition import partition
from treetrain.planning.price import CostModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A cache of the test's own, short passes, and nothing remembered."""
    monkeypatch.setenv(constants_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_MEASURED", {})
    monkeypatch.setattr(calibration, "LENGTHS", {"cpu": (64, 32)})
    monkeypatch.setattr(calibration, "_is_busy", lambda device: False)


def measured(model: nn.Module) -> Constants:
    return calibrate(model, check_model(model))


def checkpoint_layers(model: nn.Module) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()


def test_live_bytes_are_those_of_tensors_that_live():
    with live_bytes(CPU) as meter:
        kept = torch.zeros(1000)
        view = kept[10:].add_(1.0)
        assert meter.now == 4000
        torch.ones(500).sum()
        assert meter.now < 4100 and 6000 <= meter.peak < 6100
        meter.restart_peak()
        assert meter.peak == meter.now
        del kept
        assert meter.now >= 4000  # the view still holds it
        del view
    assert meter.now < 100


def test_live_bytes_are_counted_in_backward_too():
    weight = torch.ones(1000, requires_grad=True)
    with live_bytes(CPU) as meter:
        weight.exp().sum().backward()
        assert weight.grad is not None and meter.now >= 4000
    assert meter.peak >= 8000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_knows_what_a_qwen3_layer_saves_for_backward(dtype):
    model = load_model("tiny", dtype=dtype)
    formula = Constants.from_shape(model_shape(model), dtype_bytes=dtype.itemsize)
    found = measured(model)
    assert found.saved_token == pytest.approx(formula.saved_token, rel=0.03)
    assert found.step_bytes == formula.step_bytes


@pytest.mark.parametrize("budget", [10_000, 200, 50])
def test_tensors_alive_at_the_peak_of_a_plan_are_predicted_within_a_tenth(budget):
    model = load_model("tiny")
    capabilities = check_model(model)
    rng = np.random.default_rng(0)
    trunk = rng.integers(5, 1000, 300).tolist()
    rows = [tt.Trajectory(trunk[: 90 * (1 + k % 3)] + rng.integers(5, 1000, 150).tolist()) for k in range(4)]
    layout = Batch.of(tt.build_tree(rows), weighted=True).layout
    plain = dataclasses.replace(measured(model), slack=1.0, slack_bytes=0.0)
    cost = CostModel(shape=model_shape(model), constants=plain)
    plan = partition(layout, budget, cost.seconds)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with live_bytes(CPU) as meter:
        table = ScoreTable(layout.num_edges, len(layout.rows), torch.float32, CPU, entropy=False)
        executor = Executor(model, capabilities, plan, temperature=1.0, gradients=True)
        executor.train(KnownGradients(table, torch.ones(layout.num_edges)))
    assert meter.peak == pytest.approx(cost.peak_bytes(plan), rel=0.1)


def test_measuring_leaves_gradients_weights_mode_and_random_state_as_they_were():
    model = make_model("qwen3").train()
    some, *rest = model.parameters()
    some.grad = torch.full_like(some, 3.0)
    rest[0].requires_grad_(False)
    before = some.grad
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    measured(model)
    assert some.grad is before and (before == 3.0).all() and all(p.grad is None for p in rest)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_come_back_when_measuring_fails(monkeypatch):
    model = make_model("qwen3")
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    monkeypatch.setattr(calibration, "_speeds", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(model)
    assert first.grad is not None and not first._post_accumulate_grad_hooks


def test_checkpointing_is_seen_in_what_is_saved_and_in_the_backward():
    model = load_model("tiny")
    plain = measured(model)
    checkpoint_layers(model)
    checkpointed = measured(model)
    assert checkpointed.saved_token < plain.saved_token / 5
    assert checkpointed.layer_token > 5 * plain.layer_token


def test_autocast_saves_less_per_token_and_its_cast_weights_per_pass():
    model = load_model("tiny")
    plain = measured(model)
    with torch.autocast("cpu", torch.bfloat16):
        cast = measured(model)
    assert cast.saved_token < 0.8 * plain.saved_token
    assert cast.carry_token < plain.carry_token


def test_the_formula_of_a_model_knows_its_dtype_its_autocast_and_its_checkpointing():
    dtypes = torch.float32, torch.bfloat16, torch.float64
    plain, narrow, double = (formula_cost(make_model(dtype=d)) for d in dtypes)
    assert plain is not None and narrow is not None and double is not None
    assert narrow.constants.carry_token < plain.constants.carry_token < double.constants.carry_token
    model = make_model("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        assert formula_cost(model) == narrow
    assert formula_cost(model) == plain
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = formula_cost(model)
    assert checkpointed is not None and checkpointed.constants.backward_ratio == plain.constants.backward_ratio + 1
    assert checkpointed.constants.saved_token < plain.constants.saved_token


def test_adapters_have_no_gradient_of_the_head():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load_model("tiny"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    found, full = measured(model), measured(load_model("tiny"))
    assert found.step_bytes == 0 < full.step_bytes
    assert found.graph_pass_bytes < 0.5 * full.graph_pass_bytes


def test_a_backward_that_does_more_than_gradients_is_not_run():
    model = make_model("qwen3")
    calls = []
    handle = next(model.parameters()).register_post_accumulate_grad_hook(calls.append)
    assert measured(model).source.startswith("formula")
    assert not calls
    handle.remove()
    assert measured(model).source.startswith("measured")


def test_a_model_without_anything_to_train_is_priced_by_formula():
    assert measured(make_model("qwen3").requires_grad_(False)).source.startswith("formula")


def test_a_model_that_takes_far_too_long_is_priced_by_formula_and_that_is_said():
    model = make_model("qwen3")
    found = calibrate(model, check_model(model), limit_seconds=1e-6)
    assert "too slow here to be measured" in found.source and all(p.grad is None for p in model.parameters())


def test_passes_are_no_longer_than_memory_allows(monkeypatch):
    model = make_model("qwen3")
    shape, capabilities = model_shape(model), check_model(model)
    bench = calibration._Bench(model, capabilities, None)
    formula = calibration.formula_constants(model, capabilities, shape)
    short, long = (calibration._peak(bench, formula, shape, n) for n in (32, 64))
    assert short < long
    monkeypatch.setattr(calibration, "device_free_bytes", lambda model: int(long + 1))
    assert "passes of 16 and 64 tokens" in calibrate(model, capabilities, limit_seconds=100.0).source
    monkeypatch.setattr(calibration, "device_free_bytes", lambda model: int(short + 1))
    assert "passes of 8 and 32 tokens" in calibrate(model, capabilities, limit_seconds=100.0).source


def test_a_model_for_which_there_is_no_memory_is_priced_by_formula_and_that_is_said(monkeypatch):
    model = make_model("qwen3")

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibration, "_memory", out_of_memory)
    found = calibrate(model, check_model(model))
    assert "too little memory here to be measured" in found.source and all(p.grad is None for p in model.parameters())


def test_what_is_compiled_at_first_use_is_no_part_of_a_pass(monkeypatch):
    """Of any length, and without graph too: a first call that takes long would make the model too slow to measure."""
    real, seen = calibration._Bench.graph, set()

    def graph(self, tokens, rows, meter=None):
        if tokens not in seen and rows == 1:
            seen.add(tokens)
            time.sleep(0.3 if tokens in (2, 32) else 0.0)
        return real(self, tokens, rows, meter)

    monkeypatch.setattr(calibration._Bench, "graph", graph)
    model = make_model("qwen3")
    assert calibrate(model, check_model(model), limit_seconds=0.2).source.startswith("measured on")
    assert calibrate(model, check_model(model), limit_seconds=1e-6).source.endswith("(too slow here to be measured)")


def test_an_unknown_architecture_is_an_error_that_names_it_and_the_cure():
    model = build(transformers.HeliumForCausalLM, transformers.HeliumConfig(**BASE, head_dim=8))
    with pytest.raises(UnsupportedModel, match=r"'helium'.*--shape"):
        cost_model(model, check_model(model))


def test_constants_are_measured_once_and_then_read(monkeypatch):
    model = make_model("qwen3")
    first = cost_model(model, check_model(model))
    calls = []
    monkeypatch.setattr(calibration, "calibrate", lambda *_: calls.append(1))
    assert cost_model(model, check_model(model)) == first
    monkeypatch.setattr(calibration, "_MEASURED", {})  # as in another process
    assert cost_model(model, check_model(model)) == first and not calls


def test_what_is_measured_on_a_busy_machine_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "_is_busy", lambda device: True)
    model = make_model("qwen3")
    cost_model(model, check_model(model))
    assert not list(tmp_path.rglob("*.json"))


def test_constants_that_somebody_gives_are_taken(tmp_path):
    model = make_model("qwen3")
    given = Constants.from_shape(model_shape(model))
    remember(model, check_model(model), given)
    assert cost_model(model, check_model(model)).constants == given
    assert [path.suffix for path in (tmp_path / "cache" / "constants").iterdir()] == [".json"]


def test_what_changes_a_cost_changes_the_key():
    model = make_model("qwen3")
    capabilities, shape = check_model(model), model_shape(model)
    keys = [calibration._key(model, capabilities, shape)]
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(calibration._key(model, capabilities, shape))
    next(model.parameters()).requires_grad_(False)
    keys.append(calibration._key(model, capabilities, shape))
    checkpoint_layers(model)
    keys.append(calibration._key(model, capabilities, shape))
    keys.append(calibration._key(model.bfloat16(), capabilities, shape))
    torch.set_num_threads(2)
    keys.append(calibration._key(model, capabilities, shape))
    torch.set_num_threads(1)
    assert len({json.dumps(key) for key in keys}) == len(keys)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": KEY, "constants": {"slack": 1}}'])
def test_a_damaged_file_is_told_about_and_measured_again(content):
    model = make_model("qwen3")
    key = calibration._key(model, check_model(model), model_shape(model))
    path = constants_cache._path(key)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(content.replace("KEY", json.dumps(key)))
    with pytest.warns(UserWarning, match=f"{path.name} holds no measured constants"):
        cost_model(model, check_model(model))
    assert json.loads(path.read_text())["key"] == key


def test_the_cache_can_be_switched_off_or_be_the_user_s_own(monkeypatch, tmp_path):
    monkeypatch.setenv(constants_cache.VARIABLE, "off")
    assert constants_cache.folder() is None
    constants_cache.store({"a": 1}, Constants.from_shape(tt.ModelShape.named("qwen3-8b")))
    assert constants_cache.load({"a": 1}) is None and not list(tmp_path.iterdir())
    monkeypatch.delenv(constants_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert constants_cache.folder() == tmp_path / "treetrain" / "constants"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert constants_cache.folder() == tmp_path / "home" / ".cache" / "treetrain" / "constants"


def test_a_cache_that_cannot_be_written_is_told_about(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(constants_cache.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="TREETRAIN_CACHE"):
        constants_cache.store({"a": 1}, Constants.from_shape(tt.ModelShape.named("qwen3-8b")))


def test_free_bytes_are_what_the_tightest_control_group_leaves(monkeypatch, tmp_path):
    everything = memory.free_bytes(CPU)
    assert 0 < everything <= memory.CPU_SHARE * memory._available()
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(memory, "_available", lambda: 10_000)
    monkeypatch.setattr(memory, "_control_groups", lambda: [group])
    assert memory.free_bytes(CPU) == 8000
    (group / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    (group / "memory.current").write_text("4500\n")
    (group / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 8000
    (group / "memory.max").write_text("5000\n")
    assert memory.free_bytes(CPU) == 800  # 5000 - 4500, and the cache that can go
