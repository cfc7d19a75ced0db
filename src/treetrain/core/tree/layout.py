"""The tokens of a tree that a forward computes, their predictions (edges), pieces of both, and how far tokens see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from treetrain.core.tree.token_ids import MAX_TOKEN_ID, IdSets
from treetrain.core.tree.token_tree import Int64s, TokenTree, ranges, segments

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """M tokens in pre-order with E edges on R rows.

    A row here is a position whose hidden state predicts a token.
    """

    input_ids: Int64[np.ndarray, " M"]
    positions: Int64[np.ndarray, " M"]
    """Depth in the tree (rotary position); a piece below other tokens starts above 0."""
    parent: Int64[np.ndarray, " M"]
    """The token before it on its path; -1 if that is not in this layout."""
    ends: Int64[np.ndarray, " M"]
    """Subtree ends; token i sees token j when j <= i < ends[j]."""
    tree_index: Int64[np.ndarray, " M"]
    edge_rows: Int64[np.ndarray, " E"]
    """Ascending: the position whose hidden state predicts the edge's token."""
    edge_targets: Int64[np.ndarray, " E"]
    edge_tokens: Int64[np.ndarray, " E"]
    """Tree index of the predicted token; -1 for a further id that is scored (`TokenTree.id_sets`)."""

    @cached_property
    def _segments(self) -> tuple[Int64s, Int64s]:
        return segments(self.parent)

    @property
    def segment_start(self) -> Int64[np.ndarray, " _"]:
        """S + 1 entries: starts of the maximal runs without a fork."""
        return self._segments[0]

    @property
    def segment_parent(self) -> Int64[np.ndarray, " S"]:
        """The segment that each continues; -1 at roots."""
        return self._segments[1]

    @cached_property
    def edge_row_index(self) -> Int64[np.ndarray, " E"]:
        """The index in `rows` of each edge's position."""
        return np.cumsum(np.diff(self.edge_rows, prepend=-1) != 0) - 1

    @cached_property
    def rows(self) -> Int64[np.ndarray, " R"]:
        """Ascending: the positions with an edge; the LM head runs only on these."""
        return self.edge_rows[np.diff(self.edge_rows, prepend=-1) != 0]

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens, M."""
        return len(self.input_ids)

    @property
    def num_edges(self) -> int:
        """The number of edges, E."""
        return len(self.edge_rows)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs on whole paths with full attention."""
        return int((self.positions + 1).sum())


class Piece(NamedTuple):
    """Some tokens of a layout as a layout of their own."""

    layout: PackedLayout
    edges: Int64[np.ndarray, " e"]
    """Indices of these edges in the whole layout."""
    rows: Int64[np.ndarray, " r"]
    """Indices of these rows in the whole layout."""


def pack(tree: TokenTree, predicted: Bool[np.ndarray, " N"] | None = None, *, trim: bool = True) -> PackedLayout:
    """Lay out the tokens of a tree that must be computed.

    Args:
        tree: N unique tokens.
        predicted: whether the prediction of each token is wanted (roots have none and are ignored).
            None wants all of them.
        trim: keep only tokens that a wanted prediction depends on (its predecessor and the path above that);
            False keeps every tree token.

    Raises:
        ValueError: `predicted` of another length.
    """
    if predicted is not None and predicted.shape != (tree.num_tokens,):
        raise ValueError(f"predicted has shape {predicted.shape}, the tree {tree.num_tokens} tokens")
    wanted = tree.parent >= 0 if predicted is None else predicted & (tree.parent >= 0)
    edges = np.flatnonzero(wanted)
    kept = needed_tokens(tree, edges) if trim else np.ones(tree.num_tokens, bool)
    new_index = np.concatenate([[0], np.cumsum(kept)])  # also maps subtree ends
    rows, targets = tree.parent[edges], tree.tokens[edges].astype(np.int64)
    if tree.id_sets:
        own = rows << 32 | targets
        pairs = [_pairs(tree, sets, np.flatnonzero(wanted[tree.paths()[1]])) for sets in tree.id_sets.values()]
        more = np.setdiff1d(np.concatenate(pairs), own)  # each id once for each row
        edges = np.concatenate([edges, np.full(len(more), -1)])
        rows, targets = np.concatenate([rows, more >> 32]), np.concatenate([targets, more & MAX_TOKEN_ID])
    order = np.argsort(rows, kind="stable")  # by row; the edges of a fork stay in pre-order
    keep = np.flatnonzero(kept)
    before = tree.parent[keep]
    return PackedLayout(
        input_ids=tree.tokens[keep].astype(np.int64),
        positions=tree.depth[keep].astype(np.int64),
        parent=np.where(before >= 0, new_index[before], -1),
        ends=new_index[tree.end[keep]],
        tree_index=keep,
        edge_rows=new_index[rows[order]],
        edge_targets=targets[order],
        edge_tokens=edges[order],
    )


def _pairs(tree: TokenTree, sets: IdSets, places: Int64s) -> Int64s:
    """One number for each id at some places of the paths: that of the row that predicts there, and the id."""
    index = tree.paths()[1][places]
    return np.repeat(tree.parent[index], sets.counts[places]) << 32 | sets.ids[sets.entries(places)]


