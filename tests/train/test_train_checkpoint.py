"""Checkpoints: whole or not there, recognised when torn, gone on from bit for bit, refused where settings differ."""

import json
import os
import random
import re
import shutil
import signal
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import changed, names, stop_in_step, stopped
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from support.kills import differences, records, what_must_agree
from treetrain.engine import planning
from treetrain.engine.engine import TreeEngine
from treetrain.train import checkpoint, checkpoint_files
from treetrain.train.config import TrainConfig
from treetrain.train.same_run import BY_CONTENT, FREE, LENGTH, ROUNDING
from treetrain.train.signals import Interrupted
from treetrain.train.trainer import Trainer, train

RUNS: dict[str, dict[str, Any]] = {
    "sft": {"eval_fraction": 0.3, "eval_every_steps": 2},
    "grpo": {"loss": "grpo", "schedule": "constant", "weight_decay": 0.1},
    "several updates of a batch": {"loss": "grpo", "updates_per_batch": 3, "minibatches": 2, "kl": 0.1},
    "in calls, averaged, the best kept": {
        "tokens_per_call": 60,
        "ema_decay": 0.8,
        "eval_fraction": 0.3,
        "eval_every_steps": 1,
        "keep_best": True,
    },
    "adapter": {"lora_rank": 2},
    "bfloat16 within a budget": {"dtype": "bfloat16", "budget": 20},
    "momentum": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(make_run, tmp_path, name) -> None:
    whole, parted = (make_run(**RUNS[name], output=str(tmp_path / each)) for each in ("whole", "parted"))
    train(whole)
    said = stopped(parted, 4)
    assert re.search("stopped after step [24] of 6; all of it is saved in", said)
    result = train(changed(parted, resume="auto"))
    assert len(result.losses) == result.steps == 6
    assert differences(what_must_agree(tmp_path / "parted"), what_must_agree(tmp_path / "whole")) == []
    assert [record["kind"] for record in records(tmp_path / "parted")].count("resumed") == 1


def test_one_differing_bit_would_be_seen(make_run, tmp_path) -> None:
    for name, lr in (("one", 1e-2), ("other", 1e-2 * (1 + 1e-7))):
        train(make_run(output=str(tmp_path / name), lr=lr))
    assert differences(what_must_agree(tmp_path / "one"), what_must_agree(tmp_path / "other"))


def test_random_numbers_go_on_where_they_were() -> None:
    device = torch.device("cpu")

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]  # noqa: NPY002

    checkpoint.seed_all(5)
    draw()
    states = checkpoint.random_states(device)
    expected = draw()
    checkpoint.seed_all(6)
    checkpoint.set_random_states(states, device)
    assert draw() == expected


def test_a_run_that_goes_on_draws_the_random_numbers_that_come_next(make_run, tmp_path, monkeypatch) -> None:
    drawn: list[tuple] = []
    original = TreeEngine.forward_backward

    def forward_backward(self, *args, **kwargs):
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", forward_backward)
    train(make_run(output=str(tmp_path / "whole")))
    expected = drawn.copy()
    stopped(make_run(), 4)
    drawn.clear()
    train(make_run(resume="auto"))
    assert len(set(expected)) == 6 and drawn == expected[4:]


def test_a_second_ctrl_c_ends_the_run_in_the_middle_of_a_step(make_run, tmp_path, monkeypatch) -> None:
    original, calls = TreeEngine.forward_backward, []

    def forward_backward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)  # which may come any number of times
            original(self, *args, **kwargs)
            calls.append(2)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the step went on")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", forward_backward)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match=r"after step 3 of 6, in the middle of the next.*step 2 is in") as stop:
        train(make_run())
    assert stop.value.exit_code == 130 and stop.value.resumable and calls == [1, 1, 1, 1, 2]
    assert names(tmp_path / "out") == ["step-00000002"]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_checkpoint_loads_as_the_model_of_its_step(make_run, tmp_path) -> None:
    train(make_run(checkpoint_every_steps=6))
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoints" / "step-00000006").state_dict()
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert differences(dict(last), dict(result)) == []


def test_checkpoints_by_the_clock(make_run, tmp_path) -> None:
    train(make_run(checkpoint_every_steps=0, checkpoint_every_minutes=15, output=str(tmp_path / "short")))
    assert not (tmp_path / "short" / "checkpoints").exists()
    train(make_run(checkpoint_every_steps=0, checkpoint_every_minutes=1e-9, output=str(tmp_path / "long")))
    assert names(tmp_path / "long") == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 2e-2},
        {"seed": 1},
        {"loss": "grpo"},
        {"tokens_per_step": 60},
        {"beta1": 0.8, "weight_decay": 0.0},
        {"dtype": "bfloat16"},
        {"warmup_steps": 3},
    ],
)
def test_settings_that_change_the_result_are_refused_by_name_with_both_values(copied, changes) -> None:
    before = copied.as_dict()
    with pytest.raises(ValueError, match=r"cannot go on from .*step-00000005") as refused:
        Trainer(changed(copied, **changes))
    for name, value in changes.items():
        assert f"{name} was {before[name]!r} and is now {value!r}" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [{"keep_checkpoints": 5, "checkpoint_every_steps": 1, "checkpoint_every_minutes": 0.0}, {"budget": 30}],
)
def test_settings_that_do_not_change_it_may_differ(copied, changes) -> None:
    assert train(changed(copied, **changes)).steps == 6


