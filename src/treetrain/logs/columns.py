"""Many rows at once: one array per field, and the order by tokens.

Sorted rows and the tokens shared by neighbours define the prefix tree.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import GIVEN, Trajectory, common_prefix

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOKENS_AT_ONCE = 1 << 22
"""Tokens compared at once, summed over rows; at least one per row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowColumns:
    """Facts of K rows."""

    tokens: Int64s
    """int64 [K]: length of each row."""
    trained: Bools
    """[K]: whether any token has a loss weight."""
    rejected: Bools
    """[K]: whether `chosen` is False."""
    reward: NDArray[np.float64]
    """[K]: NaN for rows without a reward."""
    given: dict[str, Bools]
    """For each name in `trajectory.GIVEN`, [K]: whether the row has it."""
    group: Int64s
    """int64 [K]: equal numbers for equal groups, in the order of their first rows; -1 for none."""
    pair: Int64s
    """As `group`."""
    episode: Int64s
    """As `group`."""
    key: Int64s
    """As `group`."""


def columns_of(rows: Sequence[Trajectory]) -> RowColumns:
    """The facts of rows as arrays. Raises DataError for rows that are no trajectories."""
    for number, row in enumerate(rows):
        if not isinstance(row, Trajectory):
            raise DataError(
                f"row {number} is a {type(row).__name__}, not a Trajectory: make one of every row, "
                "tt.Trajectory(ids, reward=..., group=...), or read a file with tt.load(path).trajectories"
            )

    def array(values: Iterable[object], dtype: type) -> NDArray:
        return np.fromiter(values, dtype, len(rows))  # type: ignore[arg-type]

    return RowColumns(
        tokens=array(map(len, rows), np.int64),
        trained=array((row.weights.any() for row in rows), np.bool_),
        rejected=array((row.chosen is False for row in rows), np.bool_),
        reward=array((np.nan if row.reward is None else row.reward for row in rows), np.float64),
        given={name: array((getattr(row, name) is not None for row in rows), np.bool_) for name in GIVEN},
        group=codes_of(row.group for row in rows),
        pair=codes_of(row.pair for row in rows),
        episode=codes_of(row.episode for row in rows),
        key=codes_of(row.key for row in rows),
    )


def codes_of(labels: Iterable[Hashable]) -> Int64s:
    """Number labels from 0 in order of first occurrence; equal labels get equal numbers, None gets -1."""
    known: dict[Hashable, int] = {}
    return np.array([-1 if label is None else known.setdefault(label, len(known)) for label in labels], np.int64)


class PrefixOrder(NamedTuple):
    """Non-empty rows without a group, sorted by their tokens; rows of different `key` share nothing."""

    rows: Int64s
    """int64 [R]: row numbers."""
    shared: Int64s
    """int64 [R]: leading tokens that each row shares with the row before it; 0 for the first."""


def prefix_order(rows: Sequence[Trajectory]) -> PrefixOrder:
    """Sort the non-empty rows without a group.

    Rows are compared block by block, and the next block only for rows that are equal so far.
    """
    columns = columns_of(rows)
    loose = np.flatnonzero((columns.group < 0) & (columns.tokens > 0))
    found: list[tuple[int, int]] = []
    for key in np.unique(columns.key[loose]):
        found += sorted_by_prefix(loose[columns.key[loose] == key].tolist(), lambda number: rows[number].ids)
    numbers, shared = zip(*found) if found else ((), ())
    return PrefixOrder(np.array(numbers, np.int64), np.array(shared, np.int64))


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
