"""A run can be taken apart at any step boundary and go on from there, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import branching_rows, write_rows

from treetrain.train.config import TrainConfig
from treetrain.train.loop import TrainLoop
from treetrain.train.metrics import MetricsFile
from treetrain.train.trainer import Trainer

RUN_SETTINGS = {"steps": 5}
"""Of `make_config`."""


class Moments:
    """Runs a loop and keeps its state and weights at every step boundary."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        trainer = Trainer(config)
        self.model = trainer._load()
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsFile(folder)
        self.loop: TrainLoop = trainer._loop(self.model, trainer._engine(self.model), self.metrics)
        self.kept: dict[int, tuple[dict, dict]] = {}
        self.loop._step_done = self._keep  # type: ignore[method-assign]

    def _keep(self) -> None:
        self.kept[self.loop.step] = copy.deepcopy((self.loop.state_dict(), self.model.state_dict()))

    def go_on_from(self, moment: tuple[dict, dict]) -> "Moments":
        state, weights = copy.deepcopy(moment)
        self.model.load_state_dict(weights)
        self.loop.load_state_dict(state)
        return self

    def run(self) -> "Moments":
        self.loop.run()
        self.metrics.__exit__(None, None, None)
        return self


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo over epochs": {"loss": "grpo", "schedule": "constant", "tokens_per_step": 200},
    "updates, minibatches, a reference": {
        "loss": "grpo",
        "updates_per_batch": 3,
        "minibatches": 2,
        "kl": 0.1,
        "target_kl": 0.01,
    },
    "evaluated": {"eval_fraction": 0.3, "eval_every_steps": 2},
    "averaged, in several calls": {"ema_decay": 0.7, "tokens_per_call": 60, "schedule": "wsd", "decay_steps": 2},
    "best kept": {"eval_fraction": 0.3, "eval_every_steps": 1, "keep_best": True, "early_stop_patience": 9},
    "muon": {"optimizer": "muon", "schedule": "linear"},
    "adafactor, adapter": {"optimizer": "adafactor", "lora_rank": 2},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_goes_on_from_any_step_as_if_nothing_had_happened(make_config, tmp_path, name) -> None:
    config = make_config(**SETTINGS[name])
    whole = Moments(config, tmp_path / "whole").run()
    assert sorted(whole.kept) == [1, 2, 3, 4, 5]
    for step in (1, 4):
        rest = Moments(config, tmp_path / f"rest {step}").go_on_from(whole.kept[step]).run()
        assert sorted(rest.kept) == list(range(step + 1, 6))
        assert rest.loop.progress.losses == whole.loop.progress.losses
        assert rest.loop.progress.evaluations == whole.loop.progress.evaluations
        assert rest.loop.progress.flat_tokens == whole.loop.progress.flat_tokens
        assert same(whole.model.state_dict(), rest.model.state_dict())
        assert same(without_times(whole.kept[5][0]), without_times(rest.kept[5][0]))


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    progress = {name: value for name, value in state["progress"].items() if not name.endswith("seconds")}
    return state | {"progress": progress}


def test_the_state_of_another_run_is_refused(make_config, tmp_path) -> None:
    moments = Moments(make_config(steps=1), tmp_path / "one").run()
    state, weights = moments.kept[1]
    with pytest.raises(ValueError, match="other settings"):
        moments.go_on_from(({"progress": state["progress"]}, weights))


def test_skipped_steps_are_the_first_ones_of_the_same_run(make_config, tmp_path) -> None:
    plan = Trainer(make_config(data=(write_rows(tmp_path / "more.jsonl", branching_rows(groups=7)),))).prepared.plan
    every = [(epoch, rows.tolist()) for epoch, rows in plan.steps(11)]
    for skip in range(12):
        assert [(epoch, rows.tolist()) for epoch, rows in plan.steps(11, skip=skip)] == every[skip:]
