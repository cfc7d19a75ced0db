"""Ranks that are threads of one process, for what ranks tell each other without any tensor."""

import ast
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from treetrain.engine.ranks import Ranks

TIMEOUT = 30.0
"""Seconds after which a rank that waits for another one gives up."""


class ThreadRanks(Ranks):
    """One of several ranks."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]):
        super().__init__()
        self.rank, self.size = rank, size
        self._barrier, self._values = barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = pickle.dumps(value)
        self._barrier.wait(TIMEOUT)
        found = [pickle.loads(each) for each in self._values]
        self._barrier.wait(TIMEOUT)
        return found


def on_ranks(size: int, function: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What a function gives on every rank, or the exception that it raises there."""
    barrier, values = threading.Barrier(size), [None] * size
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = function(ThreadRanks(rank, size, barrier, values))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    with one_parser():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@contextmanager
def one_parser() -> Iterator[None]:
    """One thread parses at a time: CPython 3.11 counts the depth of all their syntax trees in one place (gh-106905).

    `np.load` parses the header of an array's file.
    """
    parse, lock = ast.parse, threading.Lock()

    def locked(*args: Any, **options: Any) -> Any:
        with lock:
            return parse(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ast, "parse", locked)
        yield
