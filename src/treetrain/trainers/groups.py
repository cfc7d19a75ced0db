"""Groups of rows that shuffling never splits.

Rows of one `group` stay together. Rows without a group stay together if they are of one tree, and a tree that is larger
than a step is cut at its forks. Rows of one `pair` are always in one group. Trees here compare token ids and keys only:
experts that a sampler recorded limit what rows can share, but do not say which rows belong together.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.prefix_order import prefix_order
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Int64s = NDArray[np.int64]
WORTH_KEEPING = 0.1
"""Rows stay together if that saves this share of their tokens, not counting the prefix that all rows around share."""


def make_groups(trajectories: Sequence[Trajectory], *, tokens_per_step: int | None = None) -> list[Int64s]:
    """Row numbers of every group, ascending, in the order of the groups' first rows.

    Args:
        trajectories: the rows, in memory or not.
        tokens_per_step: trees of rows without a group are cut down to this many flat tokens; None: never.
    """
    columns = columns_of(trajectories)
    labels = columns.group.copy()
    loose = np.flatnonzero(labels < 0)
    if len(loose):
        order, own = prefix_order(trajectories), np.zeros(len(labels), np.int64)  # rows without tokens stay at 0
        length = columns.tokens[order.rows]
        for number, (low, high) in enumerate(cut_trees(order.shared, length, length, tokens_per_step), start=1):
            own[order.rows[low:high]] = number
        # Calls of one conversation belong together, though their prompts may differ early.
        labels[loose] = _joined(own[loose], columns.episode[loose]) + labels.max() + 1
    labels = _joined(labels, columns.pair)
    rows = np.argsort(labels, kind="stable")
    groups = np.split(rows, np.flatnonzero(np.diff(labels[rows])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: group[0])


def _joined(labels: Int64s, codes: Int64s) -> Int64s:
    """Labels, made equal where rows have the same code; -1 joins nothing. Both are numbers from 0."""
    coded = codes >= 0
    while True:
        least = np.full(codes.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, codes[coded], labels[coded])
        into = np.arange(labels.max(initial=-1) + 1)
        np.minimum.at(into, labels[coded], least[codes[coded]])
        if (into[labels] == labels).all():
            return labels
        labels = into[labels]


def cut_trees(shared: Int64s, length: Int64s, size: Int64s, limit: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of sorted rows that stay together: whole trees that fit the limit, and pieces of larger ones.

    Most chat files are one tree, since every row begins with the same template. Sharing that every batch has anyway
    is no reason to keep rows together, so a piece counts only the tokens that it saves below `above`, the depth down
    to which all rows around it agree. A range is kept where it fits and saves `WORTH_KEEPING` of its tokens below
    that depth; otherwise it is split where its rows first diverge:

        a b c d        one row: always kept
        a b c e        the fork is at depth 3; its children are d, e and f
        a b c f        and are split further with above = 3, or
                       joined up to the limit where a b c is itself worth keeping

    Args:
        shared: int64 [R]: leading tokens that each row shares with the one before it; 0 for the first.
        length: int64 [R]: tokens of each row.
        size: int64 [R]: how much of the limit each row takes, such as its tokens, or 1.
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


def sample_groups(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """Whole groups (else whole trees) from the start of a file, up to `count` rows. Those that do not fit are skipped.

    Returns:
        The rows, and whether the first group was cut because it alone has more than `count` rows. Pairs stay whole
        even then, so a pair at the start may exceed `count`.
    """
    chosen: list[Int64s] = []
    taken = 0
    for group in make_groups(trajectories):
        if taken + len(group) <= count:
            chosen.append(group)
            taken += len(group)
        elif not chosen:
            return [trajectories[number] for number in _first_pairs(trajectories, group, count).tolist()], True
    return [trajectories[number] for number in np.sort(np.concatenate(chosen)).tolist()], False


def _first_pairs(trajectories: Sequence[Trajectory], group: Int64s, count: int) -> Int64s:
    """The first rows of a group in whole pairs, up to `count` rows but at least one row or pair."""
    pieces: dict[Hashable, list[int]] = {}
    for number in group.tolist():
        pair = trajectories[number].pair
        pieces.setdefault(("row", number) if pair is None else ("pair", pair), []).append(number)
    first, *rest = pieces.values()
    taken = list(first)
    for piece in rest:
        if len(taken) + len(piece) <= count:
            taken += piece
    return np.sort(np.array(taken, np.int64))


def hold_out(
    trajectories: Sequence[Trajectory], fraction: float, *, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Rows kept and rows held out: whole groups (else whole trees), drawn by the seed, at least one each.

    Raises:
        DataError: there is only one group, so nothing can be held out without splitting it.
    """
    groups = make_groups(trajectories)
    if len(groups) < 2:
        raise DataError(
            f"eval_fraction is {fraction}, but the {len(trajectories)} rows are one group or tree, which is never torn "
            "apart; give eval_data, files of their own"
        )
    count = min(max(round(fraction * len(groups)), 1), len(groups) - 1)
    drawn = np.random.default_rng([seed, len(groups)]).permutation(len(groups))[:count]
    held = {number for group in drawn.tolist() for number in groups[group].tolist()}
    kept = [row for number, row in enumerate(trajectories) if number not in held]
    return kept, [trajectories[number] for number in sorted(held)]
