"""What one packed forward needs: the tree tokens that must be computed, and the edges they own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.tree.assemble import Int64s
from treetrain.tree.stats import needed_tokens
from treetrain.tree.token_tree import TokenTree

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """M tokens in pre-order with E edges on R rows, and the T flat predictions that read them.

    A row here is a position of the packed forward whose hidden state predicts something.
    """

    input_ids: Int64s
    """int64 [M]."""
    positions: Int64s
    """int64 [M]: depth on the path (rotary positions)."""
    ends: Int64s
    """int64 [M]: subtree ends; token i sees token j when j <= i < ends[j]."""
    tree_index: Int64s
    """int64 [M]: the tree's index of each token kept."""
    segment_start: Int64s
    """int64 [S + 1]: maximal runs without a fork, of the tokens kept."""
    segment_parent: Int64s
    """int64 [S]: -1 at roots."""
    edge_rows: Int64s
    """int64 [E], ascending: the position whose hidden state predicts the edge's token."""
    edge_targets: Int64s
    """int64 [E]: the predicted token ids."""
    rows: Int64s
    """int64 [R], ascending: the positions that own an edge; the LM head runs on these alone."""
    edge_row_index: Int64s
    """int64 [E]: index into `rows`."""
    flat_edges: Int64s
    """int64 [T]: the edge that each used prediction reads, trajectory by trajectory."""
    flat_index: Int64s
    """int64 [T]: where these stand in the concatenation of all trajectories' (L_k - 1) predictions."""
    num_predictions: int
    """Length of that concatenation (an empty trajectory adds 0)."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, M."""
        return len(self.input_ids)

    @property
    def num_edges(self) -> int:
        """Unique used edges, E."""
        return len(self.edge_rows)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs: the attention work."""
        return int((self.positions + 1).sum())


def trained_predictions(trajectories: Sequence[Trajectory]) -> Bools:
    """bool [flat]: predictions with non-zero loss weight, all trajectories' tokens one after the other."""
    parts = []
    for row in trajectories:
        used = np.ones(len(row), bool) if row.loss_weights is None else row.loss_weights != 0
        used[:1] = False
        parts.append(used)
    return np.concatenate([np.zeros(0, bool), *parts])


def pack(tree: TokenTree, used: Bools | None = None, *, trim: bool = True) -> PackedLayout:
    """Lay out one packed forward over the whole tree.

    Args:
        tree: N unique tokens, `flat` tokens over its trajectories.
        used: bool [flat], over all trajectories' tokens one after the other: entry t of a trajectory says
            whether the prediction of its ids[t] is wanted (entry 0 is ignored: nothing predicts it).
            None wants all of them.
        trim: keep only tokens that a wanted prediction looks at (its predecessor and what is before that);
            False keeps every tree token.

    Raises:
        ValueError: `used` of another length.
    """
    offsets, index = tree.paths()
    if used is not None and used.shape != (len(index),):
        raise ValueError(f"used has shape {used.shape}, the trajectories have {len(index)} tokens in all")
    wanted = np.ones(len(index), bool) if used is None else used.astype(bool)
    wanted[offsets[:-1][tree.trajectory_length > 0]] = False
    at = np.flatnonzero(wanted)
    trajectory = np.repeat(np.arange(tree.num_trajectories), tree.trajectory_length)[at]
    empty_before = np.cumsum(tree.trajectory_length == 0)
    tokens = index[at]

    predicted = np.zeros(tree.num_tokens, bool)
    predicted[tokens] = True
    edges = np.flatnonzero(predicted)
    kept = needed_tokens(tree, edges) if trim else np.ones(tree.num_tokens, bool)
    new_index = np.concatenate([[0], np.cumsum(kept)])  # also maps subtree ends
    edges = edges[np.argsort(tree.parent[edges], kind="stable")]
    edge_rows = new_index[tree.parent[edges]]
    rows, edge_row_index = np.unique(edge_rows, return_inverse=True)
    edge_of = np.empty(tree.num_tokens, np.int64)
    edge_of[edges] = np.arange(len(edges))
    keep = np.flatnonzero(kept)
    parent = np.where(tree.parent[keep] >= 0, new_index[tree.parent[keep]], -1)
    segment_start, segment_parent = segments(parent)
    return PackedLayout(
        input_ids=tree.tokens[keep].astype(np.int64),
        positions=tree.depth[keep].astype(np.int64),
        ends=new_index[tree.end[keep]],
        tree_index=keep,
        segment_start=segment_start,
        segment_parent=segment_parent,
        edge_rows=edge_rows,
        edge_targets=tree.tokens[edges].astype(np.int64),
        rows=rows,
        edge_row_index=edge_row_index,
        flat_edges=edge_of[tokens],
        flat_index=at - 1 - trajectory + empty_before[trajectory],
        num_predictions=len(index) - int((tree.trajectory_length > 0).sum()),
    )


def segments(parent: Int64s) -> tuple[Int64s, Int64s]:
    """Maximal runs without a fork of a forest in pre-order: (start int64 [S + 1], parent segment int64 [S]).

    Args:
        parent: int64 [M], each token's parent, -1 at roots.
    """
    count = len(parent)
    children = np.bincount(parent + 1, minlength=count + 1)[1:]
    opens = (parent < 0) | (children[parent] > 1) if count else np.zeros(0, bool)
    start = np.flatnonzero(opens)
    of = np.cumsum(opens) - 1
    before = parent[start]
    return np.append(start, count), np.where(before >= 0, of[before], -1)
