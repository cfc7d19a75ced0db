"""Faults at random moments: full disks, torn, altered and foreign files, NaN. Nothing is lost or touched in vain."""

import io
import math
import os
import random
import resource
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import FolderBefore, SafeTrainer, StopAt, differences, make_trainer, outcome, saved_steps
from test_not_finite import Breaks, poisons
from transformers import TrainerCallback

from treetrain.trainers.checkpoint_files import TornCheckpoint, check_files, newest_first
from treetrain.trainers.checkpoints import CheckpointNotWritten
from treetrain.trainers.run_folder import FolderRefused

STEPS = 8
FOREIGN = ("notes.txt", ".writing/theirs", "kept/checkpoint-2/model.safetensors", "runs/events", "rollouts.jsonl")
FAULTS = ("full", "torn", "altered", "foreign", "nan")


class At(TrainerCallback):
    """Does something at the beginning of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            self.act()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed") / "out", max_steps=STEPS)
    trainer.train()
    return outcome(trainer)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those of ours that are as they were written, the newest first; their weights are finite."""
    from safetensors.torch import load_file

    found = []
    for path in newest_first(folder):
        try:
            check_files(path)
        except (TornCheckpoint, FolderRefused):
            continue
        assert all(bool(each.isfinite().all()) for each in load_file(path / "model.safetensors").values()), path
        found.append(path)
    return found


def start(folder: Path, resume: Any, **settings: Any) -> Any:
    trainer = make_trainer(folder, max_steps=STEPS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def stop(folder: Path, step: int) -> None:
    with pytest.raises(SystemExit):
        start(folder, None, callbacks=(StopAt(step),))


def full(folder: Path, draw: random.Random) -> tuple[Any, set[str]]:
    """The disk is full from some step on, for a file of some size."""
    step, size = draw.randrange(1, STEPS + 1), draw.choice([0, 500, 3000, 9000, 30_000])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # what pytest captures goes to a file too, which could not grow
        with redirect_stdout(io.StringIO()), pytest.raises(CheckpointNotWritten, match="could not be written"):
            start(
                folder,
                None,
                callbacks=(At(step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))),),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saved = (step - 1) // 2 * 2
    assert max(saved_steps(folder), default=0) == saved
    return start(folder, True), set()


def damage(folder: Path, draw: random.Random, kind: str) -> tuple[Any, set[str]]:
    """A file of the newest checkpoint is changed behind our back; the one before it is resumed."""
    stop(folder, draw.randrange(3, STEPS))
    newest, older = list(newest_first(folder))[:2]
    file = draw.choice([path for path in newest.iterdir() if path.stat().st_size > 1])
    size = file.stat().st_size
    if kind == "torn":
        os.truncate(file, draw.randrange(0, size))
    else:
        with file.open("r+b") as opened:
            at = draw.randrange(size)
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ (1 << draw.randrange(8))]))
    if file.name == "treetrain.txt":  # the mark itself: nobody knows then whose this is
        with pytest.raises(FolderRefused, match="which treetrain did not write"):
            start(folder, True)
        file.write_text("Written by treetrain, which may replace or delete this folder.\n")
    assert whole_checkpoints(folder)[-1] == older or file.name == "treetrain.txt"
    return start(folder, True), set()


def foreign(folder: Path, draw: random.Random) -> tuple[Any, set[str]]:
    """Something of others lies where the run would write: refused before the run, or found while it runs."""
    name = draw.choice(["checkpoint-6/theirs", "checkpoint-99/theirs", "checkpoint-6", "inside", "during"])
    if name == "during":
        step = draw.choice([2, 4, 6])
        path = folder / f"checkpoint-{step}" / "theirs"
        act = At(step, lambda: (path.parent.mkdir(), path.write_text("theirs")))
        with pytest.raises(CheckpointNotWritten, match="was not written by treetrain"):
            start(folder, None, callbacks=(act,))
    else:
        stop(folder, draw.randrange(3, 6))
        path = next(iter(newest_first(folder))) / "theirs" if name == "inside" else folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    before = FolderBefore(folder)
    with pytest.raises(FolderRefused, match="move it away"):
        start(folder, True)
    assert before.changes() in ([], [".treetrain/lock"])  # the lock is ours
    aside = folder.with_name("aside")
    (path.parent if path.parent != folder and name != "inside" else path).rename(aside)
    trainer = start(folder, True) if saved_steps(folder) else start(folder, None)
    assert (aside if aside.is_file() else aside / "theirs").read_text() == "theirs"
    return trainer, set()


def nan(folder: Path, draw: random.Random) -> tuple[Any, set[str]]:
    """A weight becomes infinite, or gradients are NaN so often that the run stops."""
    step = draw.randrange(1, STEPS + 1)
    if draw.random() < 0.5:
        with pytest.raises(FloatingPointError, match="the weights are not finite"):
            start(folder, None, save_total_limit=1, callbacks=(Breaks(step),))
        assert max(saved_steps(folder), default=0) == (step - 1) // 2 * 2
        return start(folder, True), set()
    value = draw.choice([math.nan, math.inf, -math.inf])
    first = draw.randrange(1, STEPS - 2)
    kind = poisons(SafeTrainer, (first, first + 1, first + 2), value)
    with pytest.raises(FloatingPointError, match="3 steps in a row had a NaN or infinite gradient"):
        start(folder, None, save_total_limit=1, kind=kind)
    assert max(saved_steps(folder)) == first + 2
    return start(folder, True, kind=kind), {"poisoned"}


def check_fault(fault: str, seed: int, folder: Path, expected: dict[str, Any]) -> None:
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for name in FOREIGN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"what is in {name}")
    before = FolderBefore(folder)
    cases = {"full": full, "foreign": foreign, "nan": nan}
    trainer, kind = cases[fault](folder, draw) if fault in cases else damage(folder, draw, fault)
    assert before.changes() == []
    assert trainer.state.global_step == STEPS and whole_checkpoints(folder)[0].name == f"checkpoint-{STEPS}"
    found = outcome(trainer)
    if kind:  # three of its steps were skipped
        assert (
            all(bool(torch.isfinite(each).all()) for each in found["weights"].values())
            and trainer.skipped_steps.total == 3
        )
    else:
        assert differences(found, expected) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["full", "torn", "nan"])
def test_a_fault_loses_nothing_and_touches_nothing_foreign(fault: str, undisturbed, tmp_path) -> None:
    check_fault(fault, 1, tmp_path / "out", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fifty_faults_lose_nothing_and_touch_nothing_foreign(fault: str, undisturbed, tmp_path) -> None:
    for seed in range(10):
        check_fault(fault, 100 + seed, tmp_path / str(seed) / "out", undisturbed)
