"""A rank that never comes does not keep the others waiting for half an hour."""

import datetime
import multiprocessing
import time

import pytest

from support.processes import free_port
from treetrain.engine import distributed
from treetrain.errors import RanksDisagree


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(distributed, "_MADE", {})
    return monkeypatch


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1"), (1, "rank 0, which the others meet at")])
def test_a_rank_that_does_not_start_is_named_in_bounded_time(rank: int, missing: str, two_ranks) -> None:
    two_ranks.setenv("RANK", str(rank))
    start = time.monotonic()
    with pytest.raises(RanksDisagree, match=f"rank {rank} of 2 has waited 1 s for {missing}: not started, or killed"):
        distributed.wait_for_ranks()
    assert time.monotonic() - start < 20


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


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "run")])
def test_one_process_and_torchrun_do_not_wait(name: str, value: str, two_ranks) -> None:
    two_ranks.setenv(name, value)
    distributed.wait_for_ranks()