def test_every_setting_that_may_differ_is_one() -> None:
    settings = TrainConfig(data=("x",), model="m", output="o").as_dict().keys()
    assert settings >= FREE | BY_CONTENT | ROUNDING | LENGTH


def test_rows_that_are_not_the_same_are_refused_and_a_file_that_was_moved_is_not(copied, tmp_path) -> None:
    moved = tmp_path / "moved.jsonl"
    shutil.copy(copied.data[0], moved)
    Trainer(changed(copied, data=(str(moved),)))
    lines = moved.read_text().splitlines()
    row = json.loads(lines[3])
    moved.write_text("\n".join([*lines[:3], json.dumps(row | {"reward": row["reward"] + 0.1}), *lines[4:]]))
    with pytest.raises(ValueError, match="training rows are not the same"):
        Trainer(changed(copied, data=(str(moved),)))


def test_a_run_may_be_lengthened_where_the_steps_done_would_have_been_the_same(make_run, tmp_path) -> None:
    first = make_run(schedule="constant", warmup_steps=2, steps=4, output=str(tmp_path / "longer"))
    train(first)
    assert train(changed(first, steps=6, resume="auto")).steps == 6
    train(changed(first, steps=6, output=str(tmp_path / "whole")))
    longer, whole = what_must_agree(tmp_path / "longer"), what_must_agree(tmp_path / "whole")
    assert (longer["records"][0].pop("steps"), whole["records"][0].pop("steps")) == (4, 6)
    assert differences(longer, whole) == []


def test_a_run_is_not_lengthened_where_its_learning_rates_were_made_for_its_end(copied) -> None:
    with pytest.raises(ValueError, match=r"6 steps, now 8.*'cosine'.*learning rate"):
        Trainer(changed(copied, steps=8))
    with pytest.raises(ValueError, match="at step 5, and the run is to end after 3"):
        Trainer(changed(copied, steps=3))


