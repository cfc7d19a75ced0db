"""Which folders a run refuses, what it leaves alone in them, and the lock against a second run."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safe_runs import FolderBefore, StopAt, make_trainer, saved_steps
from transformers import TrainerCallback

from treetrain.trainers import checkpoints
from treetrain.trainers.arguments import TreeArguments
from treetrain.trainers.checkpoints import CheckpointNotWritten, SafeCheckpointsMixin
from treetrain.trainers.run_folder import LOCK, MARK, MARK_TEXT, OWN, FolderRefused, check_contents, check_name, locked

# ---- Names


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is blank"),
        ("  ", "is blank"),
        ("runs/ /x", "is blank"),
        ("runs\n", "control characters"),
        ("runs\x1b[31m", "control characters"),
        ("runs\x00", "control characters"),
        ("r" * 300, "more than 255 bytes"),
        ("/", "holds more than a run"),
        ("//tmp/..", "holds more than a run"),
        ("/tmp", "holds more than a run"),
        ("/usr", "holds more than a run"),
        ("/etc/run", "a folder of the system"),
        ("/usr/lib/python3/run", "a folder of the system"),
        ("/proc/self/run", "a folder of the system"),
        ("~", "holds more than a run"),
    ],
)
def test_a_name_that_is_no_folder_for_a_run_is_refused_before_any_work(name: str, why: str) -> None:
    with pytest.raises(FolderRefused, match=why) as told:
        TreeArguments(output_dir=os.path.expanduser(name), use_cpu=True, report_to="none")
    assert "output_dir" in str(told.value) and len(str(told.value)) <= 400


def test_files_links_to_nothing_and_other_users_folders_are_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "root").symlink_to("/")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in {
        "file": "is a file",
        "file/run": f"is in {tmp_path / 'file'}, which is a file",
        "link": "a link to .*nothing.*does not exist",
        "link/run": "a link to .*nothing.*does not exist",
        "loop": "a link",
        "root": "holds more than a run",
        "root/etc/run": "a folder of the system",
    }.items():
        with pytest.raises(FolderRefused, match=why):
            check_name(str(tmp_path / name))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(FolderRefused, match=f"no right to write in {tmp_path}"):
        check_name(str(tmp_path / "run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "loop", "root"]


def test_folders_for_runs_are_taken(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("runs/first", ".", "there", "link", "link/run", "a b", "läufe", "/dev/shm/run", "~/runs"):
        check_name(os.path.expanduser(name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


# ---- What is in the way


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(f"what is in {name}")


FOREIGN: dict[str, list[str]] = {
    "checkpoint of plain transformers": ["checkpoint-4/model.safetensors", "checkpoint-4/trainer_state.json"],
    "empty folder with its name": ["checkpoint-4/"],
    "file with its name": ["checkpoint-4"],
    "shards": ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
    "model": ["config.json"],
    "adapter": ["adapter_config.json"],
    "readme": ["README.md"],
    "own name": [".treetrain/notes"],
    "own name as a file": [".treetrain"],
}


@pytest.mark.parametrize("left", ["", "Written by tree"])
def test_a_mark_that_a_full_disk_cut_off_does_not_keep_a_run_from_starting_again(left: str, tmp_path) -> None:
    for names in ([], ["lock"]):
        fill(tmp_path / "out", [f"{OWN}/{MARK}", *(f"{OWN}/{name}" for name in names)])
        (tmp_path / "out" / OWN / MARK).write_text(left)
        make_trainer(tmp_path / "out", max_steps=1, save_strategy="no").train(resume_from_checkpoint=True)
        assert (tmp_path / "out" / OWN / MARK).read_text() == MARK_TEXT


@pytest.mark.parametrize("target", ["theirs", "nothing"])
@pytest.mark.parametrize("resume", [None, True])
def test_links_in_the_place_of_what_a_run_writes_are_refused_and_not_written_through(target, resume, tmp_path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / target
    fill(tmp_path, ["theirs"])
    if resume:
        make_trainer(out, max_steps=1).train()
    out.mkdir(exist_ok=True)
    (out / "config.json").symlink_to(elsewhere)
    trainer = make_trainer(out, max_steps=2)
    trainer.overwrite_output_dir = True
    for call in (lambda: trainer.train(resume_from_checkpoint=resume), trainer.save_model):
        with pytest.raises(FolderRefused, match=r"holds the link config\.json to .*take it away"):
            call()
    assert (tmp_path / "theirs").read_text() == "what is in theirs" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("resume", [None, True])
def test_a_folder_with_what_a_run_would_replace_is_refused_and_unchanged(name: str, resume: Any, tmp_path) -> None:
    out = tmp_path / "out"
    fill(out, FOREIGN[name])
    before = FolderBefore(out)
    with pytest.raises(FolderRefused) as told:
        check_contents(out, resume=resume, overwrites=False, models=[], how="--overwrite_output_dir true")
    assert FOREIGN[name][0].split("/")[0] in str(told.value) and len(str(told.value)) <= 400
    assert before.changes() == []


def test_what_no_run_replaces_is_never_touched(tmp_path) -> None:
    out = tmp_path / "out"
    fill(out, [".writing/mine", "notes.txt", "rollouts.jsonl", "runs/events", "checkpoints/x", "eval_results.json"])
    before = FolderBefore(out)
    trainer = make_trainer(out, save_total_limit=1, max_steps=4)
    trainer.train()
    trainer.save_model()
    assert before.changes() == [] and [*saved_steps(out)] == [4]


def test_the_folder_of_the_model_itself_is_refused(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "model", max_steps=1, save_strategy="no")
    trainer.model.save_pretrained(tmp_path / "model")
    trainer.model.config._name_or_path = str(tmp_path / "model")
    before = FolderBefore(tmp_path / "model")
    with pytest.raises(
        FolderRefused, match=r"is the folder of the model .*, which the run would overwrite: give a new"
    ):
        trainer.train()
    assert before.changes() == []


def test_a_finished_run_is_not_replaced_by_a_new_one(tmp_path) -> None:
    out = tmp_path / "out"
    make_trainer(out, max_steps=2).train()
    before = FolderBefore(out)
    with pytest.raises(
        FolderRefused, match=r"holds checkpoint-2 of an earlier run.*such as .*out-2, or allow it with tr"
    ):
        make_trainer(out, max_steps=4).train()
    with pytest.raises(FolderRefused, match="of an earlier run"):  # from another folder's checkpoint
        make_trainer(out, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-2"))
    assert before.changes() == []
    trainer = make_trainer(out, max_steps=4)
    trainer.overwrite_output_dir = True
    trainer.train()
    assert {*saved_steps(out)} == {2, 4}


def test_where_overwriting_is_allowed_foreign_checkpoints_are_moved_aside_and_never_pruned(tmp_path) -> None:
    out = tmp_path / "out"
    fill(out, ["checkpoint-2/model.safetensors", "checkpoint-3/weights", "checkpoint-4"])
    trainer = make_trainer(out, max_steps=4, save_total_limit=1)
    trainer.overwrite_output_dir = True
    with pytest.warns(RuntimeWarning, match="holds more than treetrain wrote"):
        trainer.train()
    assert [*saved_steps(out, whole=True)] == [4]
    theirs = [path for path in out.glob("*checkpoint*/*") if path.read_bytes().startswith(b"what is in")]
    kept = sorted(path.relative_to(out).as_posix() for path in theirs)
    assert kept == ["checkpoint-3/weights", "kept-checkpoint-2-before-1/model.safetensors"]
    assert (out / "kept-checkpoint-4-before-2").read_text() == "what is in checkpoint-4"


class Adds(TrainerCallback):
    """Puts a file of another into a folder of the run, after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            fill(self.path.parent, [self.path.name])


