"""Axes and numbers: where ticks stand, how values read, and how many points a line needs."""

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treetrain.report.records import Column

Floats = NDArray[np.float64]
LOG_SPAN = 300.0
"""Positive values that span so many times their least are told apart on a logarithmic axis only."""
BUCKETS = 150
"""Of a line: two points each, which is finer than a chart's pixels on most screens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, from `start` at `low` to `stop` at `high`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> Floats:
        """Pixels; values outside land outside."""
        given = np.asarray(values, float)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                share = (np.log(np.maximum(given, self.low)) - math.log(self.low)) / math.log(self.high / self.low)
        else:
            share = (given - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int) -> list[float]:
        """At most about so many round values inside."""
        return _log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def value_range(values: Floats, *, log: bool, zero: bool) -> tuple[float, float]:
    """Ends of an axis that holds all values with some air, 0 too where it is wanted."""
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.3, max(high * 1.3, low * 2)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        around = abs(low) * 0.1 or 1.0
        return (0.0, high + around) if zero and low >= 0 else (low - around, high + around)
    air = 0.06 * (high - low)
    return low - (0 if zero and low == 0 else air), high + (0 if zero and high == 0 else air)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` multiples of 1, 2 or 5 times a power of ten from `low` to `high`, as many as there can be."""
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    for step in (power * size for size in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < count:
            return [number * step for number in range(first, last + 1)]
    return [low, high]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / (count + 1)))
    ticks = [10.0**power for power in range(first, last + 1) if (power - last) % every == 0]
    return ticks if len(ticks) > 1 else linear_ticks(low, high, count)


def step_ticks(low: int, high: int, count: int) -> list[int]:
    """Whole numbers only."""
    if high <= low:
        return [low]
    return sorted({round(tick) for tick in linear_ticks(low, high, count) if abs(tick - round(tick)) < 1e-9})


def rolling_mean(values: Floats, window: int) -> Floats:
    """Mean of the up to `window` values around each; NaN counts for nothing."""
    good = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(good, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(good)))
    at = np.arange(len(values))
    first, last = np.maximum(at - window // 2, 0), np.minimum(at + (window + 1) // 2, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[last] - sums[first]) / (counts[last] - counts[first])


def thinned(column: Column, buckets: int = BUCKETS) -> Column:
    """At most two points a bucket, the least and the largest, so that no spike is lost."""
    count = len(column)
    if count <= 2 * buckets:
        return column
    kept: list[int] = []
    for first, last in _edges(count, buckets):
        part = column.values[first:last]
        good = np.flatnonzero(np.isfinite(part))
        if not len(good):
            kept.append(first)  # a gap stays a gap
            continue
        ends = {int(good[part[good].argmin()]), int(good[part[good].argmax()])}
        kept += [first + at for at in sorted(ends)]
    return Column(column.steps[kept], column.values[kept])


def envelope(column: Column, buckets: int = BUCKETS) -> tuple[Floats, Floats, Floats]:
    """Middle step, least and largest value of every bucket that has numbers."""
    found = []
    for first, last in _edges(len(column), min(buckets, len(column))):
        part = column.values[first:last]
        part = part[np.isfinite(part)]
        if len(part):
            found.append((float(column.steps[(first + last) // 2]), float(part.min()), float(part.max())))
    steps, lows, highs = np.array(found).T
    return steps, lows, highs


def averaged(column: Column, buckets: int) -> Column:
    """The mean of every bucket, at its middle step; as it is where there are fewer points."""
    if len(column) <= buckets:
        return column
    steps, values = [], []
    for first, last in _edges(len(column), buckets):
        part = column.values[first:last]
        steps.append(int(column.steps[(first + last) // 2]))
        values.append(float(np.nanmean(part)) if np.isfinite(part).any() else math.nan)
    return Column(np.array(steps, np.int64), np.array(values))


def _edges(count: int, buckets: int) -> list[tuple[int, int]]:
    edges = np.linspace(0, count, buckets + 1).astype(int)
    return [(int(first), int(last)) for first, last in itertools.pairwise(edges) if last > first]
