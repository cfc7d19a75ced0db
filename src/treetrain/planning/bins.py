"""Items into bins of one capacity."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

_FEW = 64


class Packed(NamedTuple):
    """Which bin every item is in, and how full the bins are."""

    bin_of: list[int]
    loads: list[int]


def pack_bins(sizes: Sequence[int], capacity: int) -> Packed:
    """Best fit decreasing: every item, the largest first, goes where it leaves the least room.

    Args:
        sizes: n items, each > 0. One above the capacity has a bin of its own.
        capacity: of each bin.

    Equal items keep their order. Time n log n and a little more.
    """
    total = sum(sizes)
    if total <= capacity:
        return Packed([0] * len(sizes), [total] if sizes else [])
    smallest = min(sizes)
    bin_of, loads = [0] * len(sizes), []
    room: list[tuple[int, int]] = []  # (room, bin) of bins that can still take the smallest item
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, number = room.pop(at)
            loads[number] += size
        else:
            left, number = capacity, len(loads)
            loads.append(size)
        bin_of[item] = number
        if left - size >= smallest:
            insort(room, (left - size, number))
    return Packed(bin_of, loads)


def pack_evenly(sizes: Sequence[int], capacity: int) -> Packed:
    """As many bins, and where these are few, about equally full: every item, the largest first, to the emptiest."""
    packed = pack_bins(sizes, capacity)
    if not 1 < len(packed.loads) <= _FEW:
        return packed
    loads = [(0, number) for number in range(len(packed.loads))]
    bin_of = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, number = loads[0]
        bin_of[item] = number
        heapreplace(loads, (load + sizes[item], number))
    if max(loads)[0] >= max(packed.loads):
        return packed
    return Packed(bin_of, [load for load, _ in sorted(loads, key=lambda entry: entry[1])])