def test_a_checkpoint_with_a_file_of_another_is_not_pruned(tmp_path) -> None:
    out = tmp_path / "out"
    notes = out / "checkpoint-2" / "notes.txt"
    make_trainer(out, max_steps=6, save_total_limit=1, callbacks=(Adds(3, notes),)).train()
    assert notes.read_text() == "what is in notes.txt" and {*saved_steps(out)} == {2, 6}


def test_a_foreign_checkpoint_that_appears_during_the_run_is_not_replaced(tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointNotWritten, match=r"checkpoint-4 was not written by treetrain: move it away"):
        make_trainer(out, max_steps=6, callbacks=(Adds(3, out / "checkpoint-4" / "theirs"),)).train()
    assert [path.name for path in (out / "checkpoint-4").iterdir()] == ["theirs"] and {*saved_steps(out, True)} == {2}


# ---- Two runs


def hold(folder: Path, pipe: Any) -> None:
    with locked(folder):
        pipe.send("held")
        pipe.recv()


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, there))
    process.start()
    assert here.recv() == "held"
    with pytest.raises(FolderRefused, match=rf"another run writes to .* \(process {process.pid} on .* since 20"):
        make_trainer(tmp_path).train()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    make_trainer(tmp_path, max_steps=1).train()


def test_two_runs_of_one_process_cannot_share_a_folder_either(tmp_path) -> None:
    class Second(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with pytest.raises(FolderRefused, match="another run writes to"):
                make_trainer(tmp_path / "out").train()
            with locked(tmp_path / "other"):
                pass

    make_trainer(tmp_path / "out", max_steps=1, callbacks=(Second(),)).train()
    with locked(tmp_path / "out"), pytest.raises(FolderRefused), locked(tmp_path / "out"):
        pass


class Copies(TrainerCallback):
    """A backup of the folder while the run goes on, and what a second run says then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, ""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        shutil.copytree(self.folder, self.folder.with_name("backup"), dirs_exist_ok=True)
        command = [sys.executable, "-c", SECOND, self.folder]
        self.said = subprocess.run(command, capture_output=True, text=True).stdout


SECOND = """
import sys
from pathlib import Path
from treetrain.trainers.run_folder import FolderRefused, locked
try:
    with locked(Path(sys.argv[1])):
        print("held by two")
except FolderRefused as error:
    print(error)
"""


def test_the_lock_outlives_code_of_the_run_that_reads_its_file(tmp_path) -> None:
    copies = Copies(tmp_path / "out")
    make_trainer(tmp_path / "out", max_steps=1, callbacks=(copies,)).train()
    assert "another run writes to" in copies.said


def test_a_child_of_a_killed_run_does_not_keep_its_lock(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def hold_with_child() -> None:
        with locked(tmp_path):
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            there.send(child)
            time.sleep(60)

    process = context.Process(target=hold_with_child)
    process.start()
    child = here.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        with locked(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_is_unchanged(kind, tmp_path) -> None:
    with locked(tmp_path / "out"):
        lock = tmp_path / "out" / OWN / LOCK
    lock.unlink()
    (tmp_path / "foreign").write_text("theirs")
    make = {
        "link": lambda: lock.symlink_to(tmp_path / "foreign"),
        "hard link": lambda: lock.hardlink_to(tmp_path / "foreign"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }
    make[kind]()
    for _ in range(2):  # the first refusal holds no lock
        with pytest.raises(FolderRefused, match=r"is not the lock file that treetrain needs.*move it away"):
            make_trainer(tmp_path / "out").train()
    assert (tmp_path / "foreign").read_text() == "theirs"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch) -> None:
    import errno
    import fcntl

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", none)
    with pytest.warns(RuntimeWarning, match="its file system has no locks"), locked(tmp_path):
        pass


def test_a_run_that_was_refused_leaves_no_trace(tmp_path) -> None:
    fill(tmp_path, ["checkpoint-2/x"])
    with pytest.raises(FolderRefused):
        make_trainer(tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_stopped_run_is_resumed_beside_what_is_not_its_own(tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        make_trainer(out, max_steps=4, callbacks=(StopAt(3),)).train()
    fill(out, ["notes.txt", "logs/x"])
    before = FolderBefore(out, ["notes.txt", "logs/x"])
    make_trainer(out, max_steps=4, save_total_limit=1).train(resume_from_checkpoint=True)
    assert before.changes() == [] and [*saved_steps(out)] == [4]
    assert issubclass(type(make_trainer(out)), SafeCheckpointsMixin)


# ---- One folder for all ranks


class SecondRank:
    """A rank without a process group, whose first rank has written a lock."""

    def __init__(self, written: bytes) -> None:
        self.args, self.written = SimpleNamespace(process_index=1), written

    def _together(self, work: Any) -> list[Any]:
        return [self.written, work()]


def test_a_rank_that_sees_another_folder_than_the_first_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "SEEN_WITHIN", 0.2)
    rank: Any = SecondRank(b"process 7 on node1")
    for content in (None, b"process 9 on node2"):
        if content is not None:
            (tmp_path / OWN).mkdir()
            (tmp_path / OWN / LOCK).write_bytes(content)
        with pytest.raises(
            FolderRefused, match=r"is not the folder of the first rank, which wrote 'process 7 on node1'"
        ):
            SafeCheckpointsMixin._check_shared(rank, tmp_path)
    (tmp_path / OWN / LOCK).write_bytes(rank.written)
    SafeCheckpointsMixin._check_shared(rank, tmp_path)
