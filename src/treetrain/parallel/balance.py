"""Divide a batch over ranks so that the slowest rank's predicted time is as small as possible.

    pre-order   row 0     row 1     row 2     row 3
    tokens      a b c d   a b e     a b f g   h i
                |--- rank 0 ----|   |--- rank 1 ---|        a and b are computed on both

The rows, in pre-order of the tree, are cut into one contiguous range per rank. A rank computes every token of its range
once. A token that two ranges need is computed on both ranks, and the cost of both ranges includes it.

Why it is right. Let rows f and l be the first and the last that need a token. The rows between them pass through it
too, so the range [i, j) needs it exactly when f < j and l >= i. Let opened[j] be the seconds of all tokens with f < j,
and closed[i] the seconds of all tokens with l < i. Then a non-empty range takes opened[j] - closed[i], which grows with
j and falls with i. So filling one rank after the other up to a limit needs the fewest ranks, and bisection finds the
smallest limit that works. The sum over ranks is the tree's seconds plus opened[b] - closed[b] for every inner bound b:
the seconds of tokens computed on both sides. Among the bounds allowed by the limit, the one with the smallest such cost
is taken. Seconds are rounded to integer multiples of one unit, so sums are exact and every rank finds the same cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.plan import Costs
from treetrain.core.tree.token_tree import Int64s, Row, TokenTree, as_tree
from treetrain.shapes import ModelShape, cost_of_shape

PASS_TOKENS = 8192
"""The fixed cost of a pass is spread over this many tokens, the size of a part if memory allows it."""
_STEPS = 2.0**50
"""The total seconds are divided into this many integer units."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """A batch divided over ranks."""

    trajectories: list[Int64s]
    """The numbers of each rank's trajectories, ascending; a rank may have none."""
    seconds: Float64[np.ndarray, " ranks"]
    """Predicted seconds of a step's work, waiting and communication excluded."""
    tokens: Int64[np.ndarray, " ranks"]
    """Tokens that a rank computes."""
    unique: int
    """Tokens that one process would compute."""
    rank_of: Int64[np.ndarray, " K"] = field(repr=False)


def dispatch(
    rows: Sequence[Row] | TokenTree,
    cost: CostModel | ModelShape | str | None,
    ranks: int,
    *,
    whole_rows: bool = False,
) -> list[Int64s]:
    """Divide a batch over processes so that the slowest one's predicted time is as small as possible.

    Each process gets whole trajectories: a contiguous range of the tree's pre-order. Rows that share prefixes stay
    together, and every process finds the same division from the same arguments.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        cost: a cost model, a model's shape, or the name of one ("qwen3-8b"). None counts unique tokens alone.
        ranks: number of processes, from 1; more than rows leaves some idle.
        whole_rows: count all predictions (log-probabilities of whole rows) instead of those with a loss weight.

    Returns:
        For each rank an int64 array of its row numbers, ascending; it may be empty.

    Raises:
        ValueError: fewer than 1 rank, or an unknown shape name.
        DataError: invalid rows.
    """
    return Balancer(as_tree(rows), cost, whole_rows=whole_rows).over(ranks).trajectories


class Balancer:
    """Divides one batch over different numbers of ranks, computing costs once; arguments and errors as for `dispatch`.

    By the cost model, no other contiguous cut has a faster slowest rank.
    """

    def __init__(self, tree: TokenTree, cost: Costs | ModelShape | str | None, *, whole_rows: bool = False):
        self._tree = tree
        lengths = np.maximum(tree.trajectory_length - 1, 0) if whole_rows else tree.trained_edges()[1]
        self._ends = _last_computed(tree, lengths)
        rows = np.argsort(self._ends, kind="stable")
        self._rows = rows = rows[np.searchsorted(self._ends[rows], 0) :]
        """int64 [C]: the rows with tokens to compute, in pre-order."""
        count = len(rows)
        self._place = np.full(tree.num_trajectories, -1, np.int64)
        """int64 [K]: the place of each row in `_rows`; -1 for rows that compute nothing."""
        self._place[rows] = np.arange(count)
        tokens = _tokens_needed(tree, self._ends[rows])
        heads = _states_needed(tree, self._place, whole_rows=whole_rows)
        token_seconds, row_seconds = np.ones(len(tokens.tokens)), 0.0  # without a cost model
        if cost is not None:
            cost = cost_of_shape(cost) if isinstance(cost, ModelShape | str) else cost
            depth = tree.depth[tokens.tokens].astype(np.int64)
            token_seconds = cost.token_seconds(depth) + cost.pass_seconds / PASS_TOKENS
            row_seconds = cost.row_seconds
        seconds = np.concatenate([token_seconds, np.full(len(heads.tokens), row_seconds)])
        self._unit = float(seconds.sum()) / _STEPS or 1.0
        opened, closed = (
            np.rint(np.bincount(np.concatenate(places), seconds, count) / self._unit).astype(np.int64)
            for places in ((tokens.first, heads.first), (tokens.last, heads.last))
        )
        self._opened, self._closed = _sums(opened), _sums(closed)
        self._tokens = (
            _sums(np.bincount(tokens.first, minlength=count)),
            _sums(np.bincount(tokens.last, minlength=count)),
        )

    def over(self, ranks: int) -> Dispatch:
        """Divide the batch. Raises ValueError for an invalid number of ranks."""
        if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of processes, from 1")
        # A range of zero cost may be off by a few units, since each place's share was rounded.
        bounds = cut_evenly(self._opened, self._closed, int(ranks), slack=2 * len(self._opened))
        rank_of = self._rank_of(bounds)
        order = np.argsort(rank_of, kind="stable")
        return Dispatch(
            trajectories=np.split(order, np.searchsorted(rank_of[order], np.arange(1, ranks))),
            seconds=(range_costs(self._opened, self._closed, bounds) * self._unit).astype(np.float64),
            tokens=range_costs(*self._tokens, bounds),
            unique=int(self._tokens[0][-1]),
            rank_of=rank_of,
        )

    def _rank_of(self, bounds: Int64s) -> Int64[np.ndarray, " K"]:
        """Number the rank of every row; rows with nothing to compute join their neighbours."""
        rows, ranks = self._rows, len(bounds) - 1
        rank_of = np.searchsorted(bounds, self._place, side="right") - 1
        rest = np.flatnonzero(self._place < 0)
        if not len(rows):
            rank_of[rest] = np.arange(len(rest)) * ranks // max(len(rest), 1)
        else:
            at = np.searchsorted(self._ends[rows], self._tree.trajectory_last[rest])
            rank_of[rest] = rank_of[rows[np.minimum(at, len(rows) - 1)]]
        return rank_of


