"""The token tree: a batch of trajectories as one forest of tokens, stored as numpy arrays in pre-order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.tree.assemble import Int64s

Bools = NDArray[np.bool_]


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
