"""How far back along its path a token sees, and how many (query, key) pairs that makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treetrain.tree.assemble import Int64s


@dataclass(frozen=True, slots=True)
class AttentionRange:
    """Which tokens of its path a token sees, itself always: all of them, the nearest ones, or those of its chunk.

    Distances are counted along a token's own path, so a window or chunk that crosses a fork, or the border of a part,
    covers the same tokens as in the row by itself.
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
        """The least depth that a token at each depth sees. An integer array or tensor in, the like out."""
        if self.window is not None:
            return (depth - (self.window - 1)).clip(0)
        if self.chunk is not None:
            return depth // self.chunk * self.chunk
        return depth * 0

    def seen(self, depth: Any) -> Any:
        """How many tokens a token at each depth sees, itself included."""
        return depth - self.lowest(depth) + 1

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"


FULL = AttentionRange()

Pairs = int | Mapping[AttentionRange, int]
"""Visible pairs per head and layer: of full attention, or by range where layers see less."""


def pairs_at(depth: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """Pairs of tokens at these depths of their paths: a number for full attention alone, else by range."""
    pairs = {each: int(each.seen(depth).sum(dtype=np.int64)) for each in ranges}
    return pairs[FULL] if tuple(ranges) == (FULL,) else pairs


def pairs_of_rows(lengths: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """The same of rows of these lengths, each by itself."""
    # Rows of one length have the same pairs, so a running sum over depths is enough.
    depth = np.arange(int(lengths.max(initial=0)))
    pairs = {each: int(np.append(0, np.cumsum(each.seen(depth)))[lengths].sum()) for each in ranges}
    return pairs[FULL] if tuple(ranges) == (FULL,) else pairs
