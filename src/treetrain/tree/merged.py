"""The trained predictions of a tree of nodes with the rows through a node merged, so that no row is put together.

K = trajectories (rows), T = merged predictions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import PER_TOKEN_FACTS
from treetrain.errors import DataError
from treetrain.tree.assemble import Int64s

if TYPE_CHECKING:
    from treetrain.tree.nodes import NodeTrajectories
    from treetrain.tree.token_tree import TokenTree

Float64s = NDArray[np.float64]
Reduction = Literal["token", "trajectory"]

NEEDED_FACTS = tuple(name for name in PER_TOKEN_FACTS if name != "loss_weights")
"""Facts without a neutral value: where one node of a trajectory has them, its other trained nodes must too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPredictions:
    """T predictions with a loss weight, each with all rows that share it and its facts.

    All rows through a node share the node's weights and facts; only a row's own advantage (NodeTrajectory) may
    differ. So the rows through a node fall into at most four sets: those that take the node's advantages, and those
    with an advantage of their own below, at and above 0. Each set is one prediction for every trained token of the
    node, with S = the sum of the rows' shares and A = the share-weighted mean of their advantages. Then
    sum_k share_k x(l, A_k) = S x(l, A), exactly, for every x that is affine in the advantage on each side of 0.
    """

    reduction: Reduction
    """How shares are counted: "token", or "trajectory", where a row's weights are divided by their sum."""
    tokens: Int64s
    """int64 [T], ascending: the tree's index of the predicted token. One token may stand several times."""
    shares: Float64s
    """[T]: what the rows count in the loss's sum, together; never 0."""
    advantages: Float64s | None
    """[T]: mean over the rows, by share. None, as all facts below, where a trained row has none: see `lacking`."""
    old_logprobs: Float64s | None
    """[T], nats."""
    ref_logprobs: Float64s | None
    """[T], nats."""
    rollout_logprobs: Float64s | None
    """[T], nats."""
    teacher_logprobs: Float64s | None
    """[T], nats."""
    values: Float64s | None
    """[T]."""
    returns: Float64s | None
    """[T]."""
    normaliser: float
    """The sum of the shares ("token"), or the number of rows with a weight above 0 ("trajectory")."""
    num_trained: int
    """The number of rows with a weight above 0."""
    lacking: Mapping[str, str]
    """Name of a fact -> who is trained without it ("node 7")."""
    negative: str | None
    """Where a loss weight is below 0 ("node 7: loss_weights[0] = -1"); None if nowhere."""

    def __len__(self) -> int:
        """T."""
        return len(self.tokens)

    def reads(self, edge_tokens: Int64s) -> tuple[Int64s, Int64s]:
        """Which predictions read some edges, all of a layout or those of a piece of it.

        Args:
            edge_tokens: int64 [E]: the predicted token of each edge, all different.

        Returns:
            edges: int64 [t], ascending, 0 to E - 1: the edge that each of t predictions reads.
            index: int64 [t], 0 to T - 1: which predictions these are.
        """
        first = np.searchsorted(self.tokens, edge_tokens)
        count = np.searchsorted(self.tokens, edge_tokens, side="right") - first
        index = np.arange(int(count.sum())) + np.repeat(first - (np.cumsum(count) - count), count)
        return np.repeat(np.arange(len(edge_tokens)), count), index


