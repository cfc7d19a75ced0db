"""Rows sorted by their tokens. The order and the tokens shared by neighbours define the prefix tree."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory, common_prefix

Int64s = NDArray[np.int64]
TOKENS_AT_ONCE = 1 << 22
"""Tokens compared at once, summed over rows; at least one per row."""


class PrefixOrder(NamedTuple):
    """Non-empty rows without a group, sorted by their tokens; rows of different `key` share nothing."""

    rows: Int64s
    """int64 [R]: row numbers."""
    shared: Int64s
    """int64 [R]: leading tokens that each row shares with the row before it; 0 for the first."""


def prefix_order(rows: Sequence[Trajectory]) -> PrefixOrder:
    """Sort the non-empty rows without a group.

    Rows are compared block by block. The next block is read only for rows that are equal so far, so little more than
    the shared prefixes is read from a memory-mapped file.
    """
    columns = columns_of(rows)
    ids: Callable[[int], NDArray[np.int32]] = getattr(rows, "ids", None) or (lambda number: rows[number].ids)
    loose = np.flatnonzero((columns.group < 0) & (columns.tokens > 0))
    found: list[tuple[int, int]] = []
    for key in np.unique(columns.key[loose]):
        found += sorted_by_prefix(loose[columns.key[loose] == key].tolist(), ids)
    numbers, shared = zip(*found) if found else ((), ())
    return PrefixOrder(np.array(numbers, np.int64), np.array(shared, np.int64))


def sorted_by_prefix(numbers: list[int], ids: Callable[[int], NDArray[Any]]) -> Iterator[tuple[int, int]]:
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
            yield from zip(members, [before] + [depth] * (len(members) - 1))
            continue
        end = depth + max(TOKENS_AT_ONCE // len(members), 1)
        # Non-negative integers as big-endian bytes sort like the integers.
        blocks = sorted((ids(number)[depth:end].astype(">i4").tobytes(), number) for number in members)
        children, last = [], None
        for block, run in groupby(blocks, key=lambda found: found[0]):
            tokens = np.frombuffer(block, np.int32)
            first = before if last is None else depth + common_prefix(last, tokens)
            stop = depth + len(tokens)
            children.append(([number for _, number in run], stop, first, stop < end))
            last = tokens
        stack += children[::-1]
