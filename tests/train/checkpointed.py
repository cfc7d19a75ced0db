"""Runs with checkpoints, for tests of what becomes of them."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from branching import branching_rows, write_rows
from small_runs import small_run

from treetrain.engine.engine import TreeEngine
from treetrain.train.config import TrainConfig
from treetrain.train.signals import Interrupted
from treetrain.train.trainer import train

SETTINGS = {"steps": 6, "checkpoint_every_steps": 2}


@pytest.fixture
def make_run(make_config):
    """Makes the settings of a run with checkpoints."""
    return partial(make_config, **SETTINGS)


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """A signal arrives while a step runs."""
    original, calls = TreeEngine.forward_backward, []

    def forward_backward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", forward_backward)


def stopped(config: TrainConfig, step: int, number: int = signal.SIGTERM) -> str:
    """Run until a signal arrives in a step; returns what is said."""
    with pytest.MonkeyPatch.context() as patched:
        stop_in_step(patched, step, number)
        with pytest.raises(Interrupted) as stop:
            train(config)
    assert stop.value.exit_code == 128 + number
    return str(stop.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def changed(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig(**config.as_dict() | changes)


@pytest.fixture(scope="session")
def two(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that was stopped after step 5; it has checkpoints of steps 4 and 5."""
    folder = tmp_path_factory.mktemp("two")
    data = write_rows(folder / "rows.jsonl", branching_rows())
    config = TrainConfig(**small_run(data, model_folder, folder / "out") | SETTINGS)
    stopped(config, 5)
    assert names(folder / "out") == ["step-00000004", "step-00000005"]
    return config


@pytest.fixture
def copied(two: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same, to be damaged."""
    shutil.copytree(two.output, tmp_path / "copy")
    return changed(two, output=str(tmp_path / "copy"), resume="auto")
