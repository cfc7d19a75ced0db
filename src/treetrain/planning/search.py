"""Ways to cut a tree under a budget, and the choice among them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.planning.crown import Bools, Ground, crown_of
from treetrain.planning.cutting import Pieces, cut_late
from treetrain.planning.keeping import cut_kept
from treetrain.planning.plan import Plan
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack

Seconds = Callable[[Plan], float]

_UPWARDS = (0.5, 0.25, 0.75)
"""Tried: light subtrees this far on the way from the largest that lets all of a crown be kept to the whole budget."""
_DOWNWARDS = (0.5, 0.75, 0.25)
"""Tried: light subtrees smaller than that, as shares of it: kept parts grow, and closed ones pack better."""
_NEAR, _LITTLE = 0.02, 0.1
"""Plans this close in predicted time count as equally fast; one that recomputes at most a tenth more than the least
possible is then preferred."""
_SEGMENTS_TRIED, _TOKENS_TRIED = 500_000, 10_000_000
"""Segments and tokens over all tries; bounds the time of planning. The first two tries are always made."""


class _Try(NamedTuple):
    """All big units cut in some way, and what that gives."""

    light: Int64s
    """int64 [U]: the largest light subtrees of each unit."""
    late: Bools
    """bool [U]: units without kept parts."""
    plan: Plan
    seconds: float


class Search:
    """Ways to cut a tree, and the choice among them."""

    def __init__(self, ground: Ground, seconds: Seconds, prefill_limit: int) -> None:
        self.ground, self.seconds, self.prefill_limit = ground, seconds, prefill_limit
        self.keeps = ground.largest_that_keeps()
        """int64 [U]: the largest light subtrees that let all of a unit's crown be kept."""

    def only_kept(self) -> Plan:
        """Every crown kept as far as that is possible."""
        return self._plan(self.keeps, np.zeros(len(self.keeps), bool))

    def best(self) -> Plan:
        """All units in each way, then every unit in the way that is best for it."""
        never, always = np.zeros(len(self.keeps), bool), np.ones(len(self.keeps), bool)
        if not self.ground.big.any():
            return self.only_kept()
        target = self.ground.target
        ways = [(np.full(len(self.keeps), target), always), (self.keeps, never)]
        ways += [(self.keeps + ((target - self.keeps) * share).astype(np.int64), never) for share in _UPWARDS]
        ways += [((self.keeps * share).astype(np.int64), never) for share in _DOWNWARDS]
        crown = (self.ground.tall > 0) | (self.ground.big[self.ground.units.of] & (self.ground.units.of >= 0))
        tokens = self.ground.layout.num_tokens
        most = min(_SEGMENTS_TRIED // max(1, int(crown.sum())), _TOKENS_TRIED // tokens)
        if self.ground.units.size[self.ground.big].sum() < _NEAR * tokens:
            most = 0  # these units are too small to matter
        tries = [self._try(*way) for way in ways[: max(2, most)]]
        if self.ground.big.sum() > 1:
            prices = _prices(self.seconds)
            tries += [self._mixed(tries, *prices, near) for near in (0.0, _NEAR)]
        fastest = min(tries, key=lambda way: way.seconds)
        little = (1 + _LITTLE) * int(self.ground.tall.sum())
        near = [way for way in tries if way.seconds <= (1 + _NEAR) * fastest.seconds]
        near = [way for way in near if way.plan.recomputed_tokens <= little]
        return min(near, key=lambda way: way.seconds, default=fastest).plan

    def _mixed(self, tries: list[_Try], part: float, again: float, tolerance: float) -> _Try:
        """Each unit cut as in the try that is best for it, or as in one that recomputes less and is about as fast.

        Args:
            part: seconds of one more part.
            again: seconds of a recomputed token.
            tolerance: what counts as about as fast, as a share of the unit's time.
        """
        cost = np.empty((len(tries), len(self.keeps)))
        recomputed = np.empty(cost.shape)
        first = self.ground.start[self.ground.units.root]
        first = first + self.ground.tall[self.ground.units.root]
        stop = self.ground.layout.ends[first]
        for number, way in enumerate(tries):
            plan = way.plan
            twice = plan.exported & (plan.prefill >= 0)[plan.part_of]
            parts = _sums(1.0 / plan.sizes[plan.part_of], first, stop)
            recomputed[number] = _sums(twice, first, stop)
            cost[number] = part * parts + again * recomputed[number]
        share = tries[0].seconds / self.ground.layout.num_tokens * (stop - first)
        near = cost <= cost.min(axis=0) + tolerance * share
        chosen = np.lexsort((cost, np.where(near, recomputed, np.inf)), axis=0)[0]
        units = np.arange(len(chosen))
        light, late = np.stack([way.light for way in tries]), np.stack([way.late for way in tries])
        return self._try(light[chosen, units], late[chosen, units])

    def _try(self, light: Int64s, late: Bools) -> _Try:
        plan = self._plan(light, late)
        return _Try(light, late, plan, self.seconds(plan))

    def _plan(self, light: Int64s, late: Bools) -> Plan:
        crown = crown_of(self.ground, light, late)
        pieces = Pieces()
        cut_late(self.ground, crown, pieces)
        cut_kept(self.ground, crown, pieces)
        cut = pieces.cut(self.ground.layout.num_tokens)
        return Plan.of_parts(self.ground.layout, cut.part_of, cut.kept, prefill_limit=self.prefill_limit)


def _sums(values: NDArray[Any], first: Int64s, stop: Int64s) -> NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return total[stop] - total[first]


def _prices(seconds: Seconds) -> tuple[float, float]:
    """Predicted seconds of one more part, and of a recomputed token, from a path of 512 tokens."""
    layout = pack(build_tree([np.zeros(512, np.int32)]), trim=False)

    def cut(at: int, kept: bool) -> float:
        part_of = (np.arange(512) >= at).astype(np.int64)
        return seconds(Plan.of_parts(layout, part_of, np.full(2, kept)))

    whole = seconds(Plan.of_parts(layout, np.zeros(512, np.int64)))
    return max(cut(256, True) - whole, 0.0), max(cut(384, False) - cut(128, False), 0.0) / 256
