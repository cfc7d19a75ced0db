"""Rows sorted so that equal beginnings are neighbours, in bounded memory: sorted runs on disk, merged.

Two neighbours and the length of what they share are all that is needed to know the tree of any number of rows.
"""

import heapq
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.labels import label_digest
from treetrain.data.trajectory import Trajectory

Int64s = NDArray[np.int64]
RUN_BYTES = 1 << 26
"""Tokens that are sorted in memory at once."""
MOST_RUNS = 128
"""That are merged at once: each is an open file."""
_BUFFER = 1 << 16
_HEAD = struct.Struct("<qq")
_NO_KEY = bytes(16)
Entry = tuple[bytes, int]
"""A row as it is sorted (its key's digest, then its ids), and its number."""


class PrefixOrder(NamedTuple):
    """Rows that have tokens and no group, sorted by their tokens; rows of different `key` share nothing."""

    rows: Int64s
    """int64 [R]: numbers of the rows."""
    shared: Int64s
    """int64 [R]: leading tokens that each has in common with the row before it; 0 for the first."""

    def of(self, numbers: Int64s, total: int) -> "PrefixOrder":
        """Only these rows, in the same order.

        Args:
            numbers: int64 [n], ascending; the rows get new numbers, their places in this.
            total: how many rows there are, in this order or not.
        """
        place = np.full(total, -1, np.int64)
        place[numbers] = np.arange(len(numbers))
        kept = np.flatnonzero(place[self.rows] >= 0)
        if not len(kept):
            return PrefixOrder(np.zeros(0, np.int64), np.zeros(0, np.int64))
        # What two rows share is the least that any two neighbours between them share.
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], np.append(0, kept[:-1] + 1))
        shared[0] = 0
        return PrefixOrder(place[self.rows[kept]], shared)


class PrefixSorter:
    """Takes rows one by one, and writes them to disk in sorted runs.

    Args:
        folder: for the runs; None keeps everything in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._entries: list[Entry] = []
        self._bytes = 0
        self.runs: list[Path] = []

    def add(self, row: Trajectory, number: int) -> None:
        """A row without a group; one without tokens is left out."""
        if len(row):
            entry = (_NO_KEY if row.key is None else label_digest(row.key)) + row.ids.tobytes()
            self._entries.append((entry, number))
            self._bytes += len(entry)
            if self._folder is not None and self._bytes > RUN_BYTES:
                self._write()

    def close(self) -> list[Path]:
        """All runs, when the last row is in."""
        if self._entries:
            self._write()
        return self.runs

    def in_memory(self) -> PrefixOrder:
        """The order, where there is no folder."""
        self._entries.sort()
        return _order(self._entries)

    def _write(self) -> None:
        assert self._folder is not None
        self._entries.sort()
        self.runs.append(_write_run(self._folder, self._entries))
        self._entries, self._bytes = [], 0


def prefix_order(rows: Sequence[Trajectory]) -> PrefixOrder:
    """The order of those of the rows that have no group: their own where they know it (see `LazyRows`)."""
    own = getattr(rows, "prefix_order", None)
    if own is not None:
        return own
    sorter = PrefixSorter()
    for number, row in enumerate(rows):
        if row.group is None:
            sorter.add(row, number)
    return sorter.in_memory()


def merge_runs(runs: Sequence[tuple[Path, int]], folder: Path) -> PrefixOrder:
    """The order of all rows of sorted runs.

    Args:
        runs: files, and what is added to the numbers of their rows.
        folder: where runs of runs go, if there are many.
    """
    while len(runs) > MOST_RUNS:
        first, rest = runs[:MOST_RUNS], runs[MOST_RUNS:]
        runs = [*rest, (_write_run(folder, _merged(first)), 0)]
    return _order(_merged(runs))


def _merged(runs: Sequence[tuple[Path, int]]) -> Iterator[Entry]:
    return heapq.merge(*(_read_run(path, base) for path, base in runs))


def _order(entries: Iterable[Entry]) -> PrefixOrder:
    rows, shared = array("q"), array("q")
    before = b""
    for entry, number in entries:
        rows.append(number)
        shared.append(_shared_tokens(before, entry))
        before = entry
    return PrefixOrder(np.array(rows, np.int64), np.array(shared, np.int64))


def _shared_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two entries have in common; 0 where their keys differ."""
    if one[:16] != other[:16]:
        return 0
    if other.startswith(one):
        return (len(one) - 16) >> 2
    length = min(len(one), len(other)) - 16 >> 2
    a, b = (np.frombuffer(entry, np.int32, length, 16) for entry in (one, other))
    # They differ within the shorter one: sorted rows begin with the row before them or not at all.
    return int((a != b).argmax())


def _write_run(folder: Path, entries: Iterable[Entry]) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="run-", buffering=_BUFFER, delete=False) as file:
        for entry, number in entries:
            file.write(_HEAD.pack(number, len(entry)))
            file.write(entry)
    return Path(file.name)


def _read_run(path: Path, base: int) -> Iterator[Entry]:
    with open(path, "rb", buffering=_BUFFER) as file:
        while head := file.read(_HEAD.size):
            number, size = _HEAD.unpack(head)
            yield file.read(size), base + number
