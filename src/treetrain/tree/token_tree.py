"""The token tree: a batch of trajectories as one forest of tokens, stored as numpy arrays in pre-order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64
from numpy.typing import NDArray

from treetrain.data.images import Image
from treetrain.data.trajectory import Trajectory

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class TreeImages(NamedTuple):
    """The distinct images of a tree, and the tokens that stand for them."""

    token: int
    """The id of these tokens."""
    distinct: Sequence[Image]
    first: Int64[np.ndarray, " images_plus_1"]
    """The features of image m are first[m] to first[m + 1], one for each of its tokens."""
    feature: Int64[np.ndarray, " N"]
    """The feature that each token of the tree stands for; -1 for text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTree:
    """A prefix forest of N tokens, S segments and K trajectories, in depth-first pre-order.

    Siblings are ordered heaviest first: more leaves, then more tokens, then the smallest trajectory number below.
    Token i is j or an ancestor of j exactly when `i <= j < end[i]`: the attention mask.

        a b c d e        index     0  1  2  3  4  5
        a b c f          tokens    a  b  c  d  e  f        a b c ┬ d e
                         parent   -1  0  1  2  3  2              └ f
                         end       6  6  6  5  5  6
    """

    tokens: Int32[np.ndarray, " N"]
    parent: Int64[np.ndarray, " N"]
    """The token before it on its path; -1 at roots."""
    depth: Int32[np.ndarray, " N"]
    """Number of tokens before it on its path (its rotary position)."""
    end: Int64[np.ndarray, " N"]
    """One past the last token of its subtree."""
    segment_start: Int64[np.ndarray, " _"]
    """S + 1 entries: segment s is tokens [segment_start[s], segment_start[s + 1]), a run without a fork."""
    segment_parent: Int64[np.ndarray, " S"]
    """The segment whose last token it continues; -1 at roots."""
    trajectory_last: Int64[np.ndarray, " K"]
    """Each trajectory's last token; -1 for an empty one."""
    trajectory_length: Int64[np.ndarray, " K"]
    """Tokens of each trajectory."""
    rows: Sequence[Trajectory | None] = field(repr=False)
    """The K trajectories with their facts, None for a row given as ids only."""
    experts: Int16[np.ndarray, "N layers k"] | None = field(default=None, repr=False)
    """Recorded experts of each token, -1 where the router chooses; None if none were recorded."""
    images: TreeImages | None = field(default=None, repr=False)
    """The images of the rows; None for text."""

    def __repr__(self) -> str:
        return (
            f"TokenTree(trajectories={self.num_trajectories}, flat={self.num_flat_tokens}, "
            f"unique={self.num_tokens}, segments={self.num_segments})"
        )

    @property
    def num_tokens(self) -> int:
        """The number of unique tokens, N."""
        return len(self.tokens)

    @property
    def num_segments(self) -> int:
        """The number of segments, S."""
        return len(self.segment_parent)

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories, K."""
        return len(self.trajectory_last)

    @cached_property
    def num_flat_tokens(self) -> int:
        """Tokens summed over the trajectories."""
        return int(self.trajectory_length.sum())

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """The K trajectories with their facts."""
        ids = self.tokens
        return [Trajectory(ids[self.path(k)]) if row is None else row for k, row in enumerate(self.rows)]

    def path(self, number: int) -> Int64[np.ndarray, " L_k"]:
        """Tree indices of one trajectory, from its first token to its last."""
        return path_to(int(self.trajectory_last[number]), self.segment_start, self.segment_parent)

    def climb(
        self, tokens: Int64[np.ndarray, " k"], depth: Int64[np.ndarray, " k"] | int = 0
    ) -> Iterator[tuple[Int64s, Int64s]]:
        """Go from tokens up their paths, all at once, one segment per step.

        Args:
            tokens: -1 is skipped.
            depth: stop at the segment that holds this depth; 0 goes to the root.

        Yields:
            Indices of the tokens that have not stopped, and the current segment of each.
        """
        at = np.flatnonzero(tokens >= 0)
        goal = np.broadcast_to(depth, len(tokens))
        segment = np.searchsorted(self.segment_start, tokens[at], side="right") - 1
        while len(at):
            yield at, segment
            on = self.depth[self.segment_start[segment]] > goal[at]
            at, segment = at[on], self.segment_parent[segment[on]]

    def paths(self) -> tuple[Int64s, Int64s]:
        """All paths concatenated: (offsets int64 [K + 1], tree indices int64 [flat]). Cached."""
        return self._paths

    @cached_property
    def _paths(self) -> tuple[Int64s, Int64s]:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.trajectory_length)])
        # A path takes steps of +1, and a jump at each segment's first token: write the jumps, then cumsum.
        index = np.ones(int(offsets[-1]), np.int64)
        ended = self.trajectory_last[self.trajectory_last >= 0]
        previous = np.zeros(self.num_trajectories, np.int64)  # last token of the previous path
        previous[self.trajectory_last >= 0] = np.append(0, ended[:-1])[: len(ended)]
        for row, segment in self.climb(self.trajectory_last):
            start, above = self.segment_start[segment], self.segment_parent[segment]
            before = np.where(above >= 0, self.segment_start[above + 1] - 1, previous[row])
            index[offsets[row] + self.depth[start]] = start - before
        return offsets, np.cumsum(index, out=index)

    @cached_property
    def trained_predictions(self) -> Bool[np.ndarray, " flat"]:
        """Tokens whose prediction has a loss weight, over the concatenated trajectories."""
        trained = np.ones(self.num_flat_tokens, bool)
        start = np.cumsum(self.trajectory_length) - self.trajectory_length
        for first, length, row in zip(start.tolist(), self.trajectory_length.tolist(), self.rows, strict=True):
            if row is not None and row.loss_weights is not None:
                trained[first : first + length] = row.loss_weights != 0
        trained[start[self.trajectory_length > 0]] = False
        return trained

    def trained_edges(self, rows: Bool[np.ndarray, " K"] | None = None) -> tuple[Int64s, Int64s]:
        """Count the trained predictions of the tree.

        Args:
            rows: the trajectories that count; None counts all (and is cached).

        Returns:
            uses: int64 [N], how many trajectories train the prediction of each token (0 at roots).
            deepest: int64 [K], the depth of each trajectory's last trained token, which is also the number of its
                tokens to compute (0 if none is trained).
        """
        if rows is None:
            return self._all_trained_edges
        offsets, index = self.paths()
        at = np.flatnonzero(self.trained_predictions & np.repeat(rows, self.trajectory_length))
        owner = np.repeat(np.arange(self.num_trajectories), self.trajectory_length)[at]
        deepest = np.zeros(self.num_trajectories, np.int64)
        deepest[owner] = at - offsets[owner]  # the last write wins, so the deepest is kept
        return np.bincount(index[at], minlength=self.num_tokens), deepest

    @cached_property
    def _all_trained_edges(self) -> tuple[Int64s, Int64s]:
        return self.trained_edges(np.ones(self.num_trajectories, bool))


def path_to(token: int, segment_start: Int64s, segment_parent: Int64s) -> Int64[np.ndarray, " _"]:
    """Depth + 1 entries: the tokens from the root to `token`; empty for -1. Segments are a tree's or a layout's."""
    pieces, stop = [np.zeros(0, np.int64)], token + 1
    segment = int(np.searchsorted(segment_start, token, side="right")) - 1
    while segment >= 0:
        pieces.append(np.arange(segment_start[segment], stop, dtype=np.int64))
        segment = int(segment_parent[segment])
        stop = int(segment_start[segment + 1])
    return np.concatenate(pieces[::-1])


# ---- laying out a tree

# Turn runs of tokens and their attach positions into a token tree's arrays: cut at forks, heaviest child first.
#
#     runs     a b c d e     attach to                pieces    a b c ── d e
#              f             the c of the first run                   └─ f
#
# 1. A run is cut after every token that another run attaches to. The pieces form a tree, parents before children.
# 2. A bottom-up pass aggregates each subtree: tokens, leaves, smallest trajectory number. This orders siblings by
#    weight, and gives their distances in pre-order.
# 3. A top-down pass gives positions: a piece starts after the last token of its parent and after the subtrees of its
#    heavier siblings. Depths are computed the same way, without the siblings.
# 4. Tokens are copied piece by piece. A piece that is its parent's only child continues the parent's segment, so
#    segments are maximal runs without a fork.

_THIN = 64  # with fewer pieces a Python loop is faster than a numpy call


class TreeArrays(NamedTuple):
    """The arrays of a TokenTree of N tokens and S segments; `TokenTree` documents them."""

    tokens: Int32s
    parent: Int64s
    depth: Int32s
    end: Int64s
    segment_start: Int64s
    segment_parent: Int64s


class Pieces(NamedTuple):
    """Runs cut after every token that another run attaches to; parents come before children."""

    source: Int64s  # first buffer position
    length: Int64s
    parent: Int64s  # parent piece, -1 at roots; a piece attaches to the last token of its parent


def assemble(
    buffer: Int32[np.ndarray, " B"],
    run_start: Int64[np.ndarray, " R"],
    run_length: Int64[np.ndarray, " R"],
    run_attach: Int64[np.ndarray, " R"],
    last: Int64[np.ndarray, " K"],
) -> tuple[TreeArrays, Callable[[Int64s], Int64s]]:
    """Lay out runs of tokens as one tree in depth-first pre-order, heaviest child first.

    Args:
        buffer: run r is buffer[run_start[r] : run_start[r] + run_length[r]]; gaps are allowed.
        run_start: first buffer positions, increasing.
        run_length: tokens of each run, at least 1.
        run_attach: the buffer position, in an earlier run, that the run continues; -1 for a root.
        last: the buffer position of every trajectory's last token, -1 for an empty one.

    Runs that attach to the same position must start with different tokens or keys: nothing is merged here.

    Returns:
        The arrays, and a function from buffer positions to tree indices (-1 stays -1).
    """
    pieces = _cut(run_start, run_length, run_attach)
    levels = _leaves_first(pieces.parent)
    tokens_below, weight, number = _subtree_sums(pieces, levels, last)
    # Sort siblings: more leaves first, then more tokens, then the smaller trajectory number.
    order = np.lexsort((number, -weight, pieces.parent))
    target, depth = _positions(pieces, levels, tokens_below, order)

    def moved(positions: Int64s) -> Int64s:
        piece = np.searchsorted(pieces.source, positions, side="right") - 1
        inside = positions >= 0
        shift = np.zeros(len(positions), np.int64)
        shift[inside] = target[piece[inside]] - pieces.source[piece[inside]]
        return positions + shift

    return _lay_out(buffer, pieces, target, depth, tokens_below), moved


def _cut(run_start: Int64s, run_length: Int64s, run_attach: Int64s) -> Pieces:
    attach = np.unique(run_attach[run_attach >= 0])
    owner = np.searchsorted(run_start, attach, side="right") - 1
    inner = attach[attach + 1 < run_start[owner] + run_length[owner]]
    source = np.concatenate([run_start, inner + 1])
    before = np.concatenate([run_attach, inner])
    stop = np.concatenate([run_start + run_length, inner + 1])
    order = np.argsort(source, kind="stable")
    source, before = source[order], before[order]
    stop = np.sort(stop)  # runs are disjoint and increasing, so the k-th piece ends at the k-th stop
    parent = np.where(before >= 0, np.searchsorted(source, before, side="right") - 1, -1)
    return Pieces(source, stop - source, parent)


class _Levels(NamedTuple):
    """Orders the pieces for bottom-up and top-down passes without recursion, vectorised over layers of leaves."""

    layers: list[Int64s]  # outermost leaves first; parents are in later layers or in `core`
    core: list[int]  # the rest, once layers are small (long chains of forks); children before parents


def _leaves_first(parent: Int64s) -> _Levels:
    pending = np.bincount(parent + 1, minlength=len(parent) + 1)[1:]
    left = np.ones(len(parent), bool)
    layers: list[Int64s] = []
    ready = np.flatnonzero(pending == 0)
    while len(ready) >= _THIN:
        layers.append(ready)
        left[ready] = False
        above = parent[ready]
        above = above[above >= 0]
        np.subtract.at(pending, above, 1)
        ready = np.unique(above[pending[above] == 0])
    return _Levels(layers, np.flatnonzero(left)[::-1].tolist())


def _subtree_sums(pieces: Pieces, levels: _Levels, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Sum up each piece's subtree: tokens; (leaves, tokens) encoded as one integer; smallest trajectory number."""
    parent, count = pieces.parent, len(pieces.source)
    number = np.full(count, len(last), np.int64)
    holder = np.searchsorted(pieces.source, last, side="right") - 1
    ends = np.flatnonzero(last >= 0)[::-1]
    number[holder[ends]] = ends  # the last write wins, so the smallest number is kept
    tokens, leaves = pieces.length.copy(), np.ones(count, np.int64)
    leaves[parent[parent >= 0]] = 0
    for layer in levels.layers:
        layer = layer[parent[layer] >= 0]
        np.add.at(tokens, parent[layer], tokens[layer])
        np.add.at(leaves, parent[layer], leaves[layer])
        np.minimum.at(number, parent[layer], number[layer])
    for piece in levels.core:
        above = parent[piece]
        if above >= 0:
            tokens[above] += tokens[piece]
            leaves[above] += leaves[piece]
            number[above] = min(number[above], number[piece])
    return tokens, leaves * (int(pieces.length.sum()) + 1) + tokens, number