def test_a_finished_run_is_left_as_it_is(make_run, tmp_path, monkeypatch) -> None:
    config = make_run(eval_fraction=0.3)
    result = train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(Trainer, "_load", lambda self: pytest.fail("the model was loaded"))
    assert train(changed(config, resume="auto")) == result
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_run_without_a_checkpoint_begins_again_but_not_with_other_settings(make_run, tmp_path, monkeypatch) -> None:
    config = make_run(checkpoint_every_steps=0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        stop_in_step(patched, 3)
        with pytest.raises(Interrupted, match="no checkpoint was written"):
            train(config)
    with pytest.raises(ValueError, match=r"lr was 0.01 and is now 0.02"):
        Trainer(changed(config, resume="auto", lr=0.02))
    assert train(changed(config, resume="auto")).steps == 6
    assert [record["step"] for record in records(tmp_path / "out") if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_what_is_not_a_run_is_not_replaced(make_run, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="earlier run or model"):
        train(make_run(resume="auto"))
    with pytest.raises(ValueError, match=r"--resume auto.*--overwrite"):
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out" / "checkpoints").mkdir(parents=True)
        train(make_run())


def test_a_named_checkpoint_is_gone_on_from_in_another_folder(copied, tmp_path) -> None:
    there = tmp_path / "copy" / "checkpoints" / "step-00000004"
    train(changed(copied, resume=str(there), output=str(tmp_path / "branch")))
    train(changed(copied, resume="never", output=str(tmp_path / "whole")))
    assert differences(what_must_agree(tmp_path / "branch"), what_must_agree(tmp_path / "whole")) == []
    assert names(tmp_path / "copy") == ["step-00000004", "step-00000005"]


def test_a_run_that_dies_in_its_first_step_from_anothers_checkpoint_goes_on_from_that(
    copied, tmp_path, monkeypatch
) -> None:
    """It has no checkpoint of its own, and would begin again at step 0."""
    branch = changed(copied, resume=str(tmp_path / "copy"), output=str(tmp_path / "branch"))
    with monkeypatch.context() as patched:
        patched.setattr(TreeEngine, "forward_backward", lambda *args: signal.raise_signal(signal.SIGINT) or dying())
        with pytest.raises(Interrupted, match=r"the checkpoint of step 5 is in .*copy") as stop:
            train(branch)
    assert stop.value.resumable
    train(changed(branch, resume="auto"))
    resumed = [record["checkpoint"] for record in records(tmp_path / "branch") if record["kind"] == "resumed"]
    assert resumed == [str(tmp_path / "copy" / "checkpoints" / "step-00000005")]
    train(changed(copied, resume="never", output=str(tmp_path / "whole")))
    assert differences(what_must_agree(tmp_path / "branch"), what_must_agree(tmp_path / "whole")) == []


def dying() -> None:
    raise KeyboardInterrupt


def test_a_run_from_anothers_checkpoint_that_is_stopped_before_its_first_step_has_a_checkpoint_of_its_own(
    make_run, tmp_path, monkeypatch
) -> None:
    def logprobs(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    original = TreeEngine.logprobs
    first = make_run(eval_fraction=0.5, eval_every_steps=3, tokens_per_step=60, output=str(tmp_path / "first"))
    branch = changed(first, resume=str(tmp_path / "first"), output=str(tmp_path / "branch"))
    stopped(first, 3)  # its evaluation is left
    with monkeypatch.context() as patched:
        patched.setattr(TreeEngine, "logprobs", logprobs)
        with pytest.raises(Interrupted, match=r"all of it is saved in .*branch"):
            train(branch)
    assert names(tmp_path / "branch") == ["step-00000003"]
    shutil.rmtree(tmp_path / "first")
    assert train(changed(branch, resume="auto")).steps == 6
    assert [record["step"] for record in records(tmp_path / "branch") if record["kind"] == "train"] == [*range(1, 7)]


def test_a_named_checkpoint_takes_the_place_of_later_ones_only_when_told_to(copied, tmp_path) -> None:
    there = changed(copied, resume=str(tmp_path / "copy" / "checkpoints" / "step-00000004"))
    with pytest.raises(ValueError, match=r"later ones \(step-00000005\).*--overwrite"):
        Trainer(there)
    train(changed(there, overwrite=True, checkpoint_every_steps=0))
    assert names(tmp_path / "copy") == ["step-00000004"]


@pytest.mark.parametrize("name", ["nowhere", "copy/checkpoints/step-00000009", ""])
def test_a_checkpoint_that_is_not_there_is_an_error(copied, tmp_path, name) -> None:
    with pytest.raises(ValueError, match=r"holds no whole checkpoint|manifest\.json is missing|resume is empty"):
        Trainer(changed(copied, resume=str(tmp_path / name) if name else name))


def test_a_new_run_in_the_place_of_an_old_one_leaves_none_of_its_checkpoints(copied, tmp_path) -> None:
    train(changed(copied, resume="never", overwrite=True, checkpoint_every_steps=0, steps=2))
    assert names(tmp_path / "copy") == []


def test_other_frozen_weights_are_refused(make_run, model_folder, tmp_path) -> None:
    config = make_run(lora_rank=2)
    stopped(config, 2)
    other = Qwen3ForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 2] += 1e-3
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="weights that are not trained are not those"):
        train(changed(config, model=str(tmp_path / "other"), resume="auto"))
    assert train(changed(config, resume="auto")).steps == 6


def test_a_run_plans_with_the_memory_that_was_free_when_it_began(make_run, tmp_path, monkeypatch) -> None:
    used: list[int] = []
    original = planning._within_free

    def within_free(layout, cost, free):
        used.append(free)
        return original(layout, cost, free)

    monkeypatch.setattr(planning, "_within_free", within_free)
    free = iter(range(9_000_000, 10_000_000, 1000))
    monkeypatch.setattr(planning, "free_bytes", lambda device: next(free))
    config = make_run()
    stopped(config, 3)
    trained = 4 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(config.model).parameters())
    assert set(used) == {9_000_000 - 3 * trained}
    used.clear()
    train(changed(config, resume="auto"))
    assert set(used) == {9_000_000 - 3 * trained}
    state = torch.load(tmp_path / "out" / "checkpoints" / "step-00000006" / "training.pt", weights_only=True)
    assert state["planning"]["free_bytes"] == 9_000_000 - 3 * trained and state["planning"]["constants"]["source"]


def test_an_evaluation_does_not_hold_up_a_stop_and_is_made_when_the_run_goes_on(make_run, tmp_path) -> None:
    options = {"eval_fraction": 0.5, "eval_every_steps": 3, "tokens_per_step": 60}
    original, calls = TreeEngine.logprobs, []

    def logprobs(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == per_evaluation + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    whole, parted = (make_run(**options, output=str(tmp_path / each)) for each in ("whole", "parted"))
    per_evaluation = len(Trainer(whole).prepared.eval_steps)
    assert per_evaluation > 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TreeEngine, "logprobs", logprobs)
        with pytest.raises(Interrupted, match="stopped after step 3 of 6; all of it is saved"):
            train(parted)
    assert len(calls) == per_evaluation + 1
    assert [record["step"] for record in records(tmp_path / "parted") if record["kind"] == "eval"] == [0]
    train(whole)
    train(changed(parted, resume="auto"))
    kept = [
        [record for record in what_must_agree(tmp_path / each)["records"] if record["kind"] != "end"]
        for each in ("whole", "parted")
    ]
    assert differences(*kept) == []