def set_reads(tree: TokenTree, layout: PackedLayout, sets: IdSets, places: Int64s) -> Int64s:
    """Find the edge that scores each id of a tree's sets at some places of the paths."""
    known = layout.tree_index[layout.edge_rows] << 32 | layout.edge_targets
    order = np.argsort(known, kind="stable")
    return order[np.searchsorted(known[order], _pairs(tree, sets, places))]


def pack_states(tree: TokenTree, wanted: Bool[np.ndarray, " N"] | None = None) -> PackedLayout:
    """Lay out a whole tree to read tokens' own hidden states instead of predictions.

    Edges go from tokens to themselves: edge and row e stand for the e-th wanted token, and its id is the target.

    Args:
        tree: N unique tokens, all of which are computed.
        wanted: tokens whose states are read; None means all.
    """
    at = np.arange(tree.num_tokens) if wanted is None else np.flatnonzero(wanted)
    return PackedLayout(
        input_ids=tree.tokens.astype(np.int64),
        positions=tree.depth.astype(np.int64),
        parent=tree.parent.astype(np.int64),
        ends=tree.end.astype(np.int64),
        tree_index=np.arange(tree.num_tokens),
        edge_rows=at,
        edge_targets=tree.tokens[at].astype(np.int64),
        edge_tokens=at,
    )


def cut(layout: PackedLayout, tokens: Int64[np.ndarray, " m"]) -> Piece:
    """Select some tokens of a layout and the edges they predict, in the same order.

    Args:
        tokens: positions in the layout, ascending.
    """
    place = np.full(layout.num_tokens + 1, -1, np.int64)  # the last entry serves parents of roots, -1
    place[tokens] = np.arange(len(tokens))
    first = np.searchsorted(layout.edge_rows, tokens)
    edges = ranges(first, np.searchsorted(layout.edge_rows, tokens, side="right") - first)
    rows = np.flatnonzero(place[layout.rows] >= 0) if len(layout.rows) else layout.rows
    piece = PackedLayout(
        input_ids=layout.input_ids[tokens],
        positions=layout.positions[tokens],
        parent=place[layout.parent[tokens]],  # -1 where the parent is in another part
        ends=np.searchsorted(tokens, layout.ends[tokens]),  # pre-order stays: a subtree is one range here too
        tree_index=layout.tree_index[tokens],
        edge_rows=place[layout.edge_rows[edges]],
        edge_targets=layout.edge_targets[edges],
        edge_tokens=layout.edge_tokens[edges],
    )
    return Piece(piece, edges, rows)


def flat_reads(tree: TokenTree, layout: PackedLayout, used: Bool[np.ndarray, " flat"]) -> tuple[Int64s, Int64s]:
    """Find the edge that each used prediction of each trajectory reads.

    A trajectory of L tokens has L - 1 predictions, one for every token but the first. So a token's place among the
    concatenated predictions is its place among the concatenated tokens, minus one for its own trajectory's first token
    and one for the first token of every trajectory before it that is not empty.

    Args:
        used: over the concatenated trajectories' tokens (entry 0 of each is ignored);
            each used prediction's edge must be in the layout.

    Returns:
        edges: int64 [T], the edge of each used prediction, trajectory by trajectory.
        index: int64 [T], their indices in the concatenation of the trajectories' (L_k - 1) predictions; an empty
            trajectory has none.
    """
    offsets, index = tree.paths()
    if used.shape != (len(index),):
        raise ValueError(f"used has shape {used.shape}, the trajectories have {len(index)} tokens in all")
    wanted = used.astype(bool)
    wanted[offsets[:-1][tree.trajectory_length > 0]] = False
    at = np.flatnonzero(wanted)
    trajectory = np.repeat(np.arange(tree.num_trajectories), tree.trajectory_length)[at]
    # Trajectory k has k trajectories before it, and the empty ones among them have no first token.
    empty_before = np.cumsum(tree.trajectory_length == 0)
    edge_of = np.full(tree.num_tokens + 1, -1, np.int64)  # the last entry serves further ids, -1
    edge_of[layout.edge_tokens] = np.arange(layout.num_edges)
    return edge_of[index[at]], at - 1 - trajectory + empty_before[trajectory]


def needed_tokens(tree: TokenTree, edges: Int64s) -> Bool[np.ndarray, " N"]:
    """Tokens at or above the predecessor of an edge (an edge is given by its predicted token)."""
    reads = np.zeros(tree.num_tokens + 1, np.int64)
    reads[tree.parent[edges] + 1] = 1  # shifted by one, so that sums over ranges are differences
    reads = np.cumsum(reads)
    return reads[tree.end] > reads[:-1]  # whether the token's subtree holds a predecessor


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
        # A bool is an int, and a float would mask otherwise than the model does.
        whole = all(isinstance(size, int | np.integer) and not isinstance(size, bool) for size in sizes)
        if not whole or len(sizes) > 1 or any(size < 1 for size in sizes):
            raise ValueError(f"{self}: give one size, a whole number of at least 1, or none")

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

Pairs = Mapping[AttentionRange, int]
"""Visible pairs per head and layer, for every range that layers have."""


def pairs_at(depth: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """Count the pairs that tokens at these depths of their paths see."""
    return {each: int(each.seen(depth).sum(dtype=np.int64)) for each in ranges}
