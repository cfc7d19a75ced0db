"""Runs of consecutive forks of a chain whose light subtrees could share one rectangle.

The *light* subtrees of a fork are those of all its children but the first. Take forks i..j of a chain, i above j. In
pre-order their light subtrees are adjacent, the deepest fork's first, and form one token range R. All of R sees the
chain down to fork i: one unmasked rectangle. R also sees the chain between forks i and j and its own tokens: tiles over
R with short paths. So a chain of 100,000 forks needs a few hundred calls, not 100,000.

Shape letters: N tokens, S segments, B candidate blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

MAX_BLOCK_PATH = 512
"""Longest path of a block's tokens below its first fork. Blocks with longer paths save little and need large masks."""
BLOCK_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Sizes of the blocks tried at each fork, in tiles; larger ones would save next to nothing."""


class ForkBlocks(NamedTuple):
    """Candidate blocks, ordered by their last (deepest) fork. A fork is numbered by the segment that ends in it."""

    offset: list[int]
    """[S + 1]: the last fork of blocks [offset[s], offset[s + 1]) is s."""
    first: list[int]
    """[B]: the first (shallowest) fork of each block; less than the last."""
    cost: list[float]
    """[B]: predicted cost of the rectangle and the tiles, in query-key pairs."""


def path_tops(parent: Int64[np.ndarray, "S"]) -> Int64[np.ndarray, "S"]:
    """For each segment, the top segment of its path of first children."""
    index = np.arange(len(parent))
    return np.maximum.accumulate(np.where(parent != index - 1, index, 0))


class Ancestors:
    """Looks up the ancestors of tokens by depth, the position of every token on its path."""

    def __init__(self, parent: Int64[np.ndarray, "S"], start: Int64[np.ndarray, "S+1"], depth: Int64[np.ndarray, "N"]):
        self._start, self._parent, self._depth, self._top = start, parent, depth, path_tops(parent)

    def between(self, token: int, low: int, high: int) -> list[tuple[int, int]]:
        """The proper ancestors of `token` at depths [low, high), as token ranges, shallowest first."""
        found: list[tuple[int, int]] = []
        segment, stop = int(np.searchsorted(self._start, token, side="right")) - 1, token
        while segment >= 0:
            # A path of first children is contiguous, so it takes one step however many forks it has.
            top = int(self._top[segment])
            start = int(self._start[top])
            depth = int(self._depth[start])
            piece = max(start, start + low - depth), min(stop, start + high - depth)
            if piece[0] < piece[1]:
                found.append(piece)
            if depth <= low:
                break
            segment = int(self._parent[top])
            stop = int(self._start[segment + 1])
        return found[::-1]


def tokens_in(pieces: list[tuple[int, int]]) -> Int64[np.ndarray, "tokens"]:
    """The tokens of the ranges, concatenated."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(*piece) for piece in pieces)])


def fork_blocks(
    *,
    parent: Int64[np.ndarray, "S"],
    start: Int64[np.ndarray, "S+1"],
    end: Int64[np.ndarray, "S"],
    depth: Int64[np.ndarray, "N"],
    max_depth: Int64[np.ndarray, "S"],
    tile: int,
    rectangle: Callable[[Any, Any], Any],
    tiles: Callable[[Any, Any], Any],
) -> ForkBlocks:
    """The blocks worth trying, in O(S log S) time.

    Args:
        parent, start, end: segments and the exclusive ends of their subtrees.
        depth: position of every token on its path. max_depth: largest depth in each subtree.
        tile: queries in a tile.
        rectangle: cost as a function of (queries, keys). tiles: cost of (query slots, mean keys outside the tile).
    """
    count = len(parent)
    top = path_tops(parent)
    forks = np.flatnonzero(top[1:] == top[:-1])  # segments whose first child continues their path
    if len(forks) < 2:
        return ForkBlocks([0] * (count + 1), [], [])
    stop, bottom = end[forks], end[forks + 1]  # light subtrees of a fork: tokens [bottom, stop)
    below = depth[start[forks + 1]]  # first position on the chain below the fork
    keys = start[forks + 1] - start[top[forks]]
    path = np.cumsum(np.diff(top[forks], prepend=top[forks[0]]) != 0)  # numbers the chains
    highest = _highest_first(path, below, _light_depth(parent, max_depth)[forks])
    # Ends decrease along a chain; negated and offset by chain number they increase overall, as searchsorted needs.
    falling = path * (int(end.max()) + 1) - stop
    depth_sum = np.concatenate([[0], np.cumsum(depth, dtype=np.int64)])
    last = np.arange(len(forks))
    first = np.empty((len(forks), len(BLOCK_TILES)), dtype=np.int64)
    cost = np.empty(first.shape)
    for k, length in enumerate(BLOCK_TILES):
        i = np.searchsorted(falling, path * (int(end.max()) + 1) - (bottom + length * tile))
        i = np.maximum(i, highest)
        first[:, k] = i
        i = np.minimum(i, last)
        queries = stop[i] - bottom
        near = depth_sum[stop[i]] - depth_sum[bottom] - queries * below[i]
        pieces = -(-queries // tile)
        # A tile gathers the path of its first token; its later tokens attach higher up and see less of that path.
        slack = (below - below[i]) / (2 * np.maximum(pieces, 1))
        cost[:, k] = rectangle(queries, keys[i]) + tiles(pieces * tile, near / np.maximum(queries, 1) + slack)
    tried = first < last[:, None]
    tried[:, 1:] &= first[:, 1:] < first[:, :-1]
    per_segment = np.zeros(count, dtype=np.int64)
    per_segment[forks] = tried.sum(axis=1)
    offset = np.concatenate([[0], np.cumsum(per_segment)])
    return ForkBlocks(offset.tolist(), forks[first[tried]].tolist(), cost[tried].tolist())


def _light_depth(parent: Int64[np.ndarray, "S"], max_depth: Int64[np.ndarray, "S"]) -> Int64[np.ndarray, "S"]:
    """Largest depth in the light subtrees of each segment's fork; -1 if it has none."""
    found = np.full(len(parent), -1, dtype=np.int64)
    light = np.flatnonzero((parent >= 0) & (parent != np.arange(len(parent)) - 1))
    np.maximum.at(found, parent[light], max_depth[light])
    return found


def _highest_first(
    path: Int64[np.ndarray, "forks"], below: Int64[np.ndarray, "forks"], deepest: Int64[np.ndarray, "forks"]
) -> Int64[np.ndarray, "forks"]:
    """The highest fork from which a block down to each fork has no path longer than ``MAX_BLOCK_PATH``.

    The next fork if there is none.
    """
    size = int(max(below.max(), deepest.max())) + 1
    # below[i] > deepest - MAX_BLOCK_PATH, i on the same chain; positions rise along a chain.
    needed = np.clip(deepest - MAX_BLOCK_PATH + 1, 0, size)
    least = np.searchsorted(path * (size + 1) + below, path * (size + 1) + needed)
    # A block includes all forks between, so the strictest limits it; a fork that fits in no block separates blocks.
    return np.maximum.accumulate(np.minimum(least, np.arange(len(path)) + 1))