def merge(source: "NodeTrajectories", tree: "TokenTree", reduction: Reduction) -> MergedPredictions:
    """See TokenTree.merged."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction is {reduction!r}; allowed are 'token', 'trajectory'")
    if source.owner and reduction == "trajectory":
        raise ValueError("tokens count once (count='once'), so they have no mean over trajectories; reduce by 'token'")
    weights = np.where(tree.depth[source.tree_index] > 0, source.weights, 0.0)
    negative = _negative(source, weights)
    if negative is not None and reduction == "trajectory":
        raise DataError(
            f"{negative}, but a mean over each trajectory needs weights of 0 or more; put signs into advantages and "
            'use the reinforce loss, or use reduction="token" and give the normaliser of the step yourself'
        )
    totals = _row_totals(source, weights)
    per_row = np.ones(len(totals))
    if reduction == "trajectory":
        per_row = np.divide(1.0, totals, out=np.zeros(len(totals)), where=totals > 0)
    own = np.array([np.nan if row.advantages is None else row.advantages for row in source.rows], np.float64)
    sets = list(_sets_of_rows(source, per_row, own))
    trained = np.flatnonzero(weights)
    lacking = _lacking(source, trained, own)
    of_nodes = _on_tokens(source, "advantages")
    at, shares, advantages = _predictions(source, weights, trained, sets, of_nodes)
    order = np.argsort(source.tree_index[at], kind="stable")
    at, shares = at[order], shares[order]
    facts = {name: None if name in lacking else _on_tokens(source, name)[at] for name in NEEDED_FACTS}
    if "advantages" not in lacking:
        facts["advantages"] = advantages[order]
    return MergedPredictions(
        reduction=reduction,
        tokens=source.tree_index[at],
        shares=shares,
        **facts,
        normaliser=float(shares.sum() if reduction == "token" else (totals > 0).sum()),
        num_trained=int((totals > 0).sum()),
        lacking=lacking,
        negative=negative,
    )


class _RowSet(NamedTuple):
    """Rows that may be merged wherever they share a node."""

    shares: Float64s
    """Per place in `order`: the sum of the rows through it, each counted 1 or 1 / its weights."""
    advantages: Float64s | None
    """Per place in `order`: the mean of the rows' own advantages; None where they take the node's."""


def _sets_of_rows(source: "NodeTrajectories", per_row: Float64s, own: Float64s) -> Iterator[_RowSet]:
    """The sets of MergedPredictions that have rows.

    Args:
        per_row: [K], what a weight of 1 on each row counts.
        own: [K], the rows' own advantages, NaN where they take the nodes'.
    """
    without = np.isnan(own)
    if without.any():
        yield _RowSet(_sum_below(source, np.where(without, per_row, 0.0)), None)
    for rows in (own < 0, own == 0, own > 0):
        if rows.any():
            shares = _sum_below(source, np.where(rows, per_row, 0.0))
            total = _sum_below(source, np.where(rows, per_row * own, 0.0))
            yield _RowSet(shares, np.divide(total, shares, out=np.zeros(len(shares)), where=shares > 0))


def _predictions(
    source: "NodeTrajectories", weights: Float64s, trained: Int64s, sets: list[_RowSet], of_nodes: Float64s
) -> tuple[Int64s, Float64s, Float64s]:
    """[T] each: node token, share and advantage of every prediction, one set of rows after the other."""
    place = source.place[trained]
    parts = [(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
    for rows in sets:
        here = rows.shares[place] > 0
        at, node = trained[here], place[here]
        advantages = of_nodes[at] if rows.advantages is None else rows.advantages[node]
        parts.append((at, weights[at] * rows.shares[node], advantages))
    at, shares, advantages = (np.concatenate(column) for column in zip(*parts))
    return at, shares, advantages


def _sum_below(source: "NodeTrajectories", per_row: Float64s) -> Float64s:
    """Per place in `order`: the sum over the rows through that node that count its tokens."""
    if source.owner:
        return per_row[np.array(source.owner, np.int64)[source.order]]
    ends = np.array([row.node for row in source.rows], np.int64)
    total = np.bincount(ends, weights=per_row, minlength=len(source.parents)).tolist()
    for node in reversed(source.order):
        above = source.parents[node]
        if above >= 0:
            total[above] += total[node]
    return np.array(total, np.float64)[source.order]


def _row_totals(source: "NodeTrajectories", weights: Float64s) -> Float64s:
    """[K]: the sum of the weights that each row counts."""
    total = [0.0] * len(source.parents)
    own = np.bincount(source.place, weights=weights, minlength=len(source.order)).tolist()
    for node, weight in zip(source.order, own):
        above = source.parents[node]
        follows = above >= 0 and (not source.owner or source.owner[above] == source.owner[node])
        total[node] = weight + (total[above] if follows else 0.0)
    counted = [not source.owner or source.owner[row.node] == number for number, row in enumerate(source.rows)]
    return np.array([total[row.node] if counts else 0.0 for row, counts in zip(source.rows, counted)], np.float64)


def _negative(source: "NodeTrajectories", weights: Float64s) -> str | None:
    below = weights < 0
    if not below.any():
        return None
    at = int(below.argmax())
    place = int(source.place[at])
    entry = at - int(np.searchsorted(source.place, place))
    return f"node {source.order[place]}: loss_weights[{entry}] = {weights[at]:g}"


def _on_tokens(source: "NodeTrajectories", name: str) -> Float64s:
    """A fact of the nodes' tokens, one node after the other; 0 on nodes without."""
    given = [getattr(source.contents[node], name) for node in source.order]
    if all(fact is None for fact in given):
        return np.zeros(len(source.place))
    blank = [np.zeros(len(source.contents[node])) if fact is None else fact for node, fact in zip(source.order, given)]
    return np.concatenate([np.zeros(0), *blank])


def _lacking(source: "NodeTrajectories", trained: Int64s, own: Float64s) -> dict[str, str]:
    """For every fact that a trained row misses: the first node where it does."""
    is_trained = np.zeros(len(source.order), bool)
    is_trained[source.place[trained]] = True
    found = {}
    for name in NEEDED_FACTS:
        has = np.array([getattr(source.contents[node], name) is not None for node in source.order], bool)
        misses = is_trained & ~has
        if name == "advantages" and misses.any():
            misses &= _sum_below(source, np.isnan(own).astype(np.float64)) > 0
        if misses.any():
            node = source.order[int(misses.argmax())]
            found[name] = f"node {node}"
            if name == "advantages" and not np.isnan(own).all():
                found[name] += f" (of trajectory number {_row_through(source, node, np.isnan(own))}, counted from 0)"
    return found


def _row_through(source: "NodeTrajectories", node: int, rows: NDArray[np.bool_]) -> int:
    """The first of the marked rows that passes through a node."""
    inside = [False] * len(source.parents)
    inside[node] = True
    for number in source.order:
        above = source.parents[number]
        inside[number] = inside[number] or (above >= 0 and inside[above])
    return next(k for k, row in enumerate(source.rows) if rows[k] and inside[row.node])
