"""Build a token tree from a rollout that is already a tree: nodes with parents, trajectories named by their last node.

Nothing is flattened. Nodes are checked one by one and inserted into a set of runs of tokens, which `assemble` lays out
like the rows of `build_tree`. Sums over the trajectories through a node are computed on the tree of nodes.

For the loss, the rows through a node are merged without building any row. They share the node's weights and facts; only
a row's own advantage (NodeTrajectory) may differ. So they form at most four sets: rows that use the node's advantages,
and rows with an own advantage below, at and above 0. Each set gives one prediction per trained token of the node. Let S
be the sum of a set's shares and A the share-weighted mean of its advantages. Then sum_k share_k x(l, A_k) = S x(l, A),
exactly, for every x that is affine in the advantage on each side of 0.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike, NDArray

from treetrain.data.columns import GIVEN
from treetrain.data.trajectory import PER_TOKEN_FACTS, LazyTrajectories, Trajectory, common_prefix
from treetrain.errors import DataError
from treetrain.tree.assemble import Int32s, Int64s, TreeArrays, assemble, ranges

Float64s = NDArray[np.float64]
Count = Literal["per trajectory", "once"]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A run of tokens that continues another node, with the per-token facts of its tokens.

    Entry t of a fact belongs to the prediction of ids[t] from the token before it on the path.
    """

    parent: int | None
    """Number of the node it continues; None or -1 at a root."""
    ids: ArrayLike
    """Token ids [L]; may be empty."""
    loss_weights: ArrayLike | None = None
    """[L] or one number; None trains every token with weight 1."""
    advantages: ArrayLike | None = None
    """[L] or one number."""
    old_logprobs: ArrayLike | None = None
    """[L], nats."""
    ref_logprobs: ArrayLike | None = None
    """[L], nats."""
    rollout_logprobs: ArrayLike | None = None
    """[L], nats."""
    teacher_logprobs: ArrayLike | None = None
    """[L], nats."""
    values: ArrayLike | None = None
    """[L]."""
    returns: ArrayLike | None = None
    """[L]."""
    key: Hashable = None
    """Anything else that changes the forward from here on, e.g. an adapter's name; None keeps the parent's."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeTrajectory:
    """One trajectory of a node tree: the path that ends with `node`, and the facts of the whole row."""

    node: int
    """Number of its last node."""
    advantages: float | None = None
    """One number for the row; replaces the nodes' advantages."""
    reward: float | None = None
    """One number for the row."""
    group: Hashable = None
    """Rows whose rewards are compared have equal `group`."""
    pair: Hashable = None
    """Rows with equal `pair` form a preference pair."""
    chosen: bool | None = None
    """Whether this is the preferred row of its pair or, without a pair, a desirable row."""
    id: Hashable = None
    """The row's own name, used in messages."""
    episode: Hashable = None
    """Rows with equal `group` and `episode` share one reward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeRows(LazyTrajectories):
    """The K trajectories of n nodes, each built on access.

    Parents come before their children; nodes on no trajectory are left out.
    """

    numbers: list[int]
    """The user's number of each node, for messages."""
    parents: list[int]
    """Index of each node's parent in this order, -1 at roots."""
    contents: list[Trajectory]
    """Ids, facts and key (inherited where the node has none) of each node."""
    rows: list[NodeTrajectory]
    ends: list[int]
    """Index of each trajectory's last node."""
    owner: list[int]
    """With count="once", the first trajectory through each node, which counts its tokens; else empty."""
    tree_index: Int64[np.ndarray, " T"]
    """Tree index of every token of the nodes, concatenated over nodes."""
    depth: Int64[np.ndarray, " T"]
    """Depth of these tokens."""
    tree_tokens: int
    """Tokens of the tree."""

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Trajectory:
        """Build trajectory 0 to K - 1 from the nodes on its path, without facts that one of its trained nodes lacks."""
        row = self.rows[number]
        nodes = [node for node in self.path(number) if len(self.contents[node])]
        parts = [self.contents[node] for node in nodes]
        facts: dict[str, Any] = {}
        for name in PER_TOKEN_FACTS:
            given = [getattr(part, name) for part in parts]
            if name == "loss_weights" and self.owner:
                given = [one if self.owner[node] == number else 0.0 for node, one in zip(nodes, given)]
            neutral = 1.0 if name == "loss_weights" else 0.0
            lacks = name in GIVEN and any(
                one is None and self.is_trained[node] and (not self.owner or self.owner[node] == number)
                for node, one in zip(nodes, given)
            )
            if any(one is not None for one in given) and not lacks:
                filled = [neutral if one is None else one for one in given]
                facts[name] = np.concatenate([np.broadcast_to(one, len(part)) for one, part in zip(filled, parts)])
        if row.advantages is not None:
            facts["advantages"] = row.advantages
        facts |= {name: getattr(row, name) for name in ("reward", "group", "pair", "chosen", "id", "episode")}
        ids = np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)])
        return Trajectory(ids, **facts, key=self.contents[self.ends[number]].key)

    def path(self, number: int) -> list[int]:
        """The nodes of a trajectory, from its root down."""
        node, path = self.ends[number], []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @cached_property
    def place(self) -> Int64[np.ndarray, " T"]:
        """The node of every token."""
        return np.repeat(np.arange(len(self.contents)), np.array([len(part) for part in self.contents], np.int64))

    @cached_property
    def weights(self) -> Float64[np.ndarray, " T"]:
        """Loss weight of every token; 0 at a root, which is never predicted."""
        given = [np.ones(len(part)) if part.loss_weights is None else part.loss_weights for part in self.contents]
        return np.where(self.depth > 0, np.concatenate([np.zeros(0), *given]), 0.0)

    @cached_property
    def is_trained(self) -> Bool[np.ndarray, " n"]:
        """Nodes with a loss weight."""
        return np.bincount(self.place, self.weights != 0, minlength=len(self.contents)) > 0

    def trained_edges(self, rows: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
        """`TokenTree.trained_edges`, computed from the nodes' weights."""
        trained = np.flatnonzero(self.weights)
        uses, index = np.zeros(self.tree_tokens, np.int64), self.tree_index[trained]
        np.add.at(uses, index, self.sum_over_rows(rows)[self.place[trained]].astype(np.int64))
        deepest = np.zeros(len(self.contents), np.int64)
        deepest[self.place[trained]] = self.depth[trained]  # the last write wins, so the deepest is kept
        return uses, self.along_rows(deepest, max).astype(np.int64) * rows

    def sum_over_rows(self, per_row: NDArray[Any]) -> Float64[np.ndarray, " n"]:
        """For each node, the sum of `per_row` over the trajectories that count its tokens."""
        if self.owner:
            return per_row[np.array(self.owner, np.int64)].astype(np.float64)
        total = np.bincount(np.array(self.ends, np.int64), weights=per_row, minlength=len(self.parents)).tolist()
        for node in range(len(total) - 1, -1, -1):
            if self.parents[node] >= 0:
                total[self.parents[node]] += total[node]
        return np.array(total, np.float64)

    def along_rows(self, per_node: NDArray[Any], join: Callable[[Any, Any], Any]) -> Float64[np.ndarray, " K"]:
        """For each trajectory, join `per_node` over the nodes whose tokens it counts; 0 if it counts none."""
        joined = per_node.tolist()
        for node, above in enumerate(self.parents):
            # The nodes that a trajectory owns form the end of its path.
            if above >= 0 and (not self.owner or self.owner[above] == self.owner[node]):
                joined[node] = join(joined[above], joined[node])
        counts = [not self.owner or self.owner[end] == number for number, end in enumerate(self.ends)]
        return np.array([joined[end] if own else 0 for end, own in zip(self.ends, counts)], np.float64)


def grow(
    nodes: Sequence[Node],
    trajectories: Sequence[int | NodeTrajectory],
    unused: Literal["error", "drop"],
    count: Count,
) -> tuple[TreeArrays, Int64s, Int64s, NodeRows]:
    """Check and merge nodes; see `TokenTree.from_nodes` for arguments and errors.

    Returns:
        The tree's arrays, each trajectory's last token (-1 for an empty one) and length, and the trajectories.
    """
    if unused not in ("error", "drop"):
        raise ValueError(f"unused={unused!r} is neither 'error' nor 'drop'")
    if count not in ("per trajectory", "once"):
        raise ValueError(f"count={count!r} is neither 'per trajectory' nor 'once'")
    order, above = _parents_first(nodes)
    rows = _rows(trajectories, len(nodes), count)
    first_row = [len(rows)] * len(nodes)
    for number, row in enumerate(rows):
        first_row[row.node] = min(first_row[row.node], number)
    for node in reversed(order):
        if above[node] >= 0:
            first_row[above[node]] = min(first_row[above[node]], first_row[node])
    idle = [node for node in range(len(nodes)) if first_row[node] == len(rows)]
    if idle and unused == "error":
        raise DataError(
            f"node {idle[0]} is on no trajectory ({len(idle)} of {len(nodes)} nodes are not): name the "
            'trajectories that end there, or pass unused="drop" to leave such nodes out'
        )
    used = [node for node in order if first_row[node] < len(rows)]
    place = dict(zip(used, range(len(used)))) | {-1: -1}
    parents = [place[above[node]] for node in used]
    contents: list[Trajectory] = []
    for node, parent in zip(used, parents):
        key = nodes[node].key
        contents.append(_content(node, nodes[node], contents[parent].key if key is None and parent >= 0 else key))
    runs = _insert([part.ids for part in contents], parents, [part.key for part in contents])
    ends = [place[row.node] for row in rows]
    last = np.array(runs.last, np.int64)[np.array(ends, np.int64)]
    arrays, moved = assemble(runs.buffer, runs.start, runs.length, runs.attach, last)
    last, tree_index = moved(last), moved(runs.position)
    node_rows = NodeRows(
        numbers=used,
        parents=parents,
        contents=contents,
        rows=rows,
        ends=ends,
        owner=[first_row[node] for node in used] if count == "once" else [],
        tree_index=tree_index,
        depth=arrays.depth[tree_index].astype(np.int64),
        tree_tokens=len(arrays.tokens),
    )
    length = np.zeros(len(rows), np.int64)
    length[last >= 0] = arrays.depth[last[last >= 0]] + 1
    return arrays, last, length, node_rows


def _parents_first(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Node numbers with every parent before its children, and the parent of each node, -1 at roots."""
    parents = [-1 if node.parent is None else node.parent for node in nodes]
    children: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        if not isinstance(parent, int | np.integer) or not -1 <= parent < len(parents):
            raise DataError(
                f"node {number}: parent {parent!r} is no node; {len(parents)} nodes were given, numbered "
                "from 0 (None or -1 at a root)"
            )
        if parent >= 0:
            children[parent].append(number)
    if all(parent < number for number, parent in enumerate(parents)):
        return list(range(len(parents))), parents
    order = [number for number, parent in enumerate(parents) if parent < 0]
    for number in order:  # `order` grows during the loop: breadth first
        order.extend(children[number])
    if len(order) < len(parents):
        cycle = min(set(range(len(parents))) - set(order))
        raise DataError(
            f"node {cycle}: its parents form a cycle, no root is reached from it "
            f"({len(parents) - len(order)} nodes are cut off this way); set one parent to None"
        )
    return order, parents


def _rows(trajectories: Sequence[int | NodeTrajectory], nodes: int, count: Count) -> list[NodeTrajectory]:
    rows = [row if isinstance(row, NodeTrajectory) else NodeTrajectory(node=row) for row in trajectories]
    for number, row in enumerate(rows):
        if not isinstance(row.node, int | np.integer) or not 0 <= row.node < nodes:
            raise DataError(
                f"trajectory {number}: {row.node!r} is no node; give the number of its last node, 0 to {nodes - 1}"
            )
        own = row.advantages
        if own is not None and not (isinstance(own, int | float | np.number) and np.isfinite(own)):
            raise DataError(
                f"trajectory {number}: advantages = {own!r} is no finite number; give one number for the row, or "
                "advantages per token on the nodes"
            )
        if own is not None and count == "once":
            raise DataError(
                f"trajectory {number}: advantages={own!r} for the row, but a token counts once for "
                "all rows through its node (count='once'); give advantages on the nodes"
            )
    return rows


def _content(number: int, node: Node, key: Hashable) -> Trajectory:
    """A node's ids and facts, checked like a trajectory's."""
    try:
        return Trajectory(node.ids, **{name: getattr(node, name) for name in PER_TOKEN_FACTS}, key=key)
    except DataError as error:
        raise DataError(f"node {number}: {str(error).removeprefix('trajectory: ')}") from None


class _Runs(NamedTuple):
    """The arguments of `assemble`, and the buffer position of each node's tokens."""

    buffer: Int32s
    start: Int64s
    length: Int64s
    attach: Int64s
    last: list[int]
    """Buffer position of the last token of each node's path, -1 for an empty path."""
    position: Int64s
    """Buffer position of every token of the nodes, concatenated over nodes."""


def _insert(contents: Sequence[Int32s], parents: list[int], keys: list[Hashable]) -> _Runs:
    """Insert nodes one by one into runs of tokens; equal prefixes are merged.

    A node's tokens are compared with the run of the last token above them; where they differ, with a run that branches
    off there, and so on. The rest becomes a new run. Runs never change once added, so `child` maps (position, key,
    token) to the run that branches off there. The cost is one look-up per run that a node passes through.
    """
    buffer, filled = np.zeros(sum(map(len, contents)), np.int32), 0
    start: list[int] = []
    stop: list[int] = []
    attach: list[int] = []
    key_of: list[Hashable] = []
    child: dict[tuple[int, Hashable, int], int] = {}
    last: list[int] = []
    run_of: list[int] = []  # the run that holds `last`
    position = [np.zeros(0, np.int64)]
    for ids, parent, key in zip(contents, parents, keys):
        at, run = (last[parent], run_of[parent]) if parent >= 0 else (-1, -1)
        while len(ids):
            begin, first = at + 1, int(ids[0])
            goes_on = at >= 0 and key_of[run] == key and begin < stop[run] and buffer[begin] == first
            if not goes_on:
                run = child.setdefault((at, key, first), len(start))
                if run == len(start):
                    buffer[filled : filled + len(ids)] = ids
                    start.append(filled)
                    filled += len(ids)
                    stop.append(filled)
                    attach.append(at)
                    key_of.append(key)
                begin = start[run]
            count = common_prefix(buffer[begin : stop[run]], ids)
            position.append(np.arange(begin, begin + count))
            at, ids = begin + count - 1, ids[count:]
        last.append(at)
        run_of.append(run)
    begins = np.array(start, np.int64)
    return _Runs(
        buffer, begins, np.array(stop, np.int64) - begins, np.array(attach, np.int64), last, np.concatenate(position)
    )


Reduction = Literal["token", "trajectory"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPredictions:
    """T predictions with a loss weight, each for all rows that share it and its facts."""

    reduction: Reduction
    """How shares are computed: "token", or "trajectory", which divides a row's weights by their sum."""
    tokens: Int64[np.ndarray, " T"]
    """Tree index of the predicted token, ascending. A token may occur several times."""
    shares: Float64[np.ndarray, " T"]
    """Total weight of the rows in the loss's sum; never 0."""
    facts: Mapping[str, Float64s]
    """The facts that all trained rows have, [T] each; advantages are share-weighted means over the rows."""
    normaliser: float
    """The sum of the shares ("token"), or `num_trained` ("trajectory")."""
    num_trained: int
    """The number of rows whose weights have a sum above 0."""
    lacking: Mapping[str, str]
    """Name of a fact -> the first node trained without it ("node 7")."""
    negative: str | None
    """The first loss weight below 0 ("node 7: loss_weights[0] = -1"); None if there is none."""

    def __len__(self) -> int:
        """T."""
        return len(self.tokens)

    def reads(self, edge_tokens: Int64[np.ndarray, " E"]) -> tuple[Int64s, Int64s]:
        """Find the predictions that read the given edges, of a layout or of a piece of one.

        Args:
            edge_tokens: the predicted token of each edge, all different.

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


def _on_tokens(rows: NodeRows, name: str) -> Float64[np.ndarray, " T"]:
    """A fact of the nodes' tokens, concatenated over nodes; 0 on nodes without it."""
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


def _lacking(rows: NodeRows, own: Float64[np.ndarray, " K"]) -> dict[str, str]:
    """For every fact that a trained row lacks, the first node without it.

    Args:
        own: the rows' own advantages, NaN for rows that use the nodes'.
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
