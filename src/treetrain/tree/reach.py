"""How far back along its path a token sees, and how many (query, key) pairs that makes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treetrain.tree.assemble import Int64s


class Reach(NamedTuple):
    """What a layer's attention sees of the path above and including a token: all of it, unless a field says less."""

    window: int | None = None
    """The last so many tokens of the path, the token itself included."""
    chunk: int | None = None
    """The path is cut into pieces of so many tokens, and a token sees its own piece as far as itself."""

    def seen(self, depth: Int64s) -> Int64s:
        """int64: keys that a token sees at each depth (0 for a path's first token)."""
        seen = depth + 1
        if self.window is not None:
            seen = np.minimum(seen, self.window)
        if self.chunk is not None:
            seen = np.minimum(seen, depth % self.chunk + 1)
        return seen

    def pairs_of(self, lengths: Int64s) -> int:
        """Pairs of rows of these lengths, each by itself."""
        lengths = np.asarray(lengths, np.int64)
        most = int(lengths.max(initial=0))
        # Rows of one length see the same, so a table over lengths is enough, whatever the rule.
        upto = np.concatenate([[0], np.cumsum(self.seen(np.arange(most)))])
        return int(upto[lengths].sum())


FULL = Reach()

Pairs = int | Mapping[Reach, int]
"""Visible pairs per head and layer: of full attention, or by reach where layers see less."""


def pairs_at(depth: Int64s, reaches: Sequence[Reach] = (FULL,)) -> Pairs:
    """Pairs of tokens at these depths of their paths: a number for full attention alone, else by reach."""
    if tuple(reaches) == (FULL,):
        return int((depth + 1).sum(dtype=np.int64))
    return {reach: int(reach.seen(depth).sum(dtype=np.int64)) for reach in reaches}


def pairs_of_rows(lengths: Int64s, reaches: Sequence[Reach] = (FULL,)) -> Pairs:
    """The same of rows of these lengths, each by itself."""
    if tuple(reaches) == (FULL,):
        return int((lengths * (lengths + 1) // 2).sum(dtype=np.int64))
    return {reach: reach.pairs_of(lengths) for reach in reaches}
