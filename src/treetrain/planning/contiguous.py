"""A sequence of units cut into contiguous ranges whose costliest is as cheap as possible.

A range costs what its units use, and what several use counts once. What is used from unit f to unit l is used by the
range [i, j) exactly when f < j and l >= i, so with opened[j] = all that begins before j and closed[i] = all that ends
before i, a range costs opened[j] - closed[i], whatever its length. It grows with j and falls with i; all else rests on
that.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from treetrain.tree.assemble import Int64s

Floats = NDArray[np.float64]
_RESOLUTION = 2.0**50
"""Steps that all seconds are counted in: whole numbers, so that sums are exact and equal on every machine."""
_MOST_STATES = 1 << 25
"""Of the search for the cheapest of the even cuts; above it the first even cut is taken."""


class Loads(NamedTuple):
    """What ranges of U units cost, in whole numbers."""

    opened: Int64s
    """int64 [U + 1]: what begins before each unit."""
    closed: Int64s
    """int64 [U + 1]: what ends before each unit."""
    unit: float = 1.0
    """What one step is worth."""
    slack: int = 0
    """Steps by which ranges that cost the same may differ, since each unit's share was rounded."""

    @classmethod
    def of_counts(cls, opened: Int64s, closed: Int64s) -> Self:
        """Of what begins, and what ends, at each unit."""
        return cls(_sums(opened.astype(np.int64)), _sums(closed.astype(np.int64)))

    @classmethod
    def of_seconds(cls, opened: Floats, closed: Floats) -> Self:
        """The same in seconds."""
        total = float(opened.sum())
        unit = total / _RESOLUTION if total > 0 else 1.0
        whole = [np.rint(part / unit).astype(np.int64) for part in (opened, closed)]
        return cls(_sums(whole[0]), _sums(whole[1]), unit, slack=2 * len(opened))

    @property
    def units(self) -> int:
        """How many, U."""
        return len(self.opened) - 1

    def of(self, bounds: Int64s) -> Int64s:
        """int64 [R]: of the ranges between R + 1 bounds; 0 where one is empty."""
        return np.where(np.diff(bounds) > 0, self.opened[bounds[1:]] - self.closed[bounds[:-1]], 0)


def cut_evenly(loads: Loads, ranges: int) -> Int64s:
    """int64 [ranges + 1]: the bounds, the first 0 and the last U.

    The costliest range is as cheap as any cut into so many contiguous ranges can have it; of such cuts the one of the
    least sum is taken, and of those one that leaves few ranges empty.
    """
    if ranges == 1 or loads.units == 0:
        return np.array([0] + [loads.units] * ranges, np.int64)
    limit = _least_limit(loads, ranges) + loads.slack
    if loads.units * ranges > _MOST_STATES:
        greedy = _filled(loads, limit, ranges)
        assert greedy is not None
        return greedy
    return _least_sum(loads, limit, ranges)


def _sums(values: Int64s) -> Int64s:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])


def _least_limit(loads: Loads, ranges: int) -> int:
    """The smallest limit that so many ranges can keep."""
    alone = loads.opened[1:] - loads.closed[:-1]
    low = max(int(alone.max()), -(-int(loads.opened[-1]) // ranges))
    high = max(low, int(loads.opened[-1]))
    while low < high:
        middle = (low + high) // 2
        if _filled(loads, middle, ranges) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _filled(loads: Loads, limit: int, ranges: int) -> Int64s | None:
    """Every range filled up to a limit, from the first on; None where so many are not enough."""
    bounds = [0]
    while len(bounds) <= ranges:
        start = bounds[-1]
        stop = int(np.searchsorted(loads.opened, limit + loads.closed[start], side="right")) - 1
        bounds.append(max(stop, start))
    return np.array(bounds, np.int64) if bounds[-1] == loads.units else None


def _least_sum(loads: Loads, limit: int, ranges: int) -> Int64s:
    """The cut of the least sum whose ranges all keep the limit."""
    stops = np.arange(loads.units + 1)
    first = np.searchsorted(loads.closed, loads.opened - limit)  # the earliest start that keeps the limit
    never = np.iinfo(np.int64).max // 4
    sums = np.full(loads.units + 1, never, np.int64)
    sums[0] = 0
    found = [sums]
    for _ in range(ranges):
        before = found[-1]
        ended = _least_in_windows(before - loads.closed, first, stops)
        sums = np.minimum(before, ended + loads.opened)  # a range may be empty
        found.append(np.minimum(sums, never))
    bounds = [loads.units]
    for before, sums in zip(found[-2::-1], found[:0:-1]):
        stop = bounds[-1]
        starts = before[first[stop] : stop] - loads.closed[first[stop] : stop] + loads.opened[stop]
        good = np.flatnonzero(starts == sums[stop])
        # The latest start: the range stays short and the ranges before it have something left.
        bounds.append(int(first[stop] + good[-1]) if len(good) else stop)
    return np.array(bounds[::-1], np.int64)


def _least_in_windows(values: Int64s, first: Int64s, stops: Int64s) -> Int64s:
    """int64 [U + 1]: the least of values[first[u] : u] for every u; a large number where that is empty.

    Each window is covered by two overlapping ones whose length is a power of two.
    """
    length = stops - first
    found = np.full(len(stops), np.iinfo(np.int64).max // 4, np.int64)
    level = np.frexp(np.maximum(length, 0).astype(np.float64))[1] - 1
    table, width = values, 1
    for number in range(int(level.max()) + 1):
        here = np.flatnonzero(level == number)
        if len(here):
            found[here] = np.minimum(table[first[here]], table[stops[here] - width])
        if len(table) > width:
            table = np.minimum(table[:-width], table[width:])
        width *= 2
    return found
