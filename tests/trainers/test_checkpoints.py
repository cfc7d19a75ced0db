"""SafeCheckpointsMixin in one process: what is written, what is resumed, what is refused."""

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safe_runs import (
    SafeTrainer,
    StopAt,
    differences,
    kill_before_call,
    make_trainer,
    outcome,
    saved_steps,
)
from transformers import Trainer, TrainerCallback

from treetrain.trainers import checkpoints
from treetrain.trainers.checkpoints import CheckpointNotWritten, SafeCheckpointsMixin, TornCheckpoint
from treetrain.trainers.run_folder import FolderRefused


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed") / "out")
    trainer.train()
    return outcome(trainer)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 7 of 12, with checkpoints 6 and 7."""
    folder = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(SystemExit):
        make_trainer(folder, callbacks=(StopAt(7),)).train()
    return folder


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "out")


def resume(folder: Path, which: Any = True, **settings: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, **settings)
    trainer.train(resume_from_checkpoint=which)
    return outcome(trainer)


def newest(folder: Path) -> str:
    return next(iter(checkpoints.newest_first(folder))).name


def damage(file: Path, kind: str) -> None:
    if kind == "missing":
        file.unlink()
    elif kind == "torn":
        os.truncate(file, file.stat().st_size // 2)
    else:
        bits = bytearray(file.read_bytes())
        bits[len(bits) // 2] ^= 1
        file.write_bytes(bits)


# ---- Resuming


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [4, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 7))])
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(step: int, undisturbed, tmp_path, capfd) -> None:
    # Steps 5 and 10 end epochs; 1, 4 and 7 are within one, and within the three steps between two logs.
    folder = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        make_trainer(folder, callbacks=(StopAt(step),)).train()
    assert stopped.value.code == 143
    place = folder / f"checkpoint-{step}"
    assert f"SIGTERM: stopped after step {step} of 12; all of it is saved in {place}. Go on" in capfd.readouterr().err
    assert max(saved_steps(folder)) == step
    assert differences(resume(folder), undisturbed) == []


gc.freeze()  # accelerate collects garbage before every run, and all that was imported is none
SETTINGS: dict[str, dict[str, Any]] = {
    # As if a higher loss were better, so that the patience of early stopping runs out little by little.
    "evaluation": {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "early": True,
        "save_strategy": "epoch",
    },
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    },
    "cosine": {"lr_scheduler_type": "cosine", "optim": "adamw_torch", "gradient_accumulation_steps": 3, "max_steps": 8},
    "workers": {"max_steps": 7, "dataloader_num_workers": 1, "gradient_accumulation_steps": 1, "optim": "sgd"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluation", "cosine", "workers", "best"])
def test_the_same_holds_for_other_settings(name: str, tmp_path) -> None:
    settings = SETTINGS[name]
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path / "out", callbacks=(StopAt(5),), **settings).train()
    found, expected = resume(tmp_path / "out", **settings), outcome(whole)
    assert differences(found, expected) == []


@pytest.mark.slow
def test_a_checkpoint_at_the_end_of_an_epoch_has_the_evaluation_that_follows_it(tmp_path) -> None:
    settings = SETTINGS["evaluation"] | {"save_strategy": "steps", "save_steps": 5, "save_total_limit": None}
    whole = make_trainer(tmp_path / "out", **settings)
    whole.train()
    assert {*saved_steps(tmp_path / "out")} == {5, 10, 12}
    for step in (10, 5):
        found = resume(tmp_path / "out", str(tmp_path / "out" / f"checkpoint-{step}"), **settings)
        assert differences(found, outcome(whole)) == []


@pytest.mark.slow
def test_what_transformers_itself_forgets_is_what_the_test_above_sees(tmp_path) -> None:
    # The comparison can fail: plain transformers loses the averages and the loss since the last log.
    make_trainer(tmp_path / "whole", kind=Trainer, save_steps=4).train()
    whole = make_trainer(tmp_path / "out", kind=Trainer, save_steps=4)
    whole.train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    again = make_trainer(tmp_path / "out", kind=Trainer, save_steps=4)
    again.train(resume_from_checkpoint=True)
    found = differences(outcome(again), outcome(whole))
    assert any("/averages/" in each for each in found) and any("/history/" in each for each in found)
    assert not any("/weights/" in each for each in found)


@pytest.mark.slow
def test_true_begins_at_step_0_where_there_is_no_checkpoint_and_says_so(undisturbed, tmp_path) -> None:
    with pytest.warns(RuntimeWarning, match="no checkpoint in .*out yet: the run begins at step 0"):
        assert differences(resume(tmp_path / "out"), undisturbed) == []


def test_a_run_that_is_complete_is_resumed_to_nothing(tmp_path) -> None:
    make_trainer(tmp_path / "out", max_steps=2).train()
    assert resume(tmp_path / "out", max_steps=2)["progress"][0] == 2


@pytest.mark.slow
def test_the_newest_checkpoint_is_the_last_one_written_not_the_one_with_the_highest_number(copied) -> None:
    trainer = make_trainer(copied, max_steps=2)  # another run in the same folder
    trainer.overwrite_output_dir = True
    trainer.train()
    assert saved_steps(copied) == {2: 5, 7: 4}
    assert newest(copied) == "checkpoint-2"


@pytest.mark.slow
def test_an_older_checkpoint_can_be_named(copied, undisturbed) -> None:
    assert differences(resume(copied, str(copied / "checkpoint-6")), undisturbed) == []


# ---- Torn and altered files


@pytest.mark.parametrize("kind", ["missing", "torn", "flipped"])
def test_every_damaged_file_is_recognised(kind: str, stopped, tmp_path) -> None:
    names = [path.name for path in (stopped / "checkpoint-7").iterdir()]
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "manifest.json"} < {*names}
    for name in names:
        copy = shutil.copytree(stopped / "checkpoint-7", tmp_path / name / "checkpoint-7")
        checkpoints.check_files(copy)
        damage(copy / name, kind)
        with pytest.raises(TornCheckpoint, match=name.replace(".", r"\.")):
            checkpoints.check_files(copy)


def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_the_one_before_it_resumed(copied, undisturbed) -> None:
    damage(copied / "checkpoint-7" / "optimizer.pt", "torn")
    with pytest.warns(RuntimeWarning, match=r"checkpoint-7: optimizer\.pt has SHA-256 [0-9a-f]{64}, .* was written"):
        assert differences(resume(copied), undisturbed) == []


def test_a_damaged_checkpoint_that_is_named_is_an_error(copied) -> None:
    damage(copied / "checkpoint-7" / "model.safetensors", "flipped")
    with pytest.raises(TornCheckpoint, match=r"model\.safetensors has SHA-256 [0-9a-f]{64}, [0-9a-f]{64} was written"):
        resume(copied, str(copied / "checkpoint-7"))


def test_a_checkpoint_of_plain_transformers_is_not_trusted(tmp_path) -> None:
    make_trainer(tmp_path / "out", kind=Trainer, max_steps=2).train()
    with pytest.raises(TornCheckpoint, match=r"no checkpoint is whole: .*checkpoint-2: manifest\.json is missing"):
        resume(tmp_path / "new", str(tmp_path / "out" / "checkpoint-2"))


def test_where_no_checkpoint_is_whole_the_run_does_not_begin(copied) -> None:
    for name in ("checkpoint-6", "checkpoint-7"):
        damage(copied / name / "scheduler.pt", "missing")
    with pytest.warns(RuntimeWarning), pytest.raises(TornCheckpoint, match=r"is whole \(and 1 more\): .*-7"):
        resume(copied)


def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(tmp_path) -> None:
    class Damage(TrainerCallback):
        def on_save(self, args, state, control, **_):
            damage(Path(state.best_model_checkpoint) / "model.safetensors", "flipped")

    trainer = make_trainer(tmp_path / "out", callbacks=(Damage(),), **SETTINGS["best"] | {"max_steps": 2})
    with pytest.raises(TornCheckpoint, match=r"model\.safetensors"):
        trainer.train()


# ---- Which checkpoints are kept


def test_the_newest_ones_are_kept_and_nothing_half_written(tmp_path) -> None:
    make_trainer(tmp_path / "out", save_total_limit=3, save_steps=1, max_steps=6).train()
    names = [".treetrain", "checkpoint-4", "checkpoint-5", "checkpoint-6"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert {path.name for path in (tmp_path / "out" / ".treetrain").iterdir()} == {"lock", "treetrain.txt"}


def test_the_newest_one_stays_beside_the_best_one(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out", **SETTINGS["best"] | {"learning_rate": 10.0})
    trainer.train()
    best = trainer.state.best_global_step
    assert best != 12 and {*saved_steps(tmp_path / "out")} == {best, 12}
    stored = json.loads((tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text())
    assert Path(stored["best_model_checkpoint"]).name == f"checkpoint-{best}" and stored["best_global_step"] == best


def test_older_ones_are_deleted_only_when_the_new_one_is_whole(tmp_path, monkeypatch) -> None:
    seen = []

    def watched(folder: Path, *args: Any) -> None:
        seen.append(sorted(saved_steps(folder)))
        for path in folder.glob("checkpoint-*"):
            checkpoints.check_files(path)
        rotate(folder, *args)

    rotate = checkpoints.rotate
    monkeypatch.setattr(checkpoints, "rotate", watched)
    make_trainer(tmp_path / "out", save_total_limit=1, max_steps=6).train()
    assert seen == [[2], [2, 4], [4, 6]] and [*saved_steps(tmp_path / "out")] == [6]


# ---- Kills within a save


every_or_some = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])


def kill_saves(trainer: Any, folder: Path, aside: Path, every: int) -> Iterator[None]:
    """Kill a save before every so-manieth file operation, until there are no more; the folder is set up anew."""
    shutil.copytree(folder, aside)
    for number in range(1, 1000, every):
        shutil.rmtree(folder)
        shutil.copytree(aside, folder)
        child = os.fork()
        if child == 0:
            kill_before_call(number)
            trainer._save_checkpoint(trainer.model, None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
        for path in folder.glob("checkpoint-*"):
            checkpoints.check_files(path)  # nothing that is named as a checkpoint is torn
        yield
        if status == 0:
            assert number > 20
            return


@every_or_some
def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_checkpoint(copied, every, tmp_path) -> None:
    trainer = make_trainer(copied, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)  # to step 12
    trainer.state.global_step = 13
    found = {newest(copied) for _ in kill_saves(trainer, copied, tmp_path / "aside", every)}
    assert found == {"checkpoint-12", "checkpoint-13"}


@pytest.mark.slow
@every_or_some
def test_a_save_over_a_checkpoint_of_the_same_step_survives_a_kill_before_any_file_operation(
    copied, every, tmp_path
) -> None:
    trainer = make_trainer(copied, max_steps=7)
    trainer.train(resume_from_checkpoint=True)
    assert all({*saved_steps(copied)} == {6, 7} for _ in kill_saves(trainer, copied, tmp_path / "aside", every))


# ---- Disks


class Room:
    """Files of this process may not grow beyond so many bytes: what a full disk does, without one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class Ballast:
    """A small disk, filled up to its last byte."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        with self.file.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def __exit__(self, *_: object) -> None:
        self.file.unlink()


class FullAt(TrainerCallback):
    def __init__(self, step: int, room: Any) -> None:
        self.step, self.room = step, room

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.step:
            self.room.__enter__()


def check_full_disk(folder: Path, room: Any, undisturbed: dict[str, Any]) -> None:
    try:
        with pytest.raises(CheckpointNotWritten) as told:
            make_trainer(folder, callbacks=(FullAt(5, room),)).train()
    finally:
        room.__exit__()
    text = str(told.value)
    assert "checkpoint-6 could not be written" in text and "MB are free there" in text
    assert f"the last good checkpoint is {folder / 'checkpoint-4'}" in text and "resume_from_checkpoint=True" in text
    assert {*saved_steps(folder)} == {2, 4} and not (folder / checkpoints.WORKING).exists()
    assert differences(resume(folder), undisturbed) == []


@pytest.mark.parametrize("size", [10_000, *(pytest.param(size, marks=pytest.mark.slow) for size in (1000, 40_000))])
def test_a_full_disk_is_an_error_that_names_the_last_good_checkpoint(size: int, undisturbed, tmp_path) -> None:
    check_full_disk(tmp_path / "out", Room(size), undisturbed)


@pytest.mark.slow
def test_a_real_full_disk_is_the_same(undisturbed, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes rights that this process does not have")
    try:
        check_full_disk(disk / "out", Ballast(disk / "ballast"), undisturbed)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_becomes_unwritable_is_such_an_error_too(tmp_path) -> None:
    class Blocks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                (tmp_path / "out" / checkpoints.WORKING).write_text("a file where the folder should be")

    with pytest.raises(
        CheckpointNotWritten, match=r"checkpoint-4 could not be written .* is .*checkpoint-2\. Make room"
    ):
        make_trainer(tmp_path / "out", callbacks=(Blocks(),)).train()


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_step(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / ".treetrain").write_text("a file where the folder should be")
    with pytest.raises(FolderRefused, match=r"out/\.treetrain was not made by treetrain.*move it away"):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- Signals, and what is refused


def test_a_signal_that_comes_after_the_last_step_is_delivered_after_training(tmp_path) -> None:
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **_):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(tmp_path / "out", max_steps=2, callbacks=(Late(),))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert {*saved_steps(tmp_path / "out")} == {2} and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_script_ends_with_the_exit_code_of_its_signal(tmp_path) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_trainer(tmp_path / "out", callbacks=(StopAt(1, signal.SIGINT),), save_strategy="no").train()
    assert stopped.value.code == 130 and {*saved_steps(tmp_path / "out")} == {1}


def test_another_number_of_samples_in_a_step_is_refused_with_both(copied) -> None:
    with pytest.raises(ValueError, match=r"a step took 4 samples \(on 1 ranks\) and now takes 6 samples"):
        resume(copied, gradient_accumulation_steps=3)


def test_a_checkpoint_without_the_optimizer_is_not_resumed(tmp_path) -> None:
    make_trainer(tmp_path / "out", max_steps=2, save_only_model=True).train()
    with pytest.raises(ValueError, match="with save_only_model=True it holds no optimiser state"):
        resume(tmp_path / "out")


def test_a_mixin_that_stands_after_the_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="must stand before the Trainer"):
        type("Wrong", (Trainer, SafeCheckpointsMixin), {})


def test_settings_that_cannot_be_made_safe_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda trainer: None)
    with pytest.raises(ValueError, match="save_on_each_node=True"):
        make_trainer(tmp_path / "out", save_on_each_node=True)
    with pytest.raises(ValueError, match="set hub_strategy='end'"):
        make_trainer(tmp_path / "out", push_to_hub=True)


def test_the_saved_model_loads_with_from_pretrained(stopped) -> None:
    model = transformers.Qwen3ForCausalLM.from_pretrained(stopped / "checkpoint-7")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert issubclass(SafeTrainer, Trainer)
