"""How two rows agree again after they differ, and which earlier row each row is compared with.

Why no difference is missed (`align`). Rows that agree again hold a run of `RUN` equal tokens. All runs of the row's
next tokens are looked up by a rolling hash among those of the partner, and the pair that skips fewest tokens is taken,
verified token by token. So a difference is found whatever it is: tokens that are missing in one row, added or replaced.
A comparison takes tens of microseconds where rows agree
and about a millisecond where they differ for thousands of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.core.tree.trajectory import common_prefix
from treetrain.logs.columns import sorted_by_prefix

Ids = NDArray[np.int32]
RUN = 16
"""Equal tokens in a row after which two rows count as agreeing again."""
WINDOWS = (512, 1 << 14)
"""How far ahead to look for a run: the second number only where the first finds none."""


class Gap(NamedTuple):
    """A difference between two rows that agree before and after it."""

    first_start: int
    first_stop: int
    """Tokens [start, stop) of the first row."""
    second_start: int
    second_stop: int
    """Those of the second row; either may be empty."""


class Alignment(NamedTuple):
    """How two rows agree from their beginnings on."""

    gaps: list[Gap]
    first_end: int
    """Tokens of the first row up to where they part for good, or one of them ends."""
    second_end: int

    @property
    def agreed(self) -> int:
        """Equal tokens before, between and after the gaps."""
        return self.first_end - sum(gap.first_stop - gap.first_start for gap in self.gaps)

    def run_after(self, number: int) -> int:
        """Equal tokens between a gap and the next one, or the end."""
        later = self.gaps[number + 1].first_start if number + 1 < len(self.gaps) else self.first_end
        return later - self.gaps[number].first_stop


def align(first: Ids, second: Ids, *, to_end: bool = False, run: int = RUN) -> Alignment:
    """Follow two rows through their differences.

    Args:
        first: int32 [L].
        second: int32 [M].
        run: equal tokens after which both count as agreeing again, a power of two.
        to_end: whether the second row is expected to contain all of the first: then fewer than `RUN` tokens at the
            end of the first row are an agreement too.
    """
    gaps: list[Gap] = []
    i = j = 0
    while True:
        same = common_prefix(first[i:], second[j:])
        i, j = i + same, j + same
        if i == first.size or j == second.size:
            return Alignment(gaps, i, j)
        found = None
        if min(first.size - i, second.size - j) >= run:  # an agreement has so many tokens
            found = _agreement(first[i:], second[j:], run)
        if not found and to_end:
            found = _ending(first[i:], second[j:])
        if not found:
            return Alignment(gaps, i, j)
        gaps.append(Gap(i, i + found[0], j, j + found[1]))
        i, j = i + found[0], j + found[1]


def _agreement(first: Ids, second: Ids, run: int) -> tuple[int, int] | None:
    """Where both agree again: how many tokens to skip in each.

    This is the place that skips fewest tokens, unless it may be a phrase that is repeated: if fewer tokens agree there
    than are skipped, or a quarter of those that agree where tokens are only missing in one of the two.
    """
    one, other = (_run_hashes(ids[: WINDOWS[-1]], run) for ids in (first, second))
    if not one.size or not other.size:
        return None
    missing = [(int(i), 0) for i in np.flatnonzero(one == other[0])[:4]]
    missing += [(0, int(j)) for j in np.flatnonzero(other == one[0])[:4]]
    best = max(((common_prefix(first[i:], second[j:]), i, j) for i, j in missing), default=(0, 0, 0))
    for window in WINDOWS:
        values, at = np.unique(one[:window], return_index=True)  # the first position of each run
        place = np.minimum(np.searchsorted(values, other[:window]), values.size - 1)
        hits = np.flatnonzero(values[place] == other[:window])
        near = hits[np.argsort(hits + at[place[hits]], kind="stable")[:4]].tolist()
        found = [(common_prefix(first[at[place[j]] :], second[j:]), int(at[place[j]]), j) for j in near]
        for equal, i, j in found:
            if equal >= max(run, i, j) and 4 * equal >= best[0]:
                return i, j
        best = max([best, *found])
        if max(one.size, other.size) <= window:
            break
    return best[1:] if best[0] >= run else None


def _run_hashes(ids: Ids, run: int) -> NDArray[np.uint64]:
    """A hash of every run of so many tokens, uint64 [L - run + 1]."""
    hashes = ids.astype(np.uint64) + np.uint64(1)
    width, factor = 1, 0x9E3779B97F4A7C15
    while width < run:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor % (1 << 64)
    return hashes


def _ending(first: Ids, second: Ids) -> tuple[int, int] | None:
    """As `_agreement`, for the longest of the last tokens of `first`, fewer than `RUN`, that stand in `second`."""
    near = second[: 2 * first.size + RUN]
    for count in range(min(RUN - 1, first.size, near.size), 0, -1):
        tail = first[-count:]
        starts = np.flatnonzero(near[: near.size - count + 1] == tail[0])
        for j in starts.tolist():
            if np.array_equal(near[j : j + count], tail):
                return first.size - count, j
    return None


def find_run(first: Ids, second: Ids, most: int) -> tuple[int, int, int]:
    """Where the beginning of the second row stands in the first, but for up to `most` tokens.

    Returns:
        Tokens before that place in the first row, tokens of the second that are not there, and tokens that agree.
    """
    anchor = second[most : most + RUN]
    size = first.size - anchor.size + 1
    if anchor.size < RUN or size <= 0:
        return 0, 0, 0
    hits = np.flatnonzero(first[:size] == anchor[0])
    for at in range(1, RUN):
        hits = hits[first[hits + at] == anchor[at]]
    if not hits.size:
        return 0, 0, 0
    best = max(hits.tolist(), key=lambda at: common_prefix(first[at:], second[most:]))
    back = common_prefix(first[max(best - most, 0) : best][::-1], second[:most][::-1])
    return best - back, most - back, back + common_prefix(first[best:], second[most:])


def earlier_partners(numbers: Sequence[int], ids: Callable[[int], NDArray[np.integer]]) -> dict[int, tuple[int, int]]:
    """For every row but the first: the row before it in `numbers` that shares the longest prefix, and its length.

    Args:
        numbers: row numbers, in the order in which they count as earlier.
        ids: the token ids of a row.
    """
    when = {number: place for place, number in enumerate(numbers)}
    ordered, shared = map(list, zip(*sorted_by_prefix(list(numbers), ids)))
    best: dict[int, tuple[int, int]] = {}
    for row, partner, length in (*_nearest(ordered, shared, when), *_nearest(ordered[::-1], [0, *shared[:0:-1]], when)):
        if row not in best or length > best[row][1]:
            best[row] = (partner, length)
    return best


def _nearest(ordered: list[int], shared: list[int], when: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """(row, the nearest row before it in the order that is also earlier, tokens they share)."""
    stack: list[tuple[int, int]] = []  # (row, tokens it shares with the row below it on the stack); ascending `when`
    for row, length in zip(ordered, shared):
        while stack and when[stack[-1][0]] > when[row]:
            length = min(length, stack.pop()[1])
        if stack:
            yield row, stack[-1][0], length
        stack.append((row, length))
