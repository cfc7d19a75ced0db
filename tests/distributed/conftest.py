"""The processes that the tests of this folder share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.processes import Processes


@pytest.fixture(scope="session")
def _pool() -> Iterator[list[Processes]]:
    pool: list[Processes] = []
    yield pool
    for processes in pool:
        processes.stop()


@pytest.fixture
def run_on_ranks(_pool: list[Processes]) -> Callable[..., Any]:
    """`Processes.run` of processes that are started for the first test, and again after one that hung."""
    if _pool and not _pool[0].alive:
        _pool.pop().stop()
    if not _pool:
        _pool.append(Processes())
    return _pool[0].run
