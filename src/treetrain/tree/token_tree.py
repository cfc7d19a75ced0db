"""The token tree: a batch of trajectories as one forest of tokens, a struct of numpy arrays in pre-order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.tree.assemble import Int32s, Int64s
from treetrain.tree.merged import MergedPredictions, Reduction
from treetrain.tree.nodes import Count, Node, NodeTrajectories, NodeTrajectory, grow
from treetrain.tree.stats import FlopCounter, TreeStats, tree_stats

Bools = NDArray[np.bool_]


class TrajectorySource(Protocol):
    """Where a tree's trajectories come from."""

    def trajectory(self, tree: "TokenTree", number: int) -> Trajectory:
        """Trajectory `number`, with all its facts."""
        ...

    def trained_edges(self, tree: "TokenTree", rows: Bools) -> tuple[Int64s, Int64s]:
        """What TokenTree.trained_edges returns, counting only the trajectories marked in `rows`."""
        ...

    def merged(self, tree: "TokenTree", reduction: Reduction) -> MergedPredictions | None:
        """What TokenTree.merged returns."""
        ...


@dataclass(frozen=True)
class RowTrajectories:
    """Rows as they were given; a row of bare ids is read back from the tree."""

    rows: Sequence[Trajectory | None]

    def trajectory(self, tree: "TokenTree", number: int) -> Trajectory:
        row = self.rows[number]
        return Trajectory(tree.tokens[tree.path(number)]) if row is None else row

    def trained_edges(self, tree: "TokenTree", rows: Bools) -> tuple[Int64s, Int64s]:
        offsets, index = tree.paths()
        used = np.repeat(rows, tree.trajectory_length)
        for number, row in enumerate(self.rows):
            if row is not None and row.loss_weights is not None:
                used[offsets[number] : offsets[number + 1]] &= row.loss_weights != 0
        used[offsets[:-1][tree.trajectory_length > 0]] = False
        at = np.flatnonzero(used)
        owner = np.repeat(np.arange(tree.num_trajectories), tree.trajectory_length)[at]
        deepest = np.zeros(tree.num_trajectories, np.int64)
        deepest[owner] = at - offsets[owner]  # the last write wins: the deepest
        return np.bincount(index[at], minlength=tree.num_tokens), deepest

    def merged(self, tree: "TokenTree", reduction: Reduction) -> None:
        """Rows are as long as their facts, so there is nothing to gain."""


