"""A rollout that is already a tree: nodes with parents and facts, trajectories named by their last node."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory
from treetrain.errors import DataError
from treetrain.tree.assemble import Int64s, TreeArrays, assemble
from treetrain.tree.graft import graft
from treetrain.tree.merged import NEEDED_FACTS, MergedPredictions, Reduction, merge

if TYPE_CHECKING:
    from treetrain.tree.token_tree import TokenTree


Count = Literal["per trajectory", "once"]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A run of tokens that continues another node, with the facts of its own tokens.

    Entry t of a fact belongs to the prediction of ids[t], made from the token before it on the path.
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
    """Whatever else enters the forward from here on (an adapter's name); None keeps the parent's."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeTrajectory:
    """One trajectory of a node tree: the path that ends with `node`, and the facts of the whole row."""

    node: int
    """Number of its last node."""
    advantages: float | None = None
    """One number for the row; takes the place of the nodes' advantages."""
    reward: float | None = None
    """As that of a `Trajectory`, as all below."""
    group: Hashable = None
    """Rows to compare with each other have equal `group`."""
    pair: Hashable = None
    """Rows with equal `pair` form a preference pair."""
    chosen: bool | None = None
    """Whether this is the preferred row of its pair, or a desirable one."""
    id: Hashable = None
    """The row's own name, used in messages."""
    episode: Hashable = None
    """Rows with equal `group` and `episode` share one reward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTrajectories:
    """The trajectories of a node tree: facts are gathered along a path only when a row is asked for."""

    contents: list[Trajectory]
    """Every node's ids and facts."""
    parents: list[int]
    keys: list[Hashable]
    """Every node's key, inherited where it has none."""
    order: list[int]
    """The nodes that are on a trajectory, parents first."""
    rows: list[NodeTrajectory]
    tree_index: Int64s
    """Tree index of every token of the nodes in `order`, one after the other."""
    owner: list[int]
    """Every node's first trajectory, where its tokens count once; empty where they count once per trajectory."""

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Loss weight of each of these tokens, as given (1 where none is)."""
        parts = (self.contents[node] for node in self.order)
        given = [np.ones(len(part)) if part.loss_weights is None else part.loss_weights for part in parts]
        return np.concatenate([np.zeros(0), *given])

    @cached_property
    def place(self) -> Int64s:
        """Which node each of these tokens is of, by its place in `order`."""
        lengths = np.array([len(self.contents[node]) for node in self.order], np.int64)
        return np.repeat(np.arange(len(lengths)), lengths)

    def trajectory(self, tree: "TokenTree", number: int) -> Trajectory:
        """Trajectory `number`, joined from the nodes on its path."""
        row = self.rows[number]
        path, node = [], row.node
        while node >= 0:
            part = self.contents[node]
            counts = not self.owner or self.owner[node] == number
            path.append(part if counts else part.replace(loss_weights=0.0))
            node = self.parents[node]
        path.reverse()
        facts: dict[str, Any] = {name: _joined(name, path) for name in PER_TOKEN_FACTS}
        if row.advantages is not None:
            facts["advantages"] = row.advantages
        names = {name: getattr(row, name) for name in ("reward", "group", "pair", "chosen", "id", "episode")}
        return Trajectory(np.concatenate([part.ids for part in path]), **facts, **names, key=self.keys[row.node])

    def trained_edges(self, tree: "TokenTree", rows: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
        """As TokenTree.trained_edges, from the nodes' own weights: nothing is flattened."""
        mask = (self.weights != 0) & (tree.depth[self.tree_index] > 0)
        place = self.place[mask]
        uses = np.zeros(tree.num_tokens, np.int64)
        below = self._counts_of_nodes(rows)
        index = self.tree_index[mask]
        np.add.at(uses, index, below[place])
        own = np.zeros(len(self.order), np.int64)
        own[place] = tree.depth[index]  # the last write wins: the deepest
        deepest = [0] * len(self.contents)
        for node, depth in zip(self.order, own.tolist()):
            above = self.parents[node]
            # What a row trains of nodes that count once is the end of its path, from the first node that it owns.
            follows = above >= 0 and (not self.owner or self.owner[above] == self.owner[node])
            deepest[node] = depth or (deepest[above] if follows else 0)
        if self.owner:
            rows = rows & np.array([self.owner[row.node] == number for number, row in enumerate(self.rows)], bool)
        return uses, np.array([deepest[row.node] for row in self.rows], np.int64) * rows

    def _counts_of_nodes(self, rows: NDArray[np.bool_]) -> Int64s:
        """Per place in `order`: how often the marked rows count a token of the node."""
        if self.owner:
            return rows[np.array(self.owner, np.int64)[self.order]].astype(np.int64)
        counted = [row for row, counts in zip(self.rows, rows.tolist()) if counts]
        return np.array(_trajectories_below(self.parents, self.order, counted), np.int64)[self.order]

    def merged(self, tree: "TokenTree", reduction: Reduction) -> MergedPredictions:
        """As TokenTree.merged."""
        return merge(self, tree, reduction)


class Grown(NamedTuple):
    """What TokenTree.from_nodes needs."""

    arrays: TreeArrays
    last: Int64s
    length: Int64s
    source: NodeTrajectories


def grow(
    nodes: Sequence[Node],
    trajectories: Sequence[int | NodeTrajectory],
    unused: Literal["error", "drop"],
    count: Count,
) -> Grown:
    """Check and merge nodes; arguments and errors are those of TokenTree.from_nodes."""
    if unused not in ("error", "drop"):
        raise ValueError(f"unused={unused!r} is neither 'error' nor 'drop'")
    if count not in ("per trajectory", "once"):
        raise ValueError(f"count={count!r} is neither 'per trajectory' nor 'once'")
    parents = _parents(nodes)
    order = _parents_first(parents)
    rows = _rows(trajectories, len(nodes))
    below = _trajectories_below(parents, order, rows)
    idle = [number for number, count in enumerate(below) if not count]
    if idle and unused == "error":
        raise DataError(
            f"node {idle[0]} is on no trajectory ({len(idle)} of {len(nodes)} nodes are not): name the "
            'trajectories that end there, or pass unused="drop" to leave such nodes out'
        )
    order = [number for number in order if below[number]]
    contents = [_content(number, node) for number, node in enumerate(nodes)]
    keys = _inherited_keys(nodes, parents, order)
    numbers: dict[Hashable, int] = {}
    key_numbers = [numbers.setdefault(key, len(numbers)) for key in keys]
    grafts = graft([part.ids for part in contents], parents, key_numbers, order)
    lengths = _path_lengths(contents, parents, order)
    _check_facts(contents, parents, order, lengths, rows)
    ends = np.array([row.node for row in rows], np.int64)
    last = np.array(grafts.last, np.int64)[ends]
    arrays = assemble(grafts.buffer, grafts.run_start, grafts.run_length, grafts.run_attach, last)
    shift = grafts.range_start - (np.cumsum(grafts.range_length) - grafts.range_length)
    positions = np.repeat(shift, grafts.range_length)
    positions += np.arange(len(positions))
    source = NodeTrajectories(
        contents=contents,
        parents=parents,
        keys=keys,
        order=order,
        rows=rows,
        tree_index=arrays.moved(positions),
        owner=_owners(parents, order, rows) if count == "once" else [],
    )
    return Grown(arrays, arrays.moved(last), np.array(lengths, np.int64)[ends], source)


def _parents(nodes: Sequence[Node]) -> list[int]:
    parents = [-1 if node.parent is None else node.parent for node in nodes]
    for number, parent in enumerate(parents):
        if not isinstance(parent, int | np.integer) or not -1 <= parent < len(parents):
            raise DataError(
                f"node {number}: parent {parent!r} is no node; {len(parents)} nodes were given, numbered "
                "from 0 (None or -1 at a root)"
            )
    return [int(parent) for parent in parents]


def _parents_first(parents: list[int]) -> list[int]:
    """Node numbers, every parent before its children."""
    if all(parent < number for number, parent in enumerate(parents)):
        return list(range(len(parents)))
    children: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(number)
    order = [number for number, parent in enumerate(parents) if parent < 0]
    for number in order:  # grows while it is walked: breadth first
        order.extend(children[number])
    if len(order) < len(parents):
        seen = set(order)
        cycle = next(number for number in range(len(parents)) if number not in seen)
        raise DataError(
            f"node {cycle}: its parents form a cycle, no root is reached from it "
            f"({len(parents) - len(order)} nodes are cut off this way); set one parent to None"
        )
    return order


def _rows(trajectories: Sequence[int | NodeTrajectory], count: int) -> list[NodeTrajectory]:
    rows = [row if isinstance(row, NodeTrajectory) else NodeTrajectory(node=row) for row in trajectories]
    for number, row in enumerate(rows):
        if not isinstance(row.node, int | np.integer) or not 0 <= row.node < count:
            raise DataError(
                f"trajectory {number}: {row.node!r} is no node; give the number of its last node, 0 to {count - 1}"
            )
        own = row.advantages
        if own is not None and not (isinstance(own, int | float | np.number) and np.isfinite(own)):
            raise DataError(
                f"trajectory {number}: advantages = {own!r} is no finite number; give one number for the row, or "
                "advantages per token on the nodes"
            )
    return rows


def _trajectories_below(parents: list[int], order: list[int], rows: list[NodeTrajectory]) -> list[int]:
    below = [0] * len(parents)
    for row in rows:
        below[row.node] += 1
    for number in reversed(order):
        if parents[number] >= 0:
            below[parents[number]] += below[number]
    return below


def _owners(parents: list[int], order: list[int], rows: list[NodeTrajectory]) -> list[int]:
    """The number of the first trajectory through each node. Raises DataError for a row with advantages of its own."""
    owner = [len(rows)] * len(parents)
    for number, row in enumerate(rows):
        if row.advantages is not None:
            raise DataError(
                f"trajectory {number}: advantages={row.advantages!r} for the row, but a token counts once for "
                "all rows through its node (count='once'); give advantages on the nodes"
            )
        owner[row.node] = min(owner[row.node], number)
    for number in reversed(order):
        if parents[number] >= 0:
            owner[parents[number]] = min(owner[parents[number]], owner[number])
    return owner


def _content(number: int, node: Node) -> Trajectory:
    """A node's ids and facts, checked like a trajectory's."""
    facts = {name: getattr(node, name) for name in PER_TOKEN_FACTS}
    try:
        return Trajectory(node.ids, **facts, key=node.key)
    except DataError as error:
        raise DataError(f"node {number}: {str(error).removeprefix('trajectory: ')}") from None


def _inherited_keys(nodes: Sequence[Node], parents: list[int], order: list[int]) -> list[Hashable]:
    keys: list[Hashable] = [node.key for node in nodes]
    for number in order:
        if keys[number] is None and parents[number] >= 0:
            keys[number] = keys[parents[number]]
    return keys


def _path_lengths(contents: list[Trajectory], parents: list[int], order: list[int]) -> list[int]:
    lengths = [len(part) for part in contents]
    for number in order:
        if parents[number] >= 0:
            lengths[number] += lengths[parents[number]]
    return lengths


def _trained(part: Trajectory) -> NDArray[np.bool_]:
    return np.ones(len(part), bool) if part.loss_weights is None else part.loss_weights != 0


def _check_facts(
    contents: list[Trajectory],
    parents: list[int],
    order: list[int],
    lengths: list[int],
    rows: list[NodeTrajectory],
) -> None:
    """A fact given on one node of a trajectory must be given wherever the trajectory is trained."""
    given, missing = [0] * len(parents), [0] * len(parents)
    for number in order:
        part, above = contents[number], parents[number]
        has = sum(1 << bit for bit, name in enumerate(NEEDED_FACTS) if getattr(part, name) is not None)
        first = lengths[number] == len(part)  # a row's first token is never predicted
        lacks = (1 << len(NEEDED_FACTS)) - 1 - has if _trained(part)[1 if first else 0 :].any() else 0
        given[number] = (given[above] if above >= 0 else 0) | (has if len(part) else 0)
        missing[number] = (missing[above] if above >= 0 else 0) | lacks
    for number, row in enumerate(rows):
        clash = given[row.node] & missing[row.node]
        if row.advantages is not None:
            clash &= ~(1 << NEEDED_FACTS.index("advantages"))
        if clash:
            name = next(name for bit, name in enumerate(NEEDED_FACTS) if clash >> bit & 1)
            raise DataError(
                f"trajectory {number} (last node {row.node}): some of its nodes have {name}, others that are "
                f"trained have none; give {name} on all of them, or loss_weights=0 on the ones without"
            )


def _joined(name: str, path: list[Trajectory]) -> NDArray[np.float64] | None:
    """One fact along a path. Tokens that are not trained may lack it and get 0; weights default to 1."""
    path = [part for part in path if len(part)]  # a fact of no token is no fact
    facts = [getattr(part, name) for part in path]
    if all(fact is None for fact in facts):
        return None
    neutral = 1.0 if name == "loss_weights" else 0.0
    return np.concatenate([np.full(len(part), neutral) if fact is None else fact for part, fact in zip(path, facts)])
