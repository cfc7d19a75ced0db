"""Which tokens of a tree can be closed parts, which stand above them, and which of those can be kept.

*Light* subtrees are small enough to be (shares of) closed parts. The tokens above them are the *crown*: they have
descendants in other parts. A crown token can be kept when all crown tokens from it down, together with the largest
light subtree below, are within the budget; otherwise it is late. So the late tokens are the top of the crown.

Everything here is per segment: along a segment subtree sizes and heights fall by one, so that crown and late tokens
are its first tokens, and two counts say all.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.tree.assemble import Int64s
from treetrain.tree.layout import PackedLayout

Bools = NDArray[np.bool_]
NO_BOUND = 1 << 62


class Units(NamedTuple):
    """Maximal subtrees that are within the budget in height, so that none of their tokens must be late."""

    root: Int64s
    """int64 [U]: the segment where each begins; its first `Ground.tall` tokens are above the unit."""
    size: Int64s
    """int64 [U]: tokens."""
    of: Int64s
    """int64 [S]: the unit of every segment, -1 where all of it is above units."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ground:
    """What the cut of a tree depends on, per segment."""

    layout: PackedLayout
    budget: int
    """Most tokens alive; NO_BOUND for none."""
    target: int
    """Size that closed parts need not exceed, at most the budget."""
    length: Int64s
    """int64 [S]: tokens."""
    size: Int64s
    """int64 [S]: tokens in the subtree of the first token."""
    height: Int64s
    """int64 [S]: tokens on the longest path from the first token down."""
    leaf: Bools
    """bool [S]: nothing below."""

    @classmethod
    def of(cls, layout: PackedLayout, budget: int, target: int | None = None) -> "Ground":
        """Of a layout under a budget."""
        first = layout.segment_start[:-1]
        leaf = np.ones(len(first), bool)
        leaf[layout.segment_parent[layout.segment_parent >= 0]] = False
        return cls(
            layout=layout,
            budget=budget,
            target=budget if target is None else min(budget, target),
            length=np.diff(layout.segment_start),
            size=layout.ends[first] - first,
            height=segment_heights(layout),
            leaf=leaf,
        )

    @property
    def start(self) -> Int64s:
        """int64 [S]: first token."""
        return self.layout.segment_start[:-1]

    @property
    def above(self) -> Int64s:
        """int64 [S]: parent segment, -1 at roots."""
        return self.layout.segment_parent

    @cached_property
    def tall(self) -> Int64s:
        """int64 [S]: first tokens whose height is above the budget; they are late in every plan."""
        return np.clip(self.height - self.budget, 0, self.length)

    @cached_property
    def units(self) -> Units:
        """See Units."""
        above, inside = self.above, self.tall < self.length
        begins = inside & ((above < 0) | ~inside[above]) if len(above) else inside
        root = np.flatnonzero(begins)
        return Units(root, (self.size - self.tall)[root], np.where(inside, np.cumsum(begins) - 1, -1))

    @cached_property
    def big(self) -> Bools:
        """bool [U]: units that are no closed part as they are. A path is never cut where it need not be."""
        return (self.units.size > self.target) & ~self.leaf[self.units.root]

    def largest_that_keeps(self) -> Int64s:
        """int64 [U]: the largest size of light subtrees for which all crown tokens of a big unit can be kept.

        By bisection: crown paths get shorter as light subtrees get larger. Light leaves never matter, since a whole
        path is within the budget.
        """
        inside = np.flatnonzero(self.big[self.units.of] & (self.units.of >= 0) & ~self.leaf)
        unit, root = self.units.of[inside], self.units.root
        begin = self.layout.positions[self.start[root]] + self.tall[root]
        above = self.layout.positions[self.start[inside]] - begin[unit]
        size, length = self.size[inside], self.length[inside]
        low, high = np.zeros(len(root), np.int64), np.full(len(root), self.target)
        firsts = np.flatnonzero(np.diff(unit, prepend=-1))
        while len(inside) and (low < high)[self.big].any():
            middle = (low + high + 1) >> 1
            crown = np.minimum(size - middle[unit], length)
            longest = np.maximum.reduceat(np.where(crown > 0, above + crown, 0), firsts)
            fits = longest + middle[unit[firsts]] <= self.budget
            changed = unit[firsts]
            low[changed] = np.where(fits, middle[changed], low[changed])
            high[changed] = np.where(fits, high[changed], middle[changed] - 1)
            low[~self.big] = high[~self.big] = 0
        return low