class LazyTrajectories(Sequence[Trajectory]):
    """A tree's trajectories, each put together when it is asked for and not kept."""

    def __init__(self, tree: "TokenTree") -> None:
        self._tree = tree

    def __len__(self) -> int:
        return self._tree.num_trajectories

    @overload
    def __getitem__(self, number: int) -> Trajectory: ...
    @overload
    def __getitem__(self, number: slice) -> list[Trajectory]: ...
    def __getitem__(self, number: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"trajectory {number} of {len(self)}")
        return self._tree.source.trajectory(self._tree, number % len(self))

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTree:
    """A prefix forest of N tokens, S segments and K trajectories, in depth-first pre-order.

    Siblings stand heaviest first: more leaves, then more tokens, then the smaller trajectory number below.
    Token i is an ancestor of j, or j itself, exactly when `i <= j < end[i]`: the attention mask.
    """

    tokens: Int32s
    """int32 [N]: token ids."""
    parent: Int64s
    """int64 [N]: the token before it on its path; -1 at roots."""
    depth: Int32s
    """int32 [N]: tokens before it on its path (its rotary position)."""
    end: Int64s
    """int64 [N]: one past the last token of its subtree."""
    segment_start: Int64s
    """int64 [S + 1]: segment s is tokens segment_start[s] to segment_start[s + 1], a run without a fork."""
    segment_parent: Int64s
    """int64 [S]: the segment whose last token it continues; -1 at roots."""
    trajectory_last: Int64s
    """int64 [K]: each trajectory's last token; -1 for an empty one."""
    trajectory_length: Int64s
    """int64 [K]: tokens of each trajectory."""
    source: TrajectorySource = field(repr=False)
    """Gives the trajectories with their facts."""
    experts: NDArray[np.int16] | None = field(default=None, repr=False)
    """int16 [N, layers, k]: the recorded experts of each token, -1 where the router chooses; None where none are."""

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[Node],
        trajectories: Sequence[int | NodeTrajectory],
        *,
        unused: Literal["error", "drop"] = "error",
        count: Count = "per trajectory",
    ) -> Self:
        """The tree of a rollout that already knows its branches; equal to build_tree of its rows.

        Args:
            nodes: in any order; each names its parent by number, its ids and its per-token facts.
            trajectories: each trajectory's last node, as a number or a NodeTrajectory with the row's facts.
            unused: what to do with nodes on no trajectory: "error", or "drop" to leave them out.
            count: how often a node's tokens count in a loss. "per trajectory": once for every trajectory through the
                node, as the rows by themselves would. "once": one time, however many trajectories pass through, for
                objectives of the tree such as process rewards (TreeRL, arXiv 2506.11902). In `trajectories` a node's
                loss weights then stand in the first of its rows, and are 0 in the others. Losses that are no sums over
                tokens (`Loss.sums_tokens`) are refused by the engine.

        Siblings that begin with the same tokens are merged as far as they agree, unless their keys differ;
        each trajectory keeps its own nodes' facts. Runs without a fork are joined. Nothing is flattened.

        Raises:
            DataError: a parent or last node that does not exist, a cycle, nodes on no trajectory, ids or
                facts that a Trajectory would refuse, a fact that some trained nodes of a trajectory lack,
                advantages of a trajectory's own where tokens count once.
            ValueError: another word for `unused` or `count`.
        """
        arrays, last, length, source = grow(nodes, trajectories, unused, count)
        return cls(
            tokens=arrays.tokens,
            parent=arrays.parent,
            depth=arrays.depth,
            end=arrays.end,
            segment_start=arrays.segment_start,
            segment_parent=arrays.segment_parent,
            trajectory_last=last,
            trajectory_length=length,
            source=source,
        )

    def __repr__(self) -> str:
        return (
            f"TokenTree(trajectories={self.num_trajectories}, flat={self.num_flat_tokens}, "
            f"unique={self.num_tokens}, segments={self.num_segments})"
        )

    @property
    def count(self) -> Count:
        """How often the loss of a token counts that several trajectories share; see `from_nodes`."""
        return "once" if isinstance(self.source, NodeTrajectories) and self.source.owner else "per trajectory"

    @property
    def num_tokens(self) -> int:
        """Unique tokens N."""
        return len(self.tokens)

    @property
    def num_segments(self) -> int:
        """Segments S."""
        return len(self.segment_parent)

    @property
    def num_trajectories(self) -> int:
        """Trajectories K."""
        return len(self.trajectory_last)

    @cached_property
    def num_flat_tokens(self) -> int:
        """Tokens summed over the trajectories."""
        return int(self.trajectory_length.sum())

    @cached_property
    def trajectories(self) -> Sequence[Trajectory]:
        """The K trajectories with their facts, put together as they are asked for."""
        return LazyTrajectories(self)

    def segment_of(self, tokens: Int64s) -> Int64s:
        """The segment of each token index (-1 for -1)."""
        return np.searchsorted(self.segment_start, tokens, side="right") - 1

    def path(self, number: int) -> Int64s:
        """int64 [L_k]: tree indices of one trajectory, from its first token to its last."""
        last = int(self.trajectory_last[number])
        if last < 0:
            return np.zeros(0, np.int64)
        segment, stop, pieces = int(self.segment_of(np.array([last]))[0]), last + 1, []
        while segment >= 0:
            pieces.append(np.arange(self.segment_start[segment], stop, dtype=np.int64))
            segment = int(self.segment_parent[segment])
            stop = self.segment_start[segment + 1]
        return np.concatenate(pieces[::-1])

    def paths(self) -> tuple[Int64s, Int64s]:
        """All paths one after the other: (offsets int64 [K + 1], tree indices int64 [flat]). Cached."""
        return self._paths

    @cached_property
    def _paths(self) -> tuple[Int64s, Int64s]:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.trajectory_length)])
        # A path is +1 steps with a jump at each segment's first token: write the jumps, add them up.
        index = np.ones(int(offsets[-1]), np.int64)
        rows = np.flatnonzero(self.trajectory_length)
        first = offsets[rows]
        previous = np.concatenate([np.zeros(1, np.int64), self.trajectory_last[rows][:-1]])
        segment = self.segment_of(self.trajectory_last[rows])
        while len(segment):
            start, above = self.segment_start[segment], self.segment_parent[segment]
            before = np.where(above >= 0, self.segment_start[above + 1] - 1, previous)
            index[first + self.depth[start]] = start - before
            inner = above >= 0
            segment, first, previous = above[inner], first[inner], previous[inner]
        return offsets, np.cumsum(index, out=index)

    def trained_edges(self, rows: Bools | None = None) -> tuple[Int64s, Int64s]:
        """What is trained, counted on the tree; a tree from nodes is not flattened for it.

        Args:
            rows: bool [K], the trajectories that count; None counts all (and is cached).

        Returns:
            uses: int64 [N], how many trajectories train the prediction of each token (0 at roots).
            deepest: int64 [K], the depth of each trajectory's last trained token, which is also how many of
                its tokens must be computed (0: none is trained).
        """
        return self._trained_edges if rows is None else self.source.trained_edges(self, rows)

    @cached_property
    def _trained_edges(self) -> tuple[Int64s, Int64s]:
        return self.source.trained_edges(self, np.ones(self.num_trajectories, bool))

    def merged(self, reduction: Reduction) -> MergedPredictions | None:
        """The trained predictions with the rows through each node merged; None for a tree made from rows. Cached.

        A loss that is `mergeable` has the same sum, gradients and metrics on these as on the rows; they are at most
        four per trained token of a node, where the rows have as many as there are flat tokens.

        Args:
            reduction: the loss's: "token", or "trajectory".

        Raises:
            DataError: reduction "trajectory" and a negative loss weight.
            ValueError: another reduction.
        """
        if reduction not in self._merged:
            self._merged[reduction] = self.source.merged(self, reduction)
        return self._merged[reduction]

    @cached_property
    def _merged(self) -> dict[Reduction, MergedPredictions | None]:
        return {}

    def stats(self, shape: FlopCounter | None = None) -> TreeStats:
        """How much is shared, where, and what it is worth.

        Args:
            shape: the model's shape (`ModelShape`, or anything that counts FLOPs); None leaves the FLOP speed-ups
                out. `treetrain.stats(tree, "qwen3-8b")` takes a shape's name.
        """
        return tree_stats(self, shape)

    def validate(self) -> None:
        """Check every invariant of the arrays. Raises AssertionError: a broken tree is our bug."""
        count = self.num_tokens
        index = np.arange(count)
        start, above = self.segment_start, self.segment_parent
        assert len(self.parent) == len(self.depth) == len(self.end) == count
        assert len(start) == len(above) + 1 and start[-1] == count and start[0] == 0
        assert (np.diff(start) > 0).all(), "an empty segment"
        assert (above < np.arange(len(above))).all(), "a segment before its parent"
        expected = index - 1
        if len(above):
            expected[start[:-1]] = np.where(above >= 0, start[above + 1] - 1, -1)
        assert (self.parent == expected).all(), "parents disagree with segments"
        inner = self.parent >= 0
        assert (self.depth[~inner] == 0).all()
        assert (self.depth[inner] == self.depth[self.parent[inner]] + 1).all(), "depths disagree with parents"
        assert (self.end > index).all() and (self.end[inner] <= self.end[self.parent[inner]]).all()
        children = np.bincount(self.parent[inner], minlength=count) if count else np.zeros(0, np.int64)
        closing = np.zeros(count, bool)
        closing[start[1:] - 1] = True
        assert (children[~closing] == 1).all() and (children[closing] != 1).all(), "segments are not maximal"
        last = self.trajectory_last
        assert (self.trajectory_length == np.where(last >= 0, self.depth[last] + 1 if count else 0, 0)).all()
        assert np.isin(np.flatnonzero(children == 0), last).all(), "a leaf where no trajectory ends"
