"""Build a token tree from a rollout that is already a tree: nodes with parents, trajectories named by their last node.

Nothing is flattened. Nodes are inserted one by one into a set of runs of tokens, which `assemble` lays out like the
rows of `build_tree`. A trajectory is put together from its nodes only when somebody reads it.
"""

import warnings
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike

from treetrain.data.columns import GIVEN
from treetrain.data.once import Count, checked_count
from treetrain.data.trajectory import PER_TOKEN_FACTS, LazyTrajectories, Trajectory, common_prefix
from treetrain.errors import DataError
from treetrain.tree.assemble import Int32s, Int64s, TreeArrays, assemble


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A run of tokens that continues another node, with the per-token facts of a `Trajectory`.

    Entry t of a fact belongs to the prediction of ids[t] from the token before it on the path.
    """

    parent: int | None
    """Number of the node it continues; None or -1 at a root."""
    ids: ArrayLike
    """Token ids [L]; may be empty."""
    loss_weights: ArrayLike | None = None
    advantages: ArrayLike | None = None
    old_logprobs: ArrayLike | None = None
    ref_logprobs: ArrayLike | None = None
    rollout_logprobs: ArrayLike | None = None
    teacher_logprobs: ArrayLike | None = None
    values: ArrayLike | None = None
    returns: ArrayLike | None = None
    key: Hashable = None
    """As in `Trajectory`; None inherits the parent's key."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeTrajectory:
    """One trajectory of a node tree: the path that ends with `node`, and the facts of the row as in `Trajectory`."""

    node: int
    """Number of its last node."""
    advantages: ArrayLike | None = None
    """Replaces the nodes' advantages."""
    reward: float | None = None
    group: Hashable = None
    pair: Hashable = None
    chosen: bool | None = None
    id: Hashable = None
    episode: Hashable = None


@dataclass(frozen=True, eq=False)
class NodeRows(LazyTrajectories):
    """The K trajectories of n nodes, each built on access. Parents come before their children."""

    parents: list[int]
    """Index of each node's parent, -1 at roots."""
    contents: list[Trajectory]
    """Ids, facts and key (inherited where the node has none) of each node."""
    rows: list[NodeTrajectory]
    ends: list[int]
    """Index of each trajectory's last node."""
    owner: list[int]
    """With count="once", the trajectory that counts each node's tokens: the first one through it. Else empty."""
    tree_index: Int64[np.ndarray, " T"]
    """Tree index of every token of the nodes, concatenated over nodes."""
    tree: TreeArrays

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Trajectory:
        """Build trajectory 0 to K - 1. A fact that one of its trained tokens lacks is left out."""
        row, node, path = self.rows[number], self.ends[number], []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        parts = [self.contents[node] for node in path[::-1]]
        counts = [not self.owner or self.owner[node] == number for node in path[::-1]]
        weights = _joined(parts, "loss_weights", 1.0) * np.repeat(counts, [len(part) for part in parts])
        facts: dict[str, Any] = {name: getattr(row, name) for name in ("reward", "group", "pair", "chosen", "id")}
        for name in GIVEN:
            lacks = np.repeat([getattr(part, name) is None for part in parts], [len(part) for part in parts])
            if not lacks.all() and not weights[1:][lacks[1:]].any():
                facts[name] = _joined(parts, name, 0.0)
        if row.advantages is not None:
            facts["advantages"] = row.advantages
        ids = np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)])
        return Trajectory(ids, loss_weights=weights, **facts, episode=row.episode, key=parts[-1].key)

    def trained_edges(self, rows: Bool[np.ndarray, " K"]) -> tuple[Int64s, Int64s]:
        """`TokenTree.trained_edges`, computed from the nodes' weights."""
        node_of = np.repeat(np.arange(len(self.contents)), np.array([len(part) for part in self.contents], np.int64))
        depth = self.tree.depth[self.tree_index]
        trained = np.flatnonzero((_joined(self.contents, "loss_weights", 1.0) != 0) & (depth > 0))
        own = np.zeros(len(self.contents), np.int64)
        own[node_of[trained]] = depth[trained]  # the last write wins, so the deepest is kept
        if self.owner:
            through, deepest = rows[self.owner], np.zeros(len(rows), np.int64)
            np.maximum.at(deepest, self.owner, own)
        else:
            ends = np.array(self.ends, np.int64)
            counts, lowest = np.bincount(ends, rows, len(own) + 1).tolist(), [*own.tolist(), 0]  # the last is of -1
            for node, parent in reversed(list(enumerate(self.parents))):
                counts[parent] += counts[node]
            for node, parent in enumerate(self.parents):
                lowest[node] = max(lowest[node], lowest[parent])
            through, deepest = np.array(counts), np.array(lowest, np.int64)[ends]
        uses = np.bincount(self.tree_index[trained], through[node_of[trained]], len(self.tree.tokens))
        return uses.astype(np.int64), deepest * rows


