"""`bench` and the baselines it compares with."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import treetrain as tt
from support.models import make_model
from treetrain.check import bench as bench_module
from treetrain.check.bench import PaddedEngine, bench
from treetrain.check.linear_engine import LinearEngine
from treetrain.check.verify import PlainModel, relative_error
from treetrain.engine import TreeEngine
from treetrain.models.costs import cost_of
from treetrain.models.loading import load_model

LOSSES = {"sft": tt.losses.sft(), "ppo": tt.losses.ppo(entropy=0.01)}


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture
def rows() -> list[tt.Trajectory]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 60, 6).tolist()
    made = []
    for length in (5, 9, 2, 7, 1):
        ids = prompt + rng.integers(0, 60, length).tolist()
        facts = {"advantages": float(rng.normal()), "old_logprobs": -4 + rng.random(len(ids)) / 3}
        made.append(tt.Trajectory(ids, loss_weights=rng.random(len(ids)) * (rng.random(len(ids)) > 0.3), **facts))
    return [*made, made[0], tt.Trajectory([3])]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
@pytest.mark.parametrize("pack_tokens", [None, 1, 20])
@pytest.mark.parametrize("engine", [LinearEngine, PaddedEngine])
def test_the_baselines_compute_what_the_plain_model_computes(model, rows, engine, pack_tokens, loss):
    normaliser = loss.normaliser(rows)
    expected_loss = PlainModel(model, temperature=0.8).accumulate_gradients(rows, loss, normaliser)
    expected = gradients(model)
    model.zero_grad()
    result = engine(model, pack_tokens=pack_tokens, temperature=0.8).forward_backward(rows, loss)
    assert result.loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_error(gradients(model).values(), expected.values()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_deep", "bamba_deep"])
def test_the_baselines_of_hybrids_compute_what_the_plain_model_computes(family, rows):
    model, loss = make_model(family, vocab_size=64), LOSSES["sft"]
    expected_loss = PlainModel(model).accumulate_gradients(rows, loss, loss.normaliser(rows))
    expected = gradients(model)
    for engine in (LinearEngine, PaddedEngine):
        model.zero_grad()
        result = engine(model, pack_tokens=20).forward_backward(rows, loss)
        assert result.loss == pytest.approx(expected_loss, rel=1e-5)
        assert relative_error(gradients(model).values(), expected.values()) <= 1e-5


def test_the_baselines_share_nothing(model, rows):
    flat = sum(len(row) for row in rows)
    for engine in (LinearEngine, PaddedEngine):
        result = engine(model).forward_backward([r.replace(loss_weights=None) for r in rows], LOSSES["sft"])
        # Every row but for its last token, which predicts nothing.
        assert result.computed_tokens == flat - len(rows)


def test_a_report_says_what_was_measured(model, rows):
    report = bench(model, rows, repeats=2)
    assert report.trajectories == 7
    assert set(report.baselines) == {"packed 4096", "padded 4096", "packed 8192", "padded 8192"}
    assert len(report.seconds["tree"]) == 2
    assert report.baselines[report.baseline] == min(s for n, s in report.baselines.items() if n in report.seconds)
    low, high = report.speedup_spread
    assert low <= report.speedup <= high
    assert report.ideal is not None and report.ideal > 1
    assert report.efficiency == pytest.approx(report.speedup / report.ideal)


def test_the_baselines_train_what_the_tree_trains_on_the_rows_that_no_other_row_extends(model, rows, monkeypatch):
    seen, original = {}, TreeEngine.forward_backward

    def noted(engine, tasks, *args, **kwargs):
        model.zero_grad()
        result = original(engine, tasks, *args, **kwargs)
        seen[type(engine).__name__] = (len(tasks), gradients(model))
        return result

    monkeypatch.setattr(TreeEngine, "forward_backward", noted)
    extended = rows[0].replace(ids=[*rows[0].ids, 7], **{
        name: [*getattr(rows[0], name), x]
        for name, x in (("loss_weights", 0.5), ("advantages", 0.5), ("old_logprobs", -0.5))
    })  # fmt: skip
    report = bench(model, [*rows, extended], repeats=1, baselines=["packed 4096"])
    assert (report.trajectories, report.linear_rows) == (8, 5)  # without a repeat and two rows that are extended
    (tree_rows, ours), (linear_rows, theirs) = seen["TreeEngine"], seen["LinearEngine"]
    assert (tree_rows, linear_rows) == (8, 5) and relative_error(ours.values(), theirs.values()) <= 1e-5
    given = bench(model, [*rows, extended], repeats=1, baselines=["packed 4096"], loss=LOSSES["ppo"])
    assert given.linear_rows == 8 and given.ideal > report.ideal > 1


@pytest.mark.slow
def test_only_the_baselines_asked_for_run(model, rows, monkeypatch):
    ran: list[tuple[str, int]] = []
    original = LinearEngine.forward_backward

    def slow(engine, tasks, *args, **kwargs):
        ran.append((type(engine).__name__, engine.pack_tokens))
        if (type(engine), engine.pack_tokens) != (PaddedEngine, 4096):
            time.sleep(0.2)
        return original(engine, tasks, *args, **kwargs)

    monkeypatch.setattr(LinearEngine, "forward_backward", slow)
    report = bench(model, rows, repeats=1)
    assert report.baseline == "padded 4096" and len(report.baselines) == 4
    ran.clear()
    report = bench(model, rows, repeats=1, baselines=["padded 4096"])
    assert report.baseline == "padded 4096" and set(report.baselines) == {"padded 4096"}
    assert set(ran) == {("PaddedEngine", 4096)}


def test_lists_of_ids_and_trees_are_timed_as_trajectories_are(model, rows):
    for given in ([row.ids.tolist() for row in rows], tt.build_tree([row.ids for row in rows])):
        report = bench(model, given, repeats=1, baselines=["packed 4096"])
        assert (report.trajectories, report.flat_tokens) == (7, sum(len(row) for row in rows))


@pytest.mark.parametrize("wanted", [["packed 4096", "packed 5000"], []], ids=str)
def test_a_baseline_that_there_is_not_is_an_error(model, rows, wanted):
    with pytest.raises(ValueError, match="give one or more of packed 4096, padded 4096, packed 8192"):
        bench(model, rows, baselines=wanted)


def test_no_repeats_are_an_error(model, rows):
    with pytest.raises(ValueError, match="repeats=0"):
        bench(model, rows, repeats=0)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(bench_module, "CALIBRATION_TOKENS", {"cpu": (16, 64)})
    monkeypatch.setattr(bench_module, "CALIBRATION_PASSES", 2)


def test_two_passes_give_seconds_of_a_flop_and_of_a_pass(monkeypatch, short):
    """As on a device that is three times as slow as described, with passes that cost twice as much."""
    tiny = load_model("tiny")
    cost = cost_of(tiny)
    described = cost.speeds.graph_pass

    def seconds_of(plan) -> float:
        return cost.seconds(plan) - described

    monkeypatch.setattr(bench_module, "_pass_seconds", lambda _, plan: 3 * seconds_of(plan) + 2 * described)
    found = bench_module.measured_cost(tiny).speeds
    for name in ("layers", "attention", "head"):
        assert getattr(found, name) == pytest.approx(getattr(cost.speeds, name) / 3)
    assert found.graph_pass == pytest.approx(2 * described)
    assert found.forward_pass / found.graph_pass == pytest.approx(cost.speeds.forward_pass / described)
    assert "passes of 16 and 64 tokens" in found.source


def test_what_is_measured_predicts_another_pass(short):
    tiny = load_model("tiny")
    cost = bench_module.measured_cost(tiny)
    assert all(p.grad is None for p in tiny.parameters())
    plan = bench_module._chain(40, 2048)
    measured, predicted = bench_module._pass_seconds(tiny, plan), cost.seconds(plan)
    assert measured / 4 < predicted < 4 * measured  # other work on the machine takes its share
