"""Which rank runs which trajectories: the tree cut along its pre-order into ranges of nearly equal predicted time.

Every token of a range is computed once on its rank. A token that two ranges need is computed on both: the rank that
starts in the middle of a tree pays that path again, and the cut knows it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from treetrain.planning.contiguous import Loads, cut_evenly
from treetrain.planning.cost import ModelShape
from treetrain.planning.price import CostModel, Floats
from treetrain.planning.rates import Rates
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import Row, as_tree
from treetrain.tree.token_tree import TokenTree
from treetrain.tree.users import NOBODY, Users, last_computed, row_users, token_users

PASS_TOKENS = 8192
"""A pass's fixed cost is spread over so many tokens: the size of a part where memory allows it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """A batch over ranks."""

    trajectories: list[Int64s]
    """Per rank: the numbers of its trajectories, ascending; may be empty."""
    seconds: Floats
    """float64 [ranks]: predicted seconds of a step's work, waiting and communication excluded."""
    tokens: Int64s
    """int64 [ranks]: tokens that a rank computes."""
    unique: int
    """Tokens that one process would compute."""
    trained: Int64s = field(repr=False)
    """int64 [ranks]: trajectories that a rank computes anything of."""

    @property
    def ranks(self) -> int:
        """How many there are, idle ones included."""
        return len(self.trajectories)

    @property
    def idle(self) -> int:
        """Ranks that compute nothing."""
        return int((self.tokens == 0).sum())

    @cached_property
    def imbalance(self) -> float:
        """Slowest rank's seconds over the mean's: 1 is perfect; 1 where nothing is computed."""
        mean = float(self.seconds.mean())
        return float(self.seconds.max()) / mean if mean else 1.0

    @cached_property
    def duplicated(self) -> float:
        """Tokens computed on more than one rank, each copy but the first, over the tokens of one process."""
        return float(self.tokens.sum()) / self.unique - 1 if self.unique else 0.0

    def rank_of(self) -> Int64s:
        """int64 [K]: the rank of every trajectory."""
        found = np.empty(sum(map(len, self.trajectories)), np.int64)
        for rank, numbers in enumerate(self.trajectories):
            found[numbers] = rank
        return found


def dispatch(
    rows: Sequence[Row] | TokenTree,
    cost: CostModel | ModelShape | str | None,
    ranks: int,
    *,
    together: Sequence[Hashable] | None = None,
    whole_rows: bool = False,
) -> list[Int64s]:
    """Cut a batch over processes so that the slowest has as little to do as possible.

    The cut is into ranges of the tree's pre-order, whole trajectories each: rows that share prefixes stay together, and
    every process comes to the same cut from the same arguments.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        cost: a cost model, a model's shape, or the name of one ("qwen3-8b"). None counts unique tokens alone.
        ranks: number of processes, from 1; more than rows leaves some idle.
        together: K names: rows of one name stay on one rank (the two of a preference pair); None is no name.
        whole_rows: all predictions of all rows are wanted (log-probabilities of whole rows), instead of those that have
            a loss weight.

    Returns:
        For each rank an int64 array of its row numbers, ascending; it may be empty.

    Raises:
        ValueError: no rank, another number of names than rows, or no shape's name.
        DataError: rows that are none.
    """
    return balance(as_tree(rows), cost, ranks, together=together, whole_rows=whole_rows).trajectories


def balance(
    tree: TokenTree,
    cost: CostModel | ModelShape | str | None,
    ranks: int,
    *,
    together: Sequence[Hashable] | None = None,
    whole_rows: bool = False,
) -> Dispatch:
    """Cut a batch into contiguous ranges of its pre-order, whole trajectories each.

    Of all such cuts the slowest rank is the fastest possible, by the cost model; of those that reach it, the fewest
    seconds are spent in all. The same arguments give the same cut on every machine.

    Args:
        tree: the batch, K trajectories.
        cost: a cost model, or a model's shape for one by formula. None counts unique tokens alone.
        ranks: from 1; more than trajectories leaves some idle.
        together: a name per trajectory: rows of one name stay on one rank (pairs of a preference loss); None is no
            name. What rows far apart in the tree need is then counted as if all between needed it too.
        whole_rows: all predictions of all rows are wanted (log-probabilities of whole rows), instead of what training
            needs.

    Raises:
        ValueError: no rank, or another number of names than trajectories.
    """
    return Cutter(tree, cost, together=together, whole_rows=whole_rows).over(ranks)


