"""A rank that never comes does not keep the others waiting for half an hour."""

import datetime
import multiprocessing
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.processes import free_port
from treetrain.core.errors import RanksDisagree
from treetrain.parallel import process_group as distributed


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(distributed, "_MADE", {})
    return monkeypatch


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "rank 1"), (1, r"rank 0, which the others meet at 127\.0\.0\.1:\d+")]
)
def test_a_rank_that_does_not_start_is_named_in_bounded_time(rank: int, missing: str, two_ranks) -> None:
    two_ranks.setenv("RANK", str(rank))
    start = time.monotonic()
    with pytest.raises(RanksDisagree, match=f"rank {rank} of 2 has waited 1 s for {missing}: not started, or killed"):
        distributed.wait_for_ranks()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "5"}, "RANK='5'; give a whole number from 0 to 1"),
        ({"RANK": "first"}, "RANK='first'; give a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'; give"),
        ({"RANK": None}, "has LOCAL_RANK and WORLD_SIZE, MASTER_ADDR, MASTER_PORT, but not RANK: start"),
        ({"MASTER_PORT": None, "MASTER_ADDR": None}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": None}, "but not WORLD_SIZE"),
    ],
)
def test_a_rank_that_is_none_is_refused_at_once(changed: dict, words: str, two_ranks) -> None:
    for name, value in {"LOCAL_RANK": "0", **changed}.items():
        two_ranks.delenv(name, raising=False) if value is None else two_ranks.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        distributed.wait_for_ranks()


def test_an_address_that_no_host_has_is_named(two_ranks) -> None:
    two_ranks.setenv("RANK", "1")
    two_ranks.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(RanksDisagree, match=r"MASTER_ADDR='nowhere\.invalid', a name that no host has"):
        distributed.wait_for_ranks()


def test_ranks_that_start_find_each_other(two_ranks) -> None:
    two_ranks.setattr(distributed, "JOIN_TIMEOUT", datetime.timedelta(seconds=30))

    def other() -> None:
        two_ranks.setenv("RANK", "1")
        distributed.wait_for_ranks()

    process = multiprocessing.get_context("fork").Process(target=other)
    process.start()
    distributed.wait_for_ranks()
    process.join()
    assert process.exitcode == 0


def test_one_process_does_not_wait(two_ranks) -> None:
    two_ranks.setenv("WORLD_SIZE", "1")
    distributed.wait_for_ranks()


SCRIPT = """
import datetime, os, signal, sys
import torch.distributed as dist
from transformers import TrainingArguments
import treetrain as tt
from treetrain.parallel import process_group

process_group.JOIN_TIMEOUT = datetime.timedelta(seconds=int(sys.argv[3]))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(0) if sys.argv[1] == "ends" else None
kind = {"tree": tt.TreeArguments, "plain": TrainingArguments}[sys.argv[2]]
kind("out", use_cpu=True, report_to="none", ddp_backend="gloo").device
dist.barrier()
print("all are here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "kind", "words"),
    [
        ("killed", "tree", "exitcode  : -9"),
        ("killed", "plain", "exitcode  : -9"),
        ("ends", "tree", "rank 0 of 2 has waited 5 s for rank 1: not started"),
        ("comes", "tree", "all are here"),
    ],
)
def test_torchrun_ends_soon_and_names_a_rank_that_does_not_come(fate, kind, words, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    seconds = "120" if fate == "comes" else "5"
    ended = subprocess.run(
        [*launch, str(script), fate, kind, seconds],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert words in ended.stdout + ended.stderr
    assert (ended.returncode == 0) == (fate == "comes")


def test_ranks_find_each_other_though_one_host_came_back_and_counts_restarts_from_zero(two_ranks) -> None:
    two_ranks.setattr(distributed, "JOIN_TIMEOUT", datetime.timedelta(seconds=30))
    two_ranks.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")

    def other() -> None:
        two_ranks.setenv("RANK", "1")
        two_ranks.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        distributed.wait_for_ranks()

    two_ranks.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    process = multiprocessing.get_context("fork").Process(target=other)
    process.start()
    distributed.wait_for_ranks()
    process.join()
    assert process.exitcode == 0


def silent_rank(group: Any) -> str:
    """The error of a rank that waits for another one, which says nothing for two seconds, and its seconds."""
    other = dist.new_group(list(range(dist.get_world_size(group))))
    distributed.limit_waits(1.0)
    began = time.monotonic()
    try:
        if dist.get_rank(group):
            time.sleep(2.5)
        else:
            dist.all_reduce(torch.ones(1), group=other)
    except RuntimeError as error:
        return f"{error} after {time.monotonic() - began:.0f} s"
    finally:  # these processes run other tests
        distributed.limit_waits(1800.0)
    return "nothing"


def test_ddp_timeout_holds_in_every_group_on_the_cpu(run_on_ranks) -> None:
    found = run_on_ranks(silent_rank, size=2)
    assert "Timed out waiting 1000ms" in found[0] and "after 1 s" in found[0], found
