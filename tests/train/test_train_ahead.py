"""The next step's tree is built while a device works on this one; nothing else of a run changes by it."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import changed, stopped
from safetensors.torch import load_file
from small_runs import records

from treetrain.engine.engine import TreeEngine
from treetrain.errors import DataError
from treetrain.train import loop as loop_module
from treetrain.train.ahead import Ahead
from treetrain.train.config import TrainConfig
from treetrain.train.loop import TrainLoop
from treetrain.train.rollouts import Rollouts
from treetrain.train.trainer import train
from treetrain.train.updates import Updates
from treetrain.tree.token_tree import TokenTree

RUN_SETTINGS = {"steps": 4, "report": False}
"""Of `make_config`."""
SEVERAL = {"loss": "grpo", "updates_per_batch": 2, "minibatches": 2, "steps": 6}

RUNS: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "sft": ({}, [False, True, True, True]),
    "row by row": ({"execution": "linear"}, [False, True, True, True]),
    "in two calls": ({"tokens_per_call": 60}, [False, True, True, True]),
    "evaluated": ({"eval_fraction": 0.3, "eval_every_steps": 1}, [False, True, True, True]),
    # The old policy of a batch is the one before its first step.
    "several updates": (SEVERAL, [False, True, True, True, False, True]),
    "the same rows in every batch": (SEVERAL | {"tokens_per_step": 10_000}, [False, True, True, True, False, True]),
    # What follows is known at the end of a batch alone, and there the old policy is not.
    "a policy that may go too far": (SEVERAL | {"target_kl": 1e9}, [False] * 6),
}
"""Settings, and which of the steps find their trees made."""


def outcome(config: TrainConfig) -> tuple[Any, ...]:
    """All numbers that a run comes to, and its weights."""
    result = train(config)
    shown = [{k: v for k, v in step.items() if "second" not in k and "memory" not in k} for step in records(result)]
    return shown, result.losses, result.eval_nll, load_file(Path(config.output) / "model.safetensors")


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Bit by bit."""
    assert one[:3] == other[:3]
    assert one[3].keys() == other[3].keys() and all(torch.equal(one[3][name], other[3][name]) for name in one[3])


@pytest.mark.parametrize("name", RUNS)
def test_trees_that_are_built_ahead_change_no_bit_of_a_run(make_config, monkeypatch, tmp_path, name) -> None:
    settings, expected = RUNS[name]
    found, take = [], Ahead.take

    def noted(self, update):
        calls = take(self, update)
        found.append(calls is not None)
        return calls

    monkeypatch.setattr(Ahead, "take", noted)
    ahead = outcome(make_config(**settings, output=str(tmp_path / "ahead")))
    assert found == expected
    monkeypatch.setattr(Ahead, "build", lambda self, update: None)
    assert_same(ahead, outcome(make_config(**settings, output=str(tmp_path / "plain"))))
    assert found[len(expected) :] == [False] * len(expected)


def test_the_next_tree_is_built_before_the_device_is_waited_for_and_before_the_update(make_config, monkeypatch) -> None:
    events: list[str] = []

    def note(target: Any, name: str, event: str) -> None:
        original = getattr(target, name)

        def noted(*args, **kwargs):
            done = original(*args, **kwargs)
            events.append(event)
            return done

        monkeypatch.setattr(target, name, noted)

    note(TreeEngine, "forward_backward", "queued")
    note(loop_module, "prepare", "tree")
    note(loop_module, "_synchronise", "waited")
    note(TrainLoop, "_update", "updated")
    train(make_config(steps=3))
    step = ["queued", "tree", "waited", "updated", "waited"]
    assert events == ["tree", *step, *step, *[event for event in step if event != "tree"]]


def test_an_engine_is_given_the_tree_that_was_built(make_config, monkeypatch) -> None:
    original, given = TreeEngine.forward_backward, []

    def noted(self, batch, *args, **kwargs):
        given.append(batch)
        return original(self, batch, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", noted)
    train(make_config(steps=2))
    assert all(isinstance(batch, TokenTree) for batch in given) and len(given) == 2
    assert all(batch.num_tokens < batch.num_flat_tokens for batch in given)
    train(make_config(steps=2, execution="linear", overwrite=True))
    assert all(batch.num_tokens == batch.num_flat_tokens for batch in given[2:]) and len(given) == 4


@pytest.mark.parametrize("settings", [{}, {"tokens_per_call": 60}, SEVERAL], ids=["sft", "two calls", "updates"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been_built(make_config, monkeypatch, tmp_path, settings):
    config = make_config(**{"steps": 5} | settings, checkpoint_every_steps=2, output=str(tmp_path / "stopped"))
    calls = 2 if "tokens_per_call" in settings else 1
    stopped(config, 3 * calls, signal.SIGTERM)
    gone_on = outcome(changed(config, resume="auto"))
    monkeypatch.setattr(Ahead, "build", lambda self, update: None)
    assert_same(gone_on, outcome(changed(config, output=str(tmp_path / "whole"))))


def test_what_is_wrong_with_the_next_rows_is_told_by_the_next_step(make_config, monkeypatch) -> None:
    original, asked, bad = Rollouts.rows, [], []

    def rows(self, numbers):
        asked.append(numbers)
        if len(asked) == 3:  # once for each of two steps; this is for the third, ahead
            bad.extend(numbers.tolist())
        if bad and np.array_equal(numbers, bad):
            raise DataError("a line that is no row")
        return original(self, numbers)

    monkeypatch.setattr(Rollouts, "rows", rows)
    config = make_config()
    with pytest.raises(DataError, match="a line that is no row"):
        train(config)
    assert [step["step"] for step in records(config.output)] == [1, 2] and len(asked) == 4


def test_nothing_is_built_behind_the_last_step(make_config, monkeypatch) -> None:
    built, build = [], Ahead.build

    def noted(self, update):
        built.append((update.batch, update.number, update.minibatch))
        build(self, update)

    monkeypatch.setattr(Ahead, "build", noted)
    train(make_config(steps=None, epochs=2))
    assert built == [(batch, 1, 1) for batch in range(1, 6)]


def test_the_step_that_follows_is_told_beforehand_where_it_does_not_depend_on_the_running_one(make_config) -> None:
    from treetrain.train.trainer import Trainer

    for target, expected in ((None, 7), (0.1, 1)):
        config = make_config(loss="grpo", updates_per_batch=2, minibatches=2, target_kl=target, steps=None, epochs=1)
        plan = Trainer(config).prepared.plan
        updates, told, walked = Updates(config, plan, 8), [], []
        for update in updates:
            walked.append(update)
            told.append(updates.following())
            updates.advance(update, None)
            if len(walked) == 8:
                break
        pairs = [(one, other) for one, other in zip(told, walked[1:]) if one is not None]
        assert len(pairs) == expected and all(one.rows.tolist() == other.rows.tolist() for one, other in pairs)
        assert all((a.batch, a.number, a.minibatch) == (b.batch, b.number, b.minibatch) for a, b in pairs)
        assert told[-1] is not None or updates.at_end
