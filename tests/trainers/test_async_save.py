"""`async_save`: steps go on while a checkpoint is brought to the disk, and the promises stay."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import StopAt, differences, make_trainer, outcome, saved_steps
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as distributed_load
from transformers import TrainerCallback

from treetrain.trainers import checkpoints
from treetrain.trainers.checkpoints import CheckpointNotWritten, read_manifest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    trainer = make_trainer(folder, save_total_limit=None)
    trainer.train()
    return folder, outcome(trainer)


class Held:
    """`hashes` that waits until a step is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.within = threading.Event(), []
        self.hashes = checkpoints.hashes
        monkeypatch.setattr(checkpoints, "hashes", self)

    def __call__(self, *args: Any) -> dict[str, str]:
        self.within.append(threading.current_thread() is threading.main_thread())
        assert self.released.wait(60), "the run has waited for the disk"
        return self.hashes(*args)


class Releases(TrainerCallback):
    def __init__(self, held: Held, folder: Path, step: int) -> None:
        self.held, self.folder, self.step, self.seen = held, folder, step, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.seen = sorted(saved_steps(self.folder))
            self.held.released.set()


def test_a_step_does_not_wait_for_the_disk_and_the_checkpoint_is_that_of_its_own_step(
    undisturbed, tmp_path, monkeypatch
) -> None:
    held, folder = Held(monkeypatch), tmp_path / "out"
    release = Releases(held, folder, 3)
    trainer = make_trainer(folder, async_save=True, save_total_limit=None, callbacks=(release,))
    trainer.train()
    assert release.seen == [], "checkpoint-2 waited, and step 3 did not"
    assert held.within == [False] * 6 and sorted(saved_steps(folder)) == [2, 4, 6, 8, 10, 12]
    assert differences(outcome(trainer), undisturbed[1]) == []
    for step in saved_steps(folder):
        checkpoints.check_files(folder / f"checkpoint-{step}")
        of_both = [read_manifest(each / f"checkpoint-{step}")["files"] for each in (folder, undisturbed[0])]
        assert of_both[0]["model.safetensors"] == of_both[1]["model.safetensors"]


@pytest.mark.parametrize(("steps", "lost", "kept"), [(6, 4, {2}), (4, 4, {2})])
def test_an_error_of_the_disk_rises_at_the_next_checkpoint_or_at_the_end(
    steps: int, lost: int, kept: set[int], tmp_path, monkeypatch
) -> None:
    def failing(folder: Path, *args: Any) -> dict[str, str]:
        if folder.name == f"checkpoint-{lost}":
            raise OSError(28, "No space left on device")
        return hashes(folder, *args)

    hashes = checkpoints.hashes
    monkeypatch.setattr(checkpoints, "hashes", failing)
    trainer = make_trainer(tmp_path / "out", async_save=True, max_steps=steps)
    with pytest.raises(
        CheckpointNotWritten, match=r"checkpoint-4 could not .*No space left.* is .*checkpoint-2\. Make"
    ):
        trainer.train()
    assert {*saved_steps(tmp_path / "out")} == kept and not (tmp_path / "out" / checkpoints.WORKING).exists()
    assert trainer.state.global_step == steps


def test_a_run_that_is_stopped_ends_when_its_checkpoint_is_complete(undisturbed, tmp_path, monkeypatch, capfd) -> None:
    class Slow(Held):
        def __call__(self, *args: Any) -> dict[str, str]:
            self.released.wait(0.3)
            return self.hashes(*args)

    class Tracker(TrainerCallback):
        """Looks at what is saved when it closes its files, before the message that all is saved."""

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen = {*saved_steps(folder)}

    Slow(monkeypatch)
    folder, tracker = tmp_path / "out", Tracker()
    with pytest.raises(SystemExit) as stopped:
        make_trainer(folder, async_save=True, callbacks=(StopAt(5), tracker)).train()
    assert stopped.value.code == 143 and tracker.seen == {*saved_steps(folder)} == {4, 5}
    assert "all of it is saved in" in capfd.readouterr().err
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=True)
    assert differences(outcome(trainer), undisturbed[1]) == []


def test_the_best_checkpoint_is_loaded_at_the_end_when_it_is_complete(tmp_path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    found = []
    for name, later in (("sync", False), ("async", True)):
        trainer = make_trainer(tmp_path / name, async_save=later, **best)
        trainer.train()
        found.append(outcome(trainer) | {"steps": sorted(saved_steps(tmp_path / name))})
    assert differences(*found) == []


def test_a_checkpoint_outside_of_training_is_complete_when_it_returns(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out", async_save=True, max_steps=2)
    trainer.train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    trainer._save_checkpoint(trainer.model, None)
    checkpoints.check_files(tmp_path / "out" / "checkpoint-2")


def test_shards_are_copied_before_they_change(tmp_path) -> None:
    weight, later = torch.arange(4.0), []
    with checkpoints._staged(later):
        torch.distributed.checkpoint.save({"w": weight}, storage_writer=FileSystemWriter(tmp_path / "shards"))
    assert not (tmp_path / "shards" / ".metadata").exists()
    weight.zero_()
    for write in later:
        write(None)
    read = {"w": torch.empty(4)}
    distributed_load(read, storage_reader=FileSystemReader(tmp_path / "shards"))
    assert torch.equal(read["w"], torch.arange(4.0))
    shutil.rmtree(tmp_path / "shards")