def _joined(parts: Sequence[Trajectory], name: str, default: float) -> Float64[np.ndarray, " T"]:
    """A fact for all tokens of some nodes; a node without it gets the default."""
    given = [(getattr(part, name), len(part)) for part in parts]
    return np.concatenate([np.zeros(0), *(np.full(n, default) if one is None else one for one, n in given)])


def grow(
    nodes: Sequence[Node], trajectories: Sequence[int | NodeTrajectory], count: Count
) -> tuple[TreeArrays, Int64s, NodeRows]:
    """Check and merge nodes; see `TokenTree.from_nodes` for arguments and errors.

    A node's tokens are compared with the run that holds the last token above them. Where they differ, they are compared
    with a run that branches off there, and so on. The rest becomes a new run. Runs never change once added, so `child`
    can map (position, key, token) to the run that branches off there. Each run on a node's way costs one look-up.

    Returns:
        The tree's arrays, each trajectory's last token (-1 for an empty one), and the trajectories.
    """
    checked_count(count)
    rows = [row if isinstance(row, NodeTrajectory) else NodeTrajectory(node=row) for row in trajectories]
    above = [-1 if node.parent is None else node.parent for node in nodes]
    first_row: dict[int, int] = {}  # node -> the first trajectory through it; parents before their children
    for number, row in enumerate(rows):
        if row.advantages is not None and count == "once":
            raise DataError(f"trajectory {number}: count='once' takes no advantages of rows; give them on the nodes")
        walk, node, named = {}, row.node, f"trajectory {number}: node"
        while node not in first_row and (node != -1 or not walk):
            if not isinstance(node, int | np.integer) or not 0 <= node < len(nodes):
                raise DataError(f"{named} {node!r} is no node; {len(nodes)} were given, numbered from 0")
            if node in walk:
                raise DataError(f"node {node}: its parents form a cycle; set one parent to None")
            walk[node], node, named = number, above[node], f"node {node}: parent"
        first_row |= dict(reversed(walk.items()))

    if unused := len(nodes) - len(first_row):
        warnings.warn(f"{unused} of {len(nodes)} nodes are on no trajectory, so they are left out", stacklevel=3)
    place = {-1: -1} | dict(zip(first_row, range(len(first_row))))
    parents = [place[above[node]] for node in first_row]
    contents: list[Trajectory] = []
    runs: list[Int32s] = []
    start, attach = [0], []  # run r is tokens start[r] to start[r + 1] of all runs, and continues token attach[r]
    key_of: list[Hashable] = []  # by run
    child: dict[tuple[int, Hashable, int], int] = {}
    last: list[int] = []  # by node: the last token of its path
    position = [np.zeros(0, np.int64)]
    for number, parent in zip(first_row, parents):
        node = nodes[number]
        key = contents[parent].key if node.key is None and parent >= 0 else node.key
        facts = {name: getattr(node, name) for name in PER_TOKEN_FACTS}
        contents.append(Trajectory(node.ids, **facts, key=key, id=f"node {number}"))
        at, ids = last[parent] if parent >= 0 else -1, contents[-1].ids
        while len(ids):
            run = bisect_right(start, at) - 1
            offset, first = at + 1 - start[run], int(ids[0])
            if at < 0 or key_of[run] != key or offset == len(runs[run]) or runs[run][offset] != first:
                run, offset = child.setdefault((at, key, first), len(runs)), 0
                if run == len(runs):
                    runs.append(ids)
                    start.append(start[-1] + len(ids))
                    attach.append(at)
                    key_of.append(key)
            shared = common_prefix(runs[run][offset:], ids)
            begin = start[run] + offset
            position.append(np.arange(begin, begin + shared))
            at, ids = begin + shared - 1, ids[shared:]
        last.append(at)

    ends = [place[row.node] for row in rows]
    lasts = np.array(last, np.int64)[np.array(ends, np.int64)]
    bounds = np.array(start, np.int64)
    buffer = np.concatenate([np.zeros(0, np.int32), *runs])
    arrays, moved = assemble(buffer, bounds[:-1], np.diff(bounds), np.array(attach, np.int64), lasts)
    tree_index = moved(np.concatenate(position))
    owner = list(first_row.values()) if count == "once" else []
    return arrays, moved(lasts), NodeRows(parents, contents, rows, ends, owner, tree_index, arrays)
