"""How far back along its path a token sees, and the number of visible (query, key) pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treetrain.tree.assemble import Int64s


@dataclass(frozen=True, slots=True)
class AttentionRange:
    """The tokens of its path that a token sees: all of them, a sliding window, or its chunk. It always sees itself.

    Distances are counted along the path, so a window or chunk across a fork or a part boundary covers the same tokens
    as in the separate row.
    """

    window: int | None = None
    """A token at depth d sees depths above d - window."""
    chunk: int | None = None
    """A token at depth d sees depths from (d // chunk) * chunk on."""

    def __post_init__(self) -> None:
        sizes = [size for size in (self.window, self.chunk) if size is not None]
        if len(sizes) > 1 or any(size < 1 for size in sizes):
            raise ValueError(f"{self}: give one size of at least 1, or none")

    def lowest(self, depth: Any) -> Any:
        """The smallest depth visible from each depth; takes and returns an integer array or tensor."""
        if self.window is not None:
            return (depth - (self.window - 1)).clip(0)
        if self.chunk is not None:
            return depth // self.chunk * self.chunk
        return depth * 0

    def seen(self, depth: Any) -> Any:
        """Number of tokens visible from each depth, the token itself included."""
        return depth - self.lowest(depth) + 1

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"


FULL = AttentionRange()

Pairs = int | Mapping[AttentionRange, int]
"""Visible pairs per head and layer: one number for full attention, or a number per range."""


def pairs_at(depth: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """Visible pairs of tokens at these depths of their paths: a number for full attention alone, else by range."""
    pairs = {each: int(each.seen(depth).sum(dtype=np.int64)) for each in ranges}
    return pairs[FULL] if tuple(ranges) == (FULL,) else pairs


def pairs_of_rows(lengths: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """Visible pairs of separate rows of these lengths."""
    # A row's pairs depend on its length alone, so a running sum over depths is enough.
    depth = np.arange(int(lengths.max(initial=0)))
    pairs = {each: int(np.append(0, np.cumsum(each.seen(depth)))[lengths].sum()) for each in ranges}
    return pairs[FULL] if tuple(ranges) == (FULL,) else pairs
