"""Many rows at once: one array per field, and the order by tokens.

Sorted rows and the tokens shared by neighbours define the prefix tree.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import GIVEN, common_prefix
from treetrain.layers.trajectory import Trajectory

Json = Any
"""A value of JSON. Its type is not known before it is looked at: logs are written by others."""
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOKENS_AT_ONCE = 1 << 22
"""Tokens compared at once, summed over rows; at least one per row."""


class RowColumns:
    """Facts of K rows as arrays, each made when it is first asked for.

    Raises:
        DataError: rows that are no trajectories.
    """

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        for number, row in enumerate(rows):
            if not isinstance(row, Trajectory):
                raise DataError(
                    f"row {number} is a {type(row).__name__}, not a Trajectory: make one of every row, "
                    "tt.Trajectory(ids, reward=..., group=...), or read a file with tt.load(path).trajectories"
                )
        self._rows = rows

    @cached_property
    def tokens(self) -> Int64s:
        """int64 [K]: length of each row."""
        return np.fromiter(map(len, self._rows), np.int64, len(self._rows))

    @cached_property
    def trained(self) -> Bools:
        """[K]: whether any token has a loss weight."""
        return np.array([row.weights.any() for row in self._rows], np.bool_)

    @cached_property
    def rejected(self) -> Bools:
        """[K]: whether `chosen` is False."""
        return np.array([row.chosen is False for row in self._rows], np.bool_)

    @cached_property
    def reward(self) -> NDArray[np.float64]:
        """[K]: NaN for rows without a reward."""
        return np.array([np.nan if row.reward is None else row.reward for row in self._rows], np.float64)

    @cached_property
    def given(self) -> dict[str, Bools]:
        """For each name in `trajectory.GIVEN`, [K]: whether the row has it."""
        return {name: np.array([getattr(row, name) is not None for row in self._rows], np.bool_) for name in GIVEN}

    @cached_property
    def group(self) -> Int64s:
        """int64 [K]: equal numbers for equal groups, in the order of their first rows; -1 for none."""
        return codes_of(row.group for row in self._rows)

    @cached_property
    def pair(self) -> Int64s:
        """As `group`."""
        return codes_of(row.pair for row in self._rows)

    @cached_property
    def episode(self) -> Int64s:
        """As `group`."""
        return codes_of(row.episode for row in self._rows)

    @cached_property
    def key(self) -> Int64s:
        """As `group`."""
        return codes_of(row.key for row in self._rows)


def codes_of(labels: Iterable[Hashable]) -> Int64s:
    """Number labels from 0 in order of first occurrence; equal labels get equal numbers, None gets -1."""
    known: dict[Hashable, int] = {}
    return np.array([-1 if label is None else known.setdefault(label, len(known)) for label in labels], np.int64)


def prefix_order(rows: Sequence[Trajectory], columns: RowColumns) -> tuple[Int64s, Int64s]:
    """Sort the non-empty rows without a group by their tokens; rows of different `key` share nothing.

    Rows are compared block by block, and the next block only for rows that are equal so far.

    Returns:
        int64 [R]: row numbers, and int64 [R]: leading tokens that each row shares with the row before it; 0 for the
        first.
    """
    loose = np.flatnonzero((columns.group < 0) & (columns.tokens > 0))
    found: list[tuple[int, int]] = []
    for key in np.unique(columns.key[loose]):
        found += sorted_by_prefix(loose[columns.key[loose] == key].tolist(), lambda number: rows[number].ids)
    numbers, shared = np.array(found, np.int64).reshape(-1, 2).T
    return numbers, shared


def sorted_by_prefix(numbers: list[int], ids: Callable[[int], NDArray[np.integer]]) -> Iterator[tuple[int, int]]:
    """Sort rows by tokens, then number: yields (number, leading tokens shared with the row before it).

    Args:
        numbers: row numbers.
        ids: the token ids of a row, [L].
    """
    # (rows equal up to a depth, the depth, tokens the first shares with the row before it, whether the rows end there)
    stack = [(numbers, 0, 0, False)] if numbers else []
    while stack:
        members, depth, before, ended = stack.pop()
        if ended or len(members) == 1:
            yield members[0], before
            for number in members[1:]:
                yield number, depth
            continue
        end = depth + max(TOKENS_AT_ONCE // len(members), 1)
        # Non-negative integers as big-endian bytes sort like the integers.
        blocks = sorted((ids(number)[depth:end].astype(">i4").tobytes(), number) for number in members)
        children, last = [], None
        for block, run in groupby(blocks, key=itemgetter(0)):
            tokens = np.frombuffer(block, np.int32)
            first = before if last is None else depth + common_prefix(last, tokens)
            stop = depth + len(tokens)
            same, ends = [number for _, number in run], stop < end
            last = tokens
            if children or not (ends or len(same) == 1):
                children.append((same, stop, first, ends))
                continue
            yield same[0], first
            for number in same[1:]:
                yield number, stop
        stack += children[::-1]