def cut_evenly(
    opened: Int64[np.ndarray, " _"], closed: Int64[np.ndarray, " _"], ranges: int, slack: int = 0
) -> Int64[np.ndarray, " _"]:
    """Cut U places into ranges so that the costliest range is as cheap as possible.

    Args:
        opened: U + 1 entries, ascending: the cost of all tokens first needed before each place.
        closed: U + 1 entries, ascending: the cost of all tokens last needed before each place.
        ranges: number of ranges.
        slack: how far a range may exceed the smallest limit, to reduce the cost that is paid twice.

    Returns:
        ranges + 1 bounds, from 0 to U.
    """
    last = len(opened) - 1
    if last == 0:
        return np.zeros(ranges + 1, np.int64)

    def filled(limit: int) -> list[int]:
        """The furthest bounds within a limit."""
        bounds = [0]
        for _ in range(ranges):
            bounds.append(int(np.searchsorted(opened, limit + closed[bounds[-1]], side="right")) - 1)
        return bounds

    # First pass: the smallest limit within which the ranges, each filled up to it, reach the end.
    low, high = int((opened[1:] - closed[:-1]).max()), int(opened[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if filled(middle)[-1] == last else (middle + 1, high)
    # Second pass: many cuts keep all ranges within this limit. Bounds are chosen from the last to the first. The latest
    # place of a bound is where the filled ranges in front of it end; the earliest is where the range behind it still
    # fits. A token that both sides of a bound need is paid twice, so among these places the one is taken where such
    # tokens cost least.
    furthest, paid_twice = filled(low + slack), opened - closed
    bounds = [last]
    for latest in furthest[-2:0:-1]:
        stop = bounds[-1]
        earliest = int(np.searchsorted(closed, opened[stop] - low - slack))
        window = paid_twice[earliest : max(earliest, min(latest, stop - 1)) + 1]
        if latest >= stop and window.min() > 0:  # an empty range costs nothing extra
            bounds.append(stop)
        else:  # on ties the last, which leaves more to the earlier ranges
            bounds.append(earliest + len(window) - 1 - int(np.argmin(window[::-1])))
    return np.array([0, *bounds[::-1]], np.int64)


def range_costs(opened: Int64s, closed: Int64s, bounds: Int64s) -> Int64[np.ndarray, " R"]:
    """The costs of the ranges between R + 1 bounds; 0 for empty ranges."""
    return np.where(np.diff(bounds) > 0, opened[bounds[1:]] - closed[bounds[:-1]], 0)


def _sums(values: NDArray[np.int64]) -> Int64s:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])


def _last_computed(tree: TokenTree, lengths: Int64s) -> Int64[np.ndarray, " K"]:
    """Find the last of each trajectory's first `lengths` tokens in the tree; -1 for a trajectory of length 0."""
    last = np.full(tree.num_trajectories, -1, np.int64)
    for row, segment in tree.climb(np.where(lengths > 0, tree.trajectory_last, -1), lengths - 1):
        start = tree.segment_start[segment]
        last[row] = start + lengths[row] - 1 - tree.depth[start]  # the last write is from the segment that holds it
    return last


class _Needed(NamedTuple):
    """T tokens that rows need, with the first and the last place that needs each; all int64 [T]."""

    tokens: Int64s
    first: Int64s
    last: Int64s


def _tokens_needed(tree: TokenTree, ends: Int64[np.ndarray, " C"]) -> _Needed:
    """Tokens needed in the layers. A row needs a token if it ends at it or below it.

    Args:
        ends: ascending: the last token that each row needs.
    """
    before = np.searchsorted(ends, np.arange(tree.num_tokens + 1))
    low, high = before[:-1], before[tree.end]
    tokens = np.flatnonzero(low < high)
    low, high = low[tokens], high[tokens]
    return _Needed(tokens, low, high - 1)


def _states_needed(tree: TokenTree, places: Int64s, *, whole_rows: bool) -> _Needed:
    """Find the tokens whose hidden state the LM head needs, with the rows that use a prediction from it."""
    first = np.full(tree.num_tokens, len(places), np.int64)
    last = np.full(tree.num_tokens, -1, np.int64)
    index, place = tree.paths()[1], np.repeat(places, tree.trajectory_length)
    used = np.flatnonzero((place >= 0) & (tree.parent[index] >= 0 if whole_rows else tree.trained_predictions))
    states = tree.parent[index[used]]
    np.minimum.at(first, states, place[used])
    np.maximum.at(last, states, place[used])
    tokens = np.flatnonzero(last >= 0)
    return _Needed(tokens, first[tokens], last[tokens])
