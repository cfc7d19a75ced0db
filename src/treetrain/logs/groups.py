"""Groups of rows that belong together, and the batches of whole groups that a trainer makes of them.

Rows of one `group` stay together. Rows without a group stay together if they are in one tree; a tree that is larger
than a step is cut at its forks. Rows of one `pair` are always in one group. Trees here compare token ids and keys only:
recorded experts limit sharing, but do not say which rows belong together.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import Int64s, RowColumns, codes_of, prefix_order, sorted_by_prefix

RowNumbers = Int64[np.ndarray, " _"]
TOKENS_PER_STEP = 32_768
"""Flat tokens of a step, about, where `tokens_per_step` is not given."""
WORTH_KEEPING = 0.1
"""Rows stay together if that saves this share of their tokens, not counting the prefix that all neighbours share."""


def make_groups(trajectories: Sequence[Trajectory], *, tokens_per_step: int | None = None) -> list[RowNumbers]:
    """Row numbers of every group, ascending, in the order of the groups' first rows.

    Args:
        trajectories: the rows, in memory or not.
        tokens_per_step: trees of rows without a group are cut down to this many flat tokens; None: never.
    """
    columns = RowColumns(trajectories)
    labels = columns.group.copy()
    loose = np.flatnonzero(labels < 0)
    if len(loose):
        order, shared = prefix_order(trajectories, columns)
        own = np.zeros(len(labels), np.int64)  # rows without tokens stay at 0
        length = columns.tokens[order]
        for number, (low, high) in enumerate(cut_trees(shared, length, length, tokens_per_step), start=1):
            own[order[low:high]] = number
        # Calls of one conversation belong together, though their prompts may differ early.
        labels[loose] = _joined(own[loose], columns.episode[loose]) + labels.max() + 1
    return _by_label(_joined(labels, columns.pair))


def group_rows(values: Sequence[Any], most: int) -> list[RowNumbers]:
    """Row numbers of every group.

    Args:
        values: one for each row: token ids, or anything hashable; rows whose value is None are groups by themselves.
        most: rows of an optimizer step; a tree of more rows is cut at its forks.
    """
    if len(values) == 0:
        raise DataError("the data set has no rows")
    some: Any = next((value for value in values if value is not None and np.size(value)), 0)
    if np.ndim(some) != 1 or not np.issubdtype(np.asarray(some).dtype, np.integer):
        labels: list[Any] = [None if isinstance(x, list | np.ndarray) and not len(x) else x for x in values]
        codes = codes_of(labels)
        alone = np.flatnonzero(codes < 0)  # a row that belongs to no group is one by itself
        codes[alone] = codes.max(initial=-1) + 1 + np.arange(len(alone))
        return _by_label(codes)
    ids = [np.asarray([] if value is None else value, np.int64) for value in values]
    order, shared = np.array(list(sorted_by_prefix(list(range(len(ids))), ids.__getitem__)), np.int64).T
    length = np.array([len(ids[number]) for number in order], np.int64)
    return [order[low:high] for low, high in cut_trees(shared, length, np.ones_like(length), most)]


def _by_label(labels: Int64[np.ndarray, " rows"]) -> list[RowNumbers]:
    """The rows of every label, in the order of their first rows."""
    rows = np.argsort(labels, kind="stable")
    groups = np.split(rows, np.flatnonzero(np.diff(labels[rows])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: group[0])


def _joined(labels: Int64[np.ndarray, " rows"], codes: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
    """Merge the labels of rows that have the same code; code -1 merges nothing. Labels count from 0."""
    coded = codes >= 0
    while True:
        least = np.full(codes.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, codes[coded], labels[coded])
        into = np.arange(labels.max(initial=-1) + 1)
        np.minimum.at(into, labels[coded], least[codes[coded]])
        if (into[labels] == labels).all():
            return labels
        labels = into[labels]


def cut_trees(
    shared: Int64[np.ndarray, " rows"],
    length: Int64[np.ndarray, " rows"],
    size: Int64[np.ndarray, " rows"],
    limit: int | None,
) -> Iterator[tuple[int, int]]:
    """Ranges of sorted rows that stay together: whole trees that fit the limit, and pieces of larger ones.

    Most chat files are one tree, since every row begins with the same template. Every batch shares that prefix, so it
    is no reason to keep rows together. A range therefore counts only tokens below `above`, the length of the prefix
    that it shares with the rows around it. A range is kept if it fits and saves `WORTH_KEEPING` of these tokens;
    otherwise it is split where its rows first diverge:

        a b c d        The fork is at depth 3; its children are d, e and f.
        a b c e        They are joined up to the limit if a b c alone is worth keeping,
        a b c f        else split further with above = 3. A single row is always kept.

    Args:
        shared: leading tokens that each row shares with the one before it; 0 for the first.
        length: tokens of each row.
        size: the part of the limit that each row takes, such as its tokens, or 1.
        limit: the largest size of a range of several rows; None leaves trees whole.
    """
    total = np.append(0, np.cumsum(size))
    limit = int(total[-1]) if limit is None else limit
    trees = [*np.flatnonzero(shared == 0).tolist(), len(shared)]
    for first, behind in pairwise(trees):
        pending = [(first, behind, 0)]
        if total[behind] - total[first] <= limit:
            yield pending.pop()[:2]
        elif len(trees) == 2 and behind - first > 1:  # all rows are of this tree
            pending = [(first, behind, int(shared[1:].min()))]
        while pending:
            low, high, above = pending.pop()
            rows, inner = high - low, shared[low + 1 : high]
            if rows == 1:
                yield low, high
                continue
            fork, tokens = int(inner.min()), int(length[low:high].sum()) - above * rows
            saved = int(inner.sum()) - above * (rows - 1)
            if total[high] - total[low] <= limit and saved >= WORTH_KEEPING * tokens:
                yield low, high
                continue
            borders = [low, *(low + 1 + np.flatnonzero(inner == fork)).tolist(), high]
            joins = (fork - above) * (rows - 1) >= WORTH_KEEPING * tokens
            start = low
            for begin, end in pairwise(borders):
                large = total[end] - total[begin] > limit
                if joins and start < begin and (large or total[end] - total[start] > limit):
                    yield start, begin
                    start = begin
                if large or not joins:
                    pending.append((begin, end, fork))
                    start = end
            if start < high:
                yield start, high


def batches_of_pass(tokens: Int64s, tokens_per_step: int, minibatches: int = 1) -> int:
    """How many batches of about `tokens_per_step` flat tokens a pass over groups of so many tokens has, int64 [G]."""
    return min(-(-int(tokens.sum()) // tokens_per_step), len(tokens) // minibatches)


def cut_evenly(groups: RowNumbers, tokens: Int64s, count: int, at_least: int = 1) -> list[RowNumbers]:
    """Groups in `count` parts of about equally many tokens, each with `at_least` groups or more.

    Args:
        groups: int64 [G]: their numbers, in the order in which they are cut.
        tokens: int64 [G]: the flat tokens of each.
    """
    middle, places = np.cumsum(tokens) - tokens / 2, np.arange(1, count) * at_least
    cuts = np.searchsorted(middle, tokens.sum() * np.arange(1, count) / count)  # a group goes where most of it lies
    cuts = np.maximum.accumulate(np.maximum(cuts - places, 0)) + places
    return np.split(groups, np.minimum(cuts, len(groups) - count * at_least + places))