@dataclass(frozen=True, kw_only=True, eq=False)
class Crown:
    """Crown and late tokens of every segment, and the light subtrees below the crown."""

    count: Int64s
    """int64 [S]: crown tokens, the first ones of each segment."""
    late: Int64s
    """int64 [S]: those of them that are late, again the first ones."""
    need: Int64s
    """int64 [S]: tokens alive below the segment's last crown token when all of the crown below is kept."""
    item_start: Int64s
    """int64 [I]: first token of every light subtree, ascending by owner."""
    item_size: Int64s
    """int64 [I]."""
    item_owner: Int64s
    """int64 [I]: the segment whose last crown token it continues, -1 for whole trees."""

    @cached_property
    def _items(self) -> tuple[list[int], list[tuple[int, int]]]:
        first = np.searchsorted(self.item_owner, np.arange(-1, len(self.count) + 1)).tolist()
        return first, list(zip(self.item_size.tolist(), self.item_start.tolist()))

    def owned(self, segment: int) -> list[tuple[int, int]]:
        """The light subtrees of a segment, -1 for whole trees: (tokens, first token)."""
        first, items = self._items
        return items[first[segment + 1] : first[segment + 2]]


def crown_of(ground: Ground, light: Int64s, late_units: Bools) -> Crown:
    """Cut every unit.

    Args:
        light: int64 [U]: the largest light subtrees of every big unit.
        late_units: bool [U]: units whose crown shall be late whatever fits.
    """
    units = ground.units
    count = ground.tall.copy()
    inside = np.flatnonzero((units.of >= 0) & ground.big[units.of] & ~ground.leaf)
    unit = units.of[inside]
    count[inside] = np.clip(ground.size[inside] - light[unit], 0, ground.length[inside])
    forced = np.zeros(len(count), bool)
    forced[inside] = late_units[unit]
    crown = _with_items(ground, count)
    need, late = _late(ground, crown, forced)
    count, changed = _closed_below_late(ground, count, late)
    crown = _with_items(ground, count) if changed else crown
    return replace(crown, late=np.minimum(late, count), need=need)


def _with_items(ground: Ground, count: Int64s) -> Crown:
    full = count == ground.length
    above = ground.above
    whole = np.flatnonzero((count == 0) & ((above < 0) | full[above])) if len(above) else above
    rest = np.flatnonzero((count > 0) & ~full)
    owner = np.concatenate([above[whole], rest])
    start = np.concatenate([ground.start[whole], (ground.start + count)[rest]])
    order = np.argsort(owner, kind="stable")
    start = start[order]
    return Crown(
        count=count,
        late=count,
        need=count,
        item_start=start,
        item_size=ground.layout.ends[start] - start,
        item_owner=owner[order],
    )


def _late(ground: Ground, crown: Crown, forced: Bools) -> tuple[Int64s, Int64s]:
    """What each segment's last crown token needs below, and how many crown tokens are late."""
    need = np.zeros(len(crown.count), np.int64)
    owned = crown.item_owner >= 0
    np.maximum.at(need, crown.item_owner[owned], crown.item_size[owned])
    need[forced] = ground.budget
    chosen = np.flatnonzero(crown.count)
    above, count = ground.above[chosen].tolist(), crown.count[chosen].tolist()
    below = dict(zip(chosen.tolist(), need[chosen].tolist()))
    for at in range(len(chosen) - 1, -1, -1):
        parent = above[at]
        if parent >= 0:
            top = count[at] + below[int(chosen[at])]
            if top > below[parent]:
                below[parent] = top
    need[chosen] = list(below.values())
    return need, np.clip(need + crown.count - ground.budget, 0, crown.count)


def _closed_below_late(ground: Ground, count: Int64s, late: Int64s) -> tuple[Int64s, bool]:
    """Kept subtrees right below late tokens that are small enough to be closed are light after all."""
    top = (count > late) & (ground.size - late <= ground.target)
    above = ground.above
    if len(above):
        top &= (late > 0) | (above < 0) | (late[above] == ground.length[above])
    tops = np.flatnonzero(top)
    if not len(tops):
        return count, False
    stop = np.searchsorted(ground.layout.segment_start, ground.layout.ends[ground.start[tops]])
    covered = np.zeros(len(count) + 1, np.int64)
    np.add.at(covered, tops + 1, 1)
    np.add.at(covered, stop, -1)
    count = np.where(np.cumsum(covered[:-1]) > 0, 0, count)
    count[tops] = late[tops]
    return count, True


def segment_heights(layout: PackedLayout) -> Int64s:
    """int64 [S]: tokens on the longest path down from each segment's first token."""
    above = layout.segment_parent.tolist()
    top = np.diff(layout.segment_start).tolist()
    below = [0] * (len(above) + 1)
    for segment in range(len(above) - 1, -1, -1):
        top[segment] += below[segment]
        parent = above[segment]
        if top[segment] > below[parent]:
            below[parent] = top[segment]
    return np.array(top, np.int64)
