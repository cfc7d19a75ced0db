"""Rows sorted so that equal beginnings are neighbours: two neighbours and what they share are all of a tree's shape."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory, common_prefix

Int64s = NDArray[np.int64]
TOKENS_AT_ONCE = 1 << 22
"""Tokens of all rows that are compared at once; at least one of each row."""


class PrefixOrder(NamedTuple):
    """Rows that have tokens and no group, sorted by their tokens; rows of different `key` share nothing."""

    rows: Int64s
    """int64 [R]: numbers of the rows."""
    shared: Int64s
    """int64 [R]: leading tokens that each has in common with the row before it; 0 for the first."""


def prefix_order(rows: Sequence[Trajectory]) -> PrefixOrder:
    """The order of those of the rows that have tokens and no group.

    Rows are compared block by block, and a further block is read only of rows that are equal so far, so that of rows
    in a memory-mapped file no more is read than what they share.
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
    """Rows in the order of their tokens, equal ones by number: (number, leading tokens shared with the row before it).

    Args:
        numbers: of the rows.
        ids: the token ids of a row, [L].
    """
    # Rows that are equal up to a depth, what the first shares with the row before it, and whether they end there.
    stack = [(numbers, 0, 0, False)]
    while stack:
        members, depth, before, ended = stack.pop()
        if ended or len(members) == 1:
            yield from zip(members, [before] + [depth] * (len(members) - 1))
            continue
        end = depth + max(TOKENS_AT_ONCE // len(members), 1)
        # Big-endian bytes of whole numbers from 0 are in the order of the numbers.
        blocks = sorted((ids(number)[depth:end].astype(">i4").tobytes(), number) for number in members)
        children, last = [], None
        for block, run in groupby(blocks, key=lambda found: found[0]):
            tokens = np.frombuffer(block, np.int32)
            first = before if last is None else depth + common_prefix(last, tokens)
            stop = depth + len(tokens)
            children.append(([number for _, number in run], stop, first, stop < end))
            last = tokens
        stack += children[::-1]
