"""Checkpoints of several ranks: gone on from by as many, or by others, bit for bit; never half there."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoint_work import Job, digest, run, run_alone, slow_disk
from support.kills import differences
from treetrain.train import checkpoint_files
from treetrain.train.sharded_checkpoint import share_of

SPREADS = [(1, "none"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")]
RESULT = ("weights", "state")


def agree(found: list[dict], expected: dict, names: tuple[str, ...] = RESULT) -> None:
    for rank, each in enumerate(found):
        for name in names:
            assert differences(each[name], expected[name]) == [], (rank, name)


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


@pytest.fixture
def start(run_on_ranks, tmp_path):
    """Runs a job in a folder of its own."""

    def go(name: str, size: int, parallel: str, work=run, **settings) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        job = Job(str(folder), parallel, **settings)
        if size == 1:  # in the first of two: all processes are to have seen the same groups
            return run_on_ranks(run_alone if work is run else drawn_alone, job)[:1]
        return run_on_ranks(work, job, size=size)

    return go


@pytest.mark.parametrize(("size", "parallel"), SPREADS)
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_other(start, tmp_path, size, parallel) -> None:
    whole = start("whole", size, parallel)
    left = start("left", size, parallel, signalled=(size - 1, 3))
    assert {each["interrupted"].split()[0] for each in left} == {"15"} and {each["last"] for each in left} == {3}
    for other, form in SPREADS:
        name = f"{other} {form}"
        shutil.copytree(tmp_path / "left", tmp_path / name)
        found = start(name, other, form, resume="auto")
        agree([each["begun"] for each in found], left[0])
        for each in found:
            # One number's update may round otherwise beside others of its shard.
            np.testing.assert_allclose(each["numbers"], whole[0]["numbers"], rtol=1e-5, atol=1e-7)
        notes = " ".join(found[0]["notes"])
        assert "goes on from step 3 of 6" in notes
        assert (f"ranks was {size}, is {other}" in notes) == (size != other)
        if (size, parallel) == (other, form):
            agree(found, whole[0])
        if size == other:
            assert [each["drawn"] for each in found] == [each["drawn"][3:] for each in whole]
            continue
        if (size, other) not in ((1, 2), (4, 1)):
            continue
        again = start(name, other, form, resume=str(tmp_path / "left" / "checkpoints" / "step-00000003"), work=drawn)
        assert again == [each["drawn"] for each in found], "random numbers that are not the same every time"
        assert other == 1 or found[0]["drawn"] != found[1]["drawn"]


def drawn_alone(group, job: Job) -> list | None:
    return drawn(None, job) if torch.distributed.get_rank(group) == 0 else None


def drawn(group, job: Job) -> list:
    """The random numbers of a run that goes on in a folder of its own."""
    import dataclasses

    folder = f"{job.folder} again"
    os.makedirs(folder, exist_ok=True)
    return run(group, dataclasses.replace(job, folder=folder))["drawn"]


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adafactor"])
def test_optimisers_of_every_kind_are_gone_on_with(start, optimizer) -> None:
    for parallel in ("ddp",) if optimizer == "adafactor" else ("ddp", "fsdp"):
        whole = start(f"whole {parallel}", 2, parallel, optimizer=optimizer, total=4)
        start(f"left {parallel}", 2, parallel, optimizer=optimizer, total=4, signalled=(0, 2))
        found = start(f"left {parallel}", 2, parallel, optimizer=optimizer, total=4, resume="auto")
        agree(found, whole[0])
        assert found[0]["last"] == 4
        assert found[0]["state"]["progress"]["step"] == 4


def test_an_adapters_checkpoint_has_no_frozen_weights_and_is_of_the_same_base_on_any_number(
    start, run_on_ranks
) -> None:
    spreads = [(2, "none"), *SPREADS[1:]]
    found = [run_on_ranks(digest, Job("", parallel, frozen=True), size=size) for size, parallel in spreads]
    assert len({each for one in found for each in one}) == 1
    left = start("left", 4, "fsdp", frozen=True, signalled=(3, 2))
    agree([each["begun"] for each in start("left", 2, "fsdp", frozen=True, resume="auto")], left[0])


def test_training_goes_on_while_a_checkpoint_is_written_and_the_checkpoint_is_of_its_step(start, tmp_path) -> None:
    whole = start("whole", 2, "fsdp")
    found = start("out", 2, "fsdp", work=slow_disk, every=3, total=6)
    agree(found, whole[0])
    assert found[0]["seen"][2:4] == [[], []], "it is there before the disk took it"
    assert names(str(tmp_path / "out")) == ["step-00000003", "step-00000006"]
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    again = start("out", 2, "fsdp", every=3, resume="auto")
    assert "step 3 of 6" in " ".join(again[0]["notes"])
    agree(again, whole[0])


def test_the_newest_ones_are_kept(start, tmp_path) -> None:
    found = start("out", 2, "fsdp", every=1, keep=3)
    assert names(str(tmp_path / "out")) == [f"step-0000000{step}" for step in (4, 5, 6)]
    assert {each["last"] for each in found} == {6}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_leaves_the_older_checkpoint_and_the_run_goes_on(start, tmp_path, rank) -> None:
    whole = start("whole", 2, "fsdp", total=7)
    found = start("out", 2, "fsdp", total=7, full=(rank, 4, 6))
    agree(found, whole[0])
    told = [text for text in found[0]["told"] if "could not be written" in text]
    assert len(told) == 1 and not found[1]["told"], found
    assert "the checkpoint of step 4 could not be written" in told[0] and "File too large" in told[0], told
    assert "the checkpoint of step 2 is in" in told[0] and "and the run goes on" in told[0]
    assert rank == 0 or "rank 1" in told[0]
    assert found[0]["seen"][4] == ["step-00000002"]
    assert names(str(tmp_path / "out")) == ["step-00000002", "step-00000006"]


def test_every_torn_file_is_noticed_and_the_checkpoint_before_it_taken(start, tmp_path) -> None:
    start("out", 2, "fsdp", total=4)
    folder = tmp_path / "out" / "checkpoints"
    newest = folder / "step-00000004"
    files = sorted(path.name for path in newest.iterdir())
    assert files == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "config.json",
        "manifest.json",
        "metrics.jsonl",
        "state.pt",
    ]
    for name in files:
        kept = (newest / name).read_bytes()
        flipped = bytearray(kept)
        flipped[len(kept) // 2] ^= 1
        for damaged in (None, kept[: len(kept) // 2], bytes(flipped)):
            (newest / name).unlink() if damaged is None else (newest / name).write_bytes(damaged)
            found, torn = checkpoint_files.newest(folder)
            assert found is not None and found.step == 2 and len(torn) == 1 and name in torn[0], (name, torn)
        (newest / name).write_bytes(kept)
    assert checkpoint_files.newest(folder)[0].step == 4
    (newest / "__1_0.distcp").unlink()
    again = start("out", 2, "fsdp", total=4, resume="auto")
    assert "not whole, left out" in " ".join(again[0]["notes"]) and again[0]["last"] == 4


def test_ranks_write_shares_of_about_one_size() -> None:
    class Two:
        size, rank = 2, 0

    tensors = {str(n): torch.zeros(size) for n, size in enumerate((100, 60, 50, 3, 0))}
    other = type("Other", (Two,), {"rank": 1})
    first, second = share_of(tensors, Two()), share_of(tensors, other())  # type: ignore[arg-type]
    assert {*first} | {*second} == {*tensors} and not {*first} & {*second}
    assert abs(sum(t.numel() for t in first.values()) - sum(t.numel() for t in second.values())) <= 13
