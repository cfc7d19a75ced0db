"""Checkpoints on disks that are full, and files that are torn, half written or in use."""

import os
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from checkpointed import changed, names
from rich.console import Console

from support.kills import differences, steps_done, what_must_agree
from treetrain.engine.engine import TreeEngine
from treetrain.train import checkpoint_files
from treetrain.train.config import TrainConfig
from treetrain.train.signals import Interrupted
from treetrain.train.trainer import Trainer, train

FILES = ["config.json", "manifest.json", "metrics.jsonl", "model.safetensors", "training.pt"]


def damage(file: Path, kind: str) -> None:
    if kind == "missing":
        file.unlink()
    elif kind == "torn":
        os.truncate(file, file.stat().st_size // 2)
    else:
        bits = bytearray(file.read_bytes())
        bits[len(bits) // 2] ^= 1
        file.write_bytes(bits)


def test_a_checkpoint_holds_these_files(two: TrainConfig) -> None:
    inside = Path(two.output) / "checkpoints" / "step-00000005"
    assert sorted(path.name for path in inside.iterdir()) == FILES


@pytest.mark.parametrize("kind", ["missing", "torn", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_it_taken(two, name: str, kind: str, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(Path(two.output) / "checkpoints", folder)
    damage(folder / "step-00000005" / name, kind)
    found, torn = checkpoint_files.newest(folder)
    assert found is not None and found.step == 4
    assert len(torn) == 1 and "step-00000005" in torn[0] and name in torn[0]
    # Before the data is read only what costs nothing is looked at.
    quickly, _ = checkpoint_files.newest(folder, contents=False)
    assert quickly is not None and quickly.step == (5 if kind == "flipped" and name != "manifest.json" else 4)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(copied, tmp_path, capsys) -> None:
    damage(tmp_path / "copy" / "checkpoints" / "step-00000005" / "training.pt", "flipped")
    result = Trainer(copied, console=Console(width=1000)).run()
    said = capsys.readouterr().out
    assert "not whole, left out: " in said and "training.pt" in said
    assert "the run goes on from step 4 of 6" in said and "step 5 was done after it and is run again" in said
    train(changed(copied, output=str(tmp_path / "whole"), resume="never"))
    assert result.steps == 6
    assert differences(what_must_agree(tmp_path / "copy"), what_must_agree(tmp_path / "whole")) == []


def test_where_no_checkpoint_is_whole_nothing_is_begun(copied, tmp_path) -> None:
    for step in (4, 5):
        damage(tmp_path / "copy" / "checkpoints" / f"step-{step:08d}" / "model.safetensors", "torn")
    before = (tmp_path / "copy" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole.*step-00000005.*step-00000004"):
        train(copied)
    assert (tmp_path / "copy" / "metrics.jsonl").read_bytes() == before


def test_what_killed_runs_left_half_written_is_removed(copied, tmp_path) -> None:
    left = [".saving-abc", "checkpoints/.writing-step-00000006", "checkpoints/.deleting-step-00000002"]
    for name in left:
        (tmp_path / "copy" / name).mkdir()
        (tmp_path / "copy" / name / "file").write_text("x")
    files = ["metrics.jsonl.draft", ".report.html-x1.tmp"]
    for name in files:
        (tmp_path / "copy" / name).write_text("x")
    train(changed(copied, checkpoint_every_steps=0))
    assert not any((tmp_path / "copy" / name).exists() for name in [*left, *files])


class Room:
    """Files of this process may not grow beyond so many bytes: what a full disk does, without one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class FullBetween:
    """An observer that takes the room away with one step, and gives it back with another."""

    def __init__(self, first: int, last: int, room: Any) -> None:
        self.first, self.last, self.room = first, last, room

    def open(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass

    def record(self, record: Any) -> None:
        if (record.get("kind"), record.get("step")) == ("train", self.first):
            self.room.__enter__()
        if (record.get("kind"), record.get("step")) == ("train", self.last):
            self.room.__exit__()


def check_full_disk(config: TrainConfig, room: Any, whole: Path) -> None:
    out = Path(config.output)
    kept = []

    class Watch(FullBetween):
        def record(self, record: Any) -> None:
            super().record(record)
            if record.get("step") == 5 and record["kind"] == "train":
                kept.append(names(out))
                assert checkpoint_files.newest(out / "checkpoints")[0].step == 2

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = Trainer(config, observers=[Watch(3, 6, room)]).run()
    messages = [str(each.message) for each in told]
    failed = [text for text in messages if text.startswith("the checkpoint of step 4 could not be written")]
    assert len(failed) == 1, messages
    assert "the checkpoint of step 2 is in" in failed[0] and "and the run goes on" in failed[0]
    assert "MB are free" in failed[0]
    assert kept == [["step-00000002"]] and names(out) == ["step-00000002", "step-00000006"]
    assert result.steps == 6 and not [text for text in messages if "failed" in text]
    agree, expected = what_must_agree(out), what_must_agree(whole)
    del agree["state"], expected["state"]
    assert differences(agree, expected) == []


@pytest.mark.parametrize("size", [100, 10_000, 100_000])
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_nothing_else(make_run, tmp_path, size) -> None:
    # 100 bytes take no metrics either; 100,000 take the weights but not the optimiser's state.
    train(make_run(output=str(tmp_path / "whole")))
    check_full_disk(make_run(), Room(size), tmp_path / "whole")


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


def test_a_real_full_disk_does_the_same(make_run, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=4m tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("mounting a small disk takes rights that this process does not have")
    try:
        train(make_run(output=str(tmp_path / "whole")))
        check_full_disk(make_run(output=str(disk / "out")), Ballast(disk / "ballast"), tmp_path / "whole")
    finally:
        os.system(f"umount {disk}")


def test_a_disk_that_is_full_at_the_end_is_an_error_that_says_what_is_left_and_how_to_go_on(make_run, tmp_path) -> None:
    room = Room(10_000)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(OSError, match=r"all 6 steps are done, but .*step 4 is in .*--resume auto"):
                Trainer(make_run(), observers=[FullBetween(5, 0, room)]).run()
    finally:
        room.__exit__()
    assert steps_done(tmp_path / "out") == 6 and not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob(".saving*"))
    assert train(make_run(resume="auto")).steps == 6
    train(make_run(output=str(tmp_path / "whole")))
    assert differences(what_must_agree(tmp_path / "out"), what_must_agree(tmp_path / "whole")) == []


def test_two_runs_at_once_are_refused(make_run, tmp_path, monkeypatch) -> None:
    def second(self, *args, **kwargs):
        with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()} on"):
            train(make_run(overwrite=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeEngine, "forward_backward", second)
    with pytest.raises(Interrupted):
        train(make_run())
    assert not (tmp_path / "out" / ".lock").exists()


def test_the_newest_ones_are_kept_and_nothing_half_written(make_run, tmp_path) -> None:
    train(make_run(checkpoint_every_steps=1, keep_checkpoints=3))
    assert names(tmp_path / "out") == ["step-00000004", "step-00000005", "step-00000006"]
