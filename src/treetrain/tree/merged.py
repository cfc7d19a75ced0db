"""Merge the rows through each node of a node tree into a few trained predictions, without building any row.

All rows through a node share the node's weights and facts; only a row's own advantage (NodeTrajectory) may differ. So
the rows through a node form at most four sets: rows that use the node's advantages, and rows with an own advantage
below, at and above 0. Each set gives one prediction per trained token of the node, where S is the sum of the rows'
shares and A the share-weighted mean of their advantages. Then sum_k share_k x(l, A_k) = S x(l, A), exactly, for every x
that is affine in the advantage on each side of 0.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treetrain.data.columns import GIVEN
from treetrain.errors import DataError
from treetrain.tree.assemble import Int64s, ranges
from treetrain.tree.nodes import Float64s, NodeRows

Reduction = Literal["token", "trajectory"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPredictions:
    """T predictions with a loss weight, each for all rows that share it and its facts."""

    reduction: Reduction
    """How shares are computed: "token", or "trajectory", which divides a row's weights by their sum."""
    tokens: Int64s
    """int64 [T], ascending: tree index of the predicted token. A token may occur several times."""
    shares: Float64s
    """[T]: total weight of the rows in the loss's sum; never 0."""
    facts: Mapping[str, Float64s]
    """[T] each, by name; advantages are share-weighted means over the rows. Without those that a trained row lacks."""
    normaliser: float
    """The sum of the shares ("token"), or the number of rows with a weight above 0 ("trajectory")."""
    num_trained: int
    """The number of rows with a weight above 0."""
    lacking: Mapping[str, str]
    """Name of a fact -> the first node trained without it ("node 7")."""
    negative: str | None
    """The first loss weight below 0 ("node 7: loss_weights[0] = -1"); None if there is none."""

    def __len__(self) -> int:
        """T."""
        return len(self.tokens)

    def reads(self, edge_tokens: Int64s) -> tuple[Int64s, Int64s]:
        """Find the predictions that read the given edges, of a layout or of a piece of one.

        Args:
            edge_tokens: int64 [E]: the predicted token of each edge, all different.

        Returns:
            edges: int64 [t], ascending, 0 to E - 1: the edge that each of t predictions reads.
            index: int64 [t], 0 to T - 1: indices of these predictions.
        """
        first = np.searchsorted(self.tokens, edge_tokens)
        count = np.searchsorted(self.tokens, edge_tokens, side="right") - first
        return np.repeat(np.arange(len(edge_tokens)), count), ranges(first, count)


def merge(rows: NodeRows, reduction: Reduction) -> MergedPredictions:
    """See TokenTree.merged."""
    if reduction not in ("token", "trajectory"):
        raise ValueError(f"reduction is {reduction!r}; allowed are 'token', 'trajectory'")
    if rows.owner and reduction == "trajectory":
        raise ValueError("tokens count once (count='once'), so they have no mean over trajectories; reduce by 'token'")
    negative = _negative(rows)
    if negative is not None and reduction == "trajectory":
        raise DataError(
            f"{negative}, but a mean over each trajectory needs weights of 0 or more; put signs into advantages and "
            'use the reinforce loss, or use reduction="token" and give the normaliser of the step yourself'
        )
    totals = rows.along_rows(np.bincount(rows.place, rows.weights, minlength=len(rows.contents)), operator.add)
    per_row = np.ones(len(totals))
    if reduction == "trajectory":
        per_row = np.divide(1.0, totals, out=np.zeros(len(totals)), where=totals > 0)
    own = np.array([np.nan if row.advantages is None else row.advantages for row in rows.rows], np.float64)
    lacking = _lacking(rows, own)
    facts = {name: _on_tokens(rows, name) for name in GIVEN if name not in lacking}

    trained = np.flatnonzero(rows.weights)
    node = rows.place[trained]
    none = np.zeros(0)
    parts = [(trained[:0], none, none)]
    for members in (np.isnan(own), own < 0, own == 0, own > 0):
        if not members.any():
            continue
        share = rows.sum_over_rows(np.where(members, per_row, 0.0))
        at, here = trained[share[node] > 0], node[share[node] > 0]
        if np.isnan(own[members][0]):
            advantage = facts["advantages"][at] if "advantages" in facts else none
        else:
            advantage = rows.sum_over_rows(np.where(members, per_row * own, 0.0))[here] / share[here]
        parts.append((at, rows.weights[at] * share[here], advantage))
    at, shares, advantages = (np.concatenate(column) for column in zip(*parts))
    order = np.argsort(rows.tree_index[at], kind="stable")
    at, shares = at[order], shares[order]
    facts = {name: values[at] for name, values in facts.items()}
    if "advantages" not in lacking:
        facts["advantages"] = advantages[order]
    return MergedPredictions(
        reduction=reduction,
        tokens=rows.tree_index[at],
        shares=shares,
        facts=facts,
        normaliser=float(shares.sum() if reduction == "token" else (totals > 0).sum()),
        num_trained=int((totals > 0).sum()),
        lacking=lacking,
        negative=negative,
    )


def _on_tokens(rows: NodeRows, name: str) -> Float64s:
    """[T]: a fact of the nodes' tokens, concatenated over nodes; 0 on nodes without it."""
    given = [getattr(part, name) for part in rows.contents]
    blank = [np.zeros(len(part)) if fact is None else fact for part, fact in zip(rows.contents, given)]
    return np.concatenate([np.zeros(0), *blank])


def _negative(rows: NodeRows) -> str | None:
    if not (rows.weights < 0).any():
        return None
    at = int((rows.weights < 0).argmax())
    place = int(rows.place[at])
    entry = at - int(np.searchsorted(rows.place, place))
    return f"node {rows.numbers[place]}: loss_weights[{entry}] = {rows.weights[at]:g}"


def _lacking(rows: NodeRows, own: Float64s) -> dict[str, str]:
    """For every fact that a trained row lacks, the first node without it.

    Args:
        own: [K], the rows' own advantages, NaN for rows that use the nodes'.
    """
    lacking = {}
    for name in GIVEN:
        misses = rows.is_trained & np.array([getattr(part, name) is None for part in rows.contents], bool)
        if name == "advantages":
            misses &= rows.sum_over_rows(np.isnan(own)) > 0
        if misses.any():
            node = int(misses.argmax())
            lacking[name] = f"node {rows.numbers[node]}"
            if name == "advantages" and not np.isnan(own).all():
                row = next(k for k in np.flatnonzero(np.isnan(own)).tolist() if node in rows.path(k))
                lacking[name] += f" (of trajectory number {row}, counted from 0)"
    return lacking
