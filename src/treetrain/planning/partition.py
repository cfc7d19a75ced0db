"""From a tree to a plan: the fastest one found within a budget of tokens, and plans of a given shape."""

from typing import Literal

import numpy as np

from treetrain.planning.crown import NO_BOUND, Ground, crown_of
from treetrain.planning.cutting import Pieces, cut_late
from treetrain.planning.plan import Plan
from treetrain.planning.search import Search, Seconds
from treetrain.tree.assemble import Int64s
from treetrain.tree.layout import PackedLayout

Keep = Literal["none", "all", "mixed"]

PUBLISHED = 4
"""A pass without graph may have this many budgets of tokens: what it adds to the carry is small beside their graph."""


def partition(
    layout: PackedLayout,
    budget_tokens: int | None,
    seconds: Seconds,
    *,
    part_tokens: int | None = None,
    prefill_limit: int | None = None,
) -> Plan:
    """The fastest plan found in which at most so many tokens are alive at once.

    Args:
        layout: M tokens.
        budget_tokens: most tokens whose graph is alive at once, kept ancestors included; None for no bound.
        seconds: predicted time of a step under a plan.
        part_tokens: size that parts need not exceed as long as nothing is recomputed for it; paths stay whole.
        prefill_limit: most tokens of a pass without graph that late parts share; None: PUBLISHED times the budget.

    Raises:
        ValueError: a number of tokens below 1.
    """
    for name, value in (("budget", budget_tokens), ("part_tokens", part_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} of {value} tokens: give 1 or more")
    budget = NO_BOUND if budget_tokens is None else min(int(budget_tokens), NO_BOUND)
    prefill = PUBLISHED * budget if prefill_limit is None else prefill_limit
    if part_tokens is not None and part_tokens < budget:
        search = Search(Ground.of(layout, budget, part_tokens), seconds, prefill)
        plan = search.only_kept()
        if plan.recomputed_tokens == 0:
            return plan
    if layout.num_tokens <= budget:
        return Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    return Search(Ground.of(layout, budget), seconds, prefill).best()


def whole_trees(layout: PackedLayout, target: int) -> Plan:
    """Neighbouring trees share a part of at most `target` tokens; a larger tree is alone. Nothing is cut."""
    first = np.flatnonzero(layout.parent < 0)
    sizes = np.diff(first, append=layout.num_tokens)
    group, filled, groups = 0, 0, []
    for size in sizes.tolist():
        if filled and filled + size > target:
            group, filled = group + 1, 0
        filled += size
        groups.append(group)
    return Plan.of_parts(layout, np.repeat(np.array(groups, np.int64), sizes))


def uniform(layout: PackedLayout, chunk: int, keep: Keep = "none") -> Plan:
    """As few parts as at most `chunk` tokens each allow.

    Args:
        chunk: from 1.
        keep: which open parts are kept; "mixed" every second one. What is alive then does not matter.
    """
    ground = Ground.of(layout, chunk)
    units = len(ground.units.root)
    pieces = Pieces()
    cut_late(ground, crown_of(ground, np.full(units, chunk), np.ones(units, bool)), pieces)
    return _plan(layout, pieces.cut(layout.num_tokens).part_of, keep)


def one_segment_per_part(layout: PackedLayout, keep: Keep = "none") -> Plan:
    """Every run without a fork is a part."""
    length = np.diff(layout.segment_start)
    return _plan(layout, np.repeat(np.arange(len(length)), length), keep)


def _plan(layout: PackedLayout, part_of: Int64s, keep: Keep) -> Plan:
    number = np.arange(int(part_of.max(initial=-1)) + 1)
    kept = {"none": number < 0, "all": number >= 0, "mixed": number % 2 == 0}[keep]
    return Plan.of_parts(layout, part_of, kept)