def _positions(pieces: Pieces, levels: _Levels, tokens_below: Int64s, order: Int64s) -> tuple[Int64s, Int64s]:
    """Find the tree index and the depth of every piece's first token."""
    parent, length = pieces.parent, pieces.length
    target, depth = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    if len(order) == 0:
        return target, depth
    # First the offset from the first sibling; then, top down, add the end of the parent.
    before = np.cumsum(tokens_below[order]) - tokens_below[order]
    first = np.flatnonzero(np.diff(parent[order], prepend=-2))
    target[order] = before - np.repeat(before[first], np.diff(first, append=len(order)))
    for piece in reversed(levels.core):
        above = parent[piece]
        if above >= 0:
            target[piece] += target[above] + length[above]
            depth[piece] = depth[above] + length[above]
    for layer in reversed(levels.layers):
        layer = layer[parent[layer] >= 0]
        above = parent[layer]
        target[layer] += target[above] + length[above]
        depth[layer] = depth[above] + length[above]
    return target, depth


def _lay_out(buffer: Int32s, pieces: Pieces, target: Int64s, depth: Int64s, tokens_below: Int64s) -> TreeArrays:
    order = np.argsort(target, kind="stable")
    start, length, above = target[order], pieces.length[order], pieces.parent[order]
    total = int(length.sum())
    index = np.arange(total, dtype=np.int64)
    tokens = buffer[index + np.repeat(pieces.source[order] - start, length)]
    depths = (index + np.repeat(depth[order] - start, length)).astype(np.int32)
    end = np.repeat(start + tokens_below[order], length)
    before = np.where(above >= 0, target[above] + pieces.length[above] - 1, -1)
    index -= 1
    index[start] = before
    children = np.bincount(above[above >= 0], minlength=len(order))
    # A piece that is the only child of its parent continues the parent's segment.
    opens = (above < 0) | (children[above] > 1)
    segment_start = np.append(start[opens], total)
    before = before[opens]
    segment_parent = np.where(before >= 0, np.searchsorted(segment_start, before, side="right") - 1, -1)
    return TreeArrays(tokens, index, depths, end, segment_start, segment_parent)


def ranges(first: Int64s, count: Int64s) -> Int64s:
    """Concatenate the ranges first[i], ..., first[i] + count[i] - 1: int64 [count.sum()]."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first - before, count)
