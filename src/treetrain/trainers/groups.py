"""Groups of rows that shuffling never tears apart.

Rows of one `group` are a unit; rows without a group are one if they are of one tree, and a tree that is larger than a
step is cut at its forks. Rows of one `pair` are always of one unit. Trees are those of token ids and keys: experts that
a sampler recorded say what rows can share, not what belongs together.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import RowColumns, columns_of
from treetrain.data.prefix_order import PrefixOrder, prefix_order
from treetrain.data.trajectory import Trajectory

Int64s = NDArray[np.int64]
WORTH_KEEPING = 0.1
"""A cut keeps subtrees whole that save this share of their own tokens."""


class RowGroups(Sequence[Int64s]):
    """Row numbers of every unit, ascending; two arrays, however many units there are.

    Args:
        rows: int64 [K], unit after unit.
        start: int64 [units + 1]: where each begins, and K.
    """

    def __init__(self, rows: Int64s, start: Int64s) -> None:
        self._rows, self._start = rows, start

    @classmethod
    def of_labels(cls, labels: Int64s) -> "RowGroups":
        """Rows of equal label, from 0 without gaps, are a unit, which has the label as its number."""
        rows = np.argsort(labels, kind="stable")
        start = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(labels))]).astype(np.int64)
        return cls(rows, start)

    def __len__(self) -> int:
        return len(self._start) - 1

    def __getitem__(self, unit):  # type: ignore[override]
        """Row numbers of a unit."""
        if not -len(self) <= unit < len(self):
            raise IndexError(unit)
        unit %= len(self)
        return self._rows[self._start[unit] : self._start[unit + 1]]

    def __iter__(self) -> Iterator[Int64s]:
        return iter(np.split(self._rows, self._start[1:-1]) if len(self) else [])

    def rows_of(self, units: Int64s) -> Int64s:
        """Row numbers of some units, unit after unit."""
        size = self._start[units + 1] - self._start[units]
        first = np.repeat(self._start[units] - np.cumsum(size) + size, size)
        return self._rows[first + np.arange(int(size.sum()))]

    def unit_of_rows(self) -> Int64s:
        """int64 [K]: the unit of every row."""
        found = np.empty(len(self._rows), np.int64)
        found[self._rows] = np.repeat(np.arange(len(self)), np.diff(self._start))
        return found

    def sums(self, values: Int64s) -> Int64s:
        """The sum of a column over every unit."""
        return np.add.reduceat(values[self._rows], self._start[:-1]) if len(self) else np.zeros(0, np.int64)


def make_groups(trajectories: Sequence[Trajectory], *, tokens_per_step: int | None = None) -> RowGroups:
    """The units of rows, in the order of each unit's first row.

    Args:
        trajectories: the rows, in memory or not.
        tokens_per_step: trees of rows without a group are cut down to this many flat tokens; None: never.
    """
    columns = columns_of(trajectories)
    labels = columns.group.copy()
    loose = np.flatnonzero(labels < 0)
    if len(loose):
        own = _tree_labels(prefix_order(trajectories), columns, tokens_per_step)[loose]
        # Calls of one conversation belong together, though their prompts may differ early.
        labels[loose] = _joined(own, columns.episode[loose]) + labels.max() + 1
    return RowGroups.of_labels(_by_first_row(_joined(labels, columns.pair)))


def _tree_labels(order: PrefixOrder, columns: RowColumns, target: int | None) -> Int64s:
    """A number for every row without a group: of its tree, or of the piece of it; 0 for all rows without tokens."""
    labels = np.zeros(len(columns.tokens), np.int64)
    for number, rows in enumerate(cut_trees(order, columns.tokens[order.rows], target), start=1):
        labels[rows] = number
    return labels


def cut_trees(order: PrefixOrder, length: Int64s, target: int | None) -> Iterator[Int64s]:
    """Rows of whole trees; trees with more than `target` flat tokens are cut at forks where little sharing is lost.

    Most chat files are one tree, since every row begins with the same template. Cut into subtrees that fit a step
    and save a share of their own tokens worth keeping; what lies above is shared again by whatever meets in a step.

    A segment of the tree (tokens without a fork) is here a range of neighbours in the order, and the token of depth
    `start` that it begins at: all rows of the range go through it.

    Args:
        order: of R rows.
        length: int64 [R], in that order.
        target: flat tokens; None: trees are left whole.
    """
    forks = _Forks(order.shared, length)
    flat = np.append(0, np.cumsum(length))
    new = np.append(0, np.cumsum(length - order.shared))
    stack = forks.trees()[::-1]
    while stack:
        low, high, start, top = stack.pop()
        tokens = int(flat[high] - flat[low])
        below = tokens - start * (high - low)
        unique = int(new[high] - new[low + 1] + length[low]) - start
        fits = target is None or tokens <= target
        worth = start == 0 or below - unique >= WORTH_KEEPING * below
        if (fits and worth) or top < 0:
            yield order.rows[low:high]
            continue
        depth, borders, tops = forks.children(top)
        stop = low
        while length[stop] <= depth:  # rows that end above the fork
            stop += 1
        if stop > low:
            yield order.rows[low:stop]
        begins = [stop, *borders]
        stack += list(zip(begins, [*borders, high], [depth] * len(begins), tops, strict=True))[::-1]


class _Forks:
    """Where sorted rows part: the forks of their tree, each found in time linear in its children.

    Two neighbours part at the depth that they share, unless the first is the beginning of the second. The first fork
    of a range of rows is where that depth is least: the top of a binary tree over all places, the least above.

    Args:
        shared, length: int64 [R], of sorted rows.
    """

    def __init__(self, shared: Int64s, length: Int64s) -> None:
        self._count = len(shared)
        places = np.flatnonzero(shared[1:] < length[:-1]) + 1
        self._rows: list[int] = places.tolist()
        self._depth: list[int] = shared[places].tolist()
        self._left, self._right, self._root = _least_above(self._depth)

    def trees(self) -> list[tuple[int, int, int, int]]:
        """(first row, row behind the last, depth 0, place of the first fork or -1) of every tree."""
        if self._root < 0 or self._depth[self._root] > 0:
            return [(0, self._count, 0, self._root)] if self._count else []
        _, borders, tops = self.children(self._root)
        return list(zip([0, *borders], [*borders, self._count], [0] * len(tops), tops, strict=True))

    def children(self, top: int) -> tuple[int, list[int], list[int]]:
        """Of the fork that is first within a range of rows.

        Returns:
            its depth; the rows at which its children begin, but for the first one; the place of the first fork within
            each child, -1 where it has none.
        """
        depth = self._depth[top]
        borders: list[int] = []
        tops: list[int] = []
        pending: list[int] = []
        place = top
        while True:
            while place >= 0 and self._depth[place] == depth:
                pending.append(place)
                place = self._left[place]
            tops.append(place)
            if not pending:
                return depth, borders, tops
            place = pending.pop()
            borders.append(self._rows[place])
            place = self._right[place]


def _least_above(values: list[int]) -> tuple[list[int], list[int], int]:
    """The binary tree over a list in which no value is above a smaller one: left and right child of each, the root."""
    left, right = [-1] * len(values), [-1] * len(values)
    path: list[int] = []
    for place, value in enumerate(values):
        below = -1
        while path and values[path[-1]] > value:
            below = path.pop()
        left[place] = below
        if path:
            right[path[-1]] = place
        path.append(place)
    return left, right, path[0] if path else -1


def _joined(labels: Int64s, codes: Int64s) -> Int64s:
    """Labels of which some are made equal: those of rows with the same code.

    Args:
        labels: int64 [K], 0 or more.
        codes: int64 [K]; -1 joins nothing.
    """
    coded = np.flatnonzero(codes >= 0)
    pairs = np.unique(np.stack([codes[coded], labels[coded]], axis=1), axis=0)
    # Only codes that stand in several labels have something to join.
    same = np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0]) + 1
    if not len(same):
        return labels
    into = np.arange(int(labels.max()) + 1).tolist()

    def find(label: int) -> int:
        while into[label] != label:
            into[label] = into[into[label]]
            label = into[label]
        return label

    for one, other in zip(pairs[same - 1, 1].tolist(), pairs[same, 1].tolist(), strict=True):
        one, other = find(one), find(other)
        into[max(one, other)] = min(one, other)
    return np.array([find(label) for label in range(len(into))], np.int64)[labels]


def _by_first_row(labels: Int64s) -> Int64s:
    """Labels as numbers from 0, in the order of the first row of each."""
    _, first, number = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number.reshape(-1)]


def sample_groups(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """The first rows of a file, whole groups (else whole trees) of them, up to `count` rows.

    Returns:
        The rows, and whether a group had to be cut because the first alone has more rows than that. Pairs stay
        whole even then: where the first rows are of one, there may be more than `count`.
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
    """The first rows of a group, whole pairs of them, up to `count` rows but at least one row or pair."""
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