class Cutter:
    """A batch priced once, to be cut over several numbers of ranks; arguments as for `balance`."""

    def __init__(
        self,
        tree: TokenTree,
        cost: CostModel | ModelShape | str | None,
        *,
        together: Sequence[Hashable] | None = None,
        whole_rows: bool = False,
    ):
        if together is not None and len(together) != tree.num_trajectories:
            raise ValueError(
                f"together has {len(together)} names, the batch {tree.num_trajectories} trajectories; give one each"
            )
        self._tree, self._together = tree, together
        lengths = np.maximum(tree.trajectory_length - 1, 0) if whole_rows else tree.trained_edges()[1]
        self._ends = ends = last_computed(tree, lengths)
        order = np.argsort(ends, kind="stable")
        self._order = order = order[np.searchsorted(ends[order], 0) :]
        units, self._places = _units(order, tree.num_trajectories, together)
        users = token_users(tree, ends[order], self._places[order])
        rows = row_users(tree, self._places, whole_rows=whole_rows)
        self._loads, self._tokens = _loads(tree, _rates(cost), users, rows, units)

    def over(self, ranks: int) -> Dispatch:
        """The cut over so many ranks. Raises ValueError: none."""
        if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of processes, from 1")
        bounds = cut_evenly(self._loads, int(ranks))
        rank_of = _ranks_of_all(self._tree, self._order, self._ends, self._places, bounds, self._together)
        found = np.argsort(rank_of, kind="stable")
        splits = np.searchsorted(rank_of[found], np.arange(1, ranks))
        return Dispatch(
            trajectories=np.split(found, splits),
            seconds=(self._loads.of(bounds) * self._loads.unit).astype(np.float64),
            tokens=self._tokens.of(bounds),
            unique=int(self._tokens.opened[-1]),
            trained=np.bincount(rank_of[self._order], minlength=ranks),
        )


def _rates(cost: CostModel | ModelShape | str | None) -> Rates:
    if cost is None:
        return Rates.unique_tokens()
    return Rates.of(cost if isinstance(cost, CostModel) else CostModel.from_shape(ModelShape.of(cost)))


def _units(order: Int64s, count: int, together: Sequence[Hashable] | None) -> tuple[int, Int64s]:
    """How many units the computed rows make, and every row's (int64 [K], NOBODY for rows that compute nothing).

    Units are numbered by their first row.
    """
    places = np.full(count, NOBODY, np.int64)
    if together is None:
        places[order] = np.arange(len(order))
        return len(order), places
    numbers: dict[Hashable, int] = {}
    units = 0
    for row in order.tolist():
        name = together[row]
        unit = units if name is None else numbers.setdefault(name, units)
        places[row] = unit
        units += unit == units
    return units, places


def _loads(tree: TokenTree, rates: Rates, users: Users, rows: Users, units: int) -> tuple[Loads, Loads]:
    """Seconds and tokens of every range of units."""
    used, scored = np.flatnonzero(users.last >= 0), np.flatnonzero(rows.last >= 0)
    seconds = rates.at(tree.depth[used].astype(np.int64)) + rates.graph_pass / PASS_TOKENS
    opened, closed = (
        np.bincount(some.take(used), seconds, units) + rates.row * np.bincount(heads.take(scored), minlength=units)
        for some, heads in zip(users, rows)
    )
    tokens = (np.bincount(some.take(used), minlength=units) for some in users)
    return Loads.of_seconds(opened, closed), Loads.of_counts(*tokens)


def _ranks_of_all(
    tree: TokenTree, order: Int64s, ends: Int64s, places: Int64s, bounds: Int64s, together: Sequence[Hashable] | None
) -> Int64s:
    """int64 [K]: every row's rank; rows that compute nothing go where their neighbours, or their partners, are."""
    ranks = len(bounds) - 1
    rank_of = np.zeros(tree.num_trajectories, np.int64)
    rank_of[order] = np.searchsorted(bounds, places[order], side="right") - 1
    rest = np.flatnonzero(places < 0)
    if not len(order):
        rank_of[rest] = np.arange(len(rest)) * ranks // max(len(rest), 1)
    else:
        at = np.searchsorted(ends[order], tree.trajectory_last[rest])
        rank_of[rest] = rank_of[order[np.minimum(at, len(order) - 1)]]
    if together is not None and len(rest):
        home: dict[Hashable, int] = {together[row]: int(rank_of[row]) for row in order.tolist()}
        for row in rest.tolist():
            if together[row] is not None:
                rank_of[row] = home.setdefault(together[row], int(rank_of[row]))
    return rank_of
