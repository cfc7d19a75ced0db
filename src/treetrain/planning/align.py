"""Plans of several ranks that line up: under FSDP every pass is one of all ranks, and all wait for its slowest.

Each rank knows several ways to run its rows; all ranks together take the ways whose common order of passes is the
fastest. What helps most are runs: rows cut into a few contiguous ranges of equal predicted time, each a tree of its own
that fits the budget whole, so that every rank's sequence is forward, backward, forward, backward. Between two runs the
path that both need is computed twice, which is less than what waiting costs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treetrain.planning.balance import Balancer
from treetrain.planning.explain import Purpose
from treetrain.planning.lockstep import Pass, Timed, lockstep_seconds, passes_of, timed
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan, depth_first
from treetrain.planning.price import CostModel
from treetrain.planning.rates import Rates
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

SMALLER = (0.85, 0.7, 0.55)
"""Plans of the tree are also tried under these shares of the budget: ranks then have parts of other sizes."""
RUNS_TRIED, RUNS_WITHIN = 3, 1.5
"""Numbers of runs offered, from the fewest that fit; and how many times the fewest thinkable are looked at."""
MOST_PARTS = 512
"""A plan of more is taken as it is: with so many passes the ranks' differences even out."""
_STEPS = 400_000
"""Passes looked at in the search for the ranks' ways; bounds its time to part of a second."""


class Way(NamedTuple):
    """One way to run a rank's rows."""

    plan: Plan
    tree: TokenTree
    """What the plan's layout is of: the rank's rows, those of other runs apart."""
    name: str
    """The same on all ranks for ways of one kind."""


class Offer(NamedTuple):
    """What a rank tells the others of a way."""

    name: str
    passes: Timed


def offers_of(ways: Sequence[Way]) -> list[Offer]:
    """What the other ranks must know of one's ways."""
    return [Offer(way.name, timed(_passes(way.plan))) for way in ways]


def ways_of(
    tree: TokenTree,
    plan: Plan,
    lay_out: Callable[[TokenTree], PackedLayout],
    *,
    whole_rows: bool = False,
    apart: bool = True,
    free_bytes: float | None = None,
) -> list[Way]:
    """The ways that a rank can run its rows, each within the plan's budget; the given plan is the first.

    Args:
        tree: of the rank's rows.
        plan: of `make_plan`; one that was made otherwise is the only way.
        lay_out: what is computed of a tree of these rows.
        whole_rows: whether that is all of them, instead of what training needs.
        apart: whether rows may be cut into runs that share nothing.
        free_bytes: where the plan has no budget, what the device has free; None: as much as the plan needs.
    """
    purpose = _purpose(plan)
    if purpose is None or not plan.num_parts:
        return [Way(plan, tree, "as planned")]
    (made_for, prices), layout = purpose, plan.layout
    ways = [Way(largest_first(plan, prices), tree, "as planned")]
    if plan.num_parts == 1 or plan.num_parts > MOST_PARTS:
        return ways
    room, limit = _room(plan, made_for, prices, free_bytes)
    if layout.num_tokens <= room:
        whole = _within(layout, layout.num_tokens, made_for)
        if limit is None or prices.peak_bytes(whole) <= limit:
            return [Way(whole, tree, "whole"), *ways]
    for share in SMALLER:
        small = _within(layout, max(1, int(room * share)), made_for)
        ways.append(Way(largest_first(small, prices), tree, f"{share} of the budget"))
    ways += _in_runs(tree, room, lay_out, made_for, prices, whole_rows=whole_rows) if apart else []
    return [way for way in ways if limit is None or way is ways[0] or prices.peak_bytes(way.plan) <= limit]


def choose(offers: Sequence[Sequence[Offer]]) -> list[int]:
    """The number of each rank's way, so that the ranks' common order of passes is fast.

    All ranks find the same from the same offers.

    Args:
        offers: per rank, its ways.
    """
    numbers = [{offer.name: number for number, offer in enumerate(own)} for own in offers]
    names = dict.fromkeys(name for own in numbers for name in own)
    alike = [[own.get(name, 0) for own in numbers] for name in names]
    return _improved(offers, min(alike, key=lambda chosen: _total(offers, chosen)))


def largest_first(plan: Plan, prices: CostModel) -> Plan:
    """The same parts, siblings in the order of their seconds: ranks then meet in parts of about the same size."""
    rates = Rates.of(prices)
    seconds = np.bincount(plan.part_of, rates.at(plan.layout.positions), plan.num_parts).astype(np.float64)
    order = depth_first(plan.parent, -seconds)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    parent, prefill = plan.parent[order], plan.prefill[order]
    _, first = np.unique(prefill[prefill >= 0], return_index=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    prefill[prefill >= 0] = number[prefill[prefill >= 0]]
    return replace(
        plan,
        part_of=rank[plan.part_of],
        parent=np.where(parent >= 0, rank[parent], -1),
        attach=plan.attach[order],
        kept=plan.kept[order],
        prefill=prefill,
    )


def _passes(plan: Plan) -> list[Pass]:
    purpose = _purpose(plan)
    if purpose is None:
        return [Pass(event.kind, 1.0) for event in plan.events()]
    return passes_of(plan, Rates.of(purpose[1]))


def _purpose(plan: Plan) -> tuple[Purpose, CostModel] | None:
    """What a plan of `make_plan` was made for, and what passes cost; None for one that was made otherwise."""
    made_for = plan.made_for
    if isinstance(made_for, Purpose) and isinstance(made_for.prices, CostModel):
        return made_for, made_for.prices
    return None


def _room(plan: Plan, made_for: Purpose, prices: CostModel, free_bytes: float | None) -> tuple[int, float | None]:
    """Tokens that may be alive at once, and the bytes that bound them where no tokens were given."""
    if isinstance(made_for.budget, int):
        return made_for.budget, None
    limit = free_bytes if made_for.budget is None else float(made_for.budget.count)
    if made_for.tokens is not None:
        return made_for.tokens, limit
    if limit is None or prices.peak_bytes(plan) > limit:
        return plan.peak_tokens, prices.peak_bytes(plan)
    low, high = plan.peak_tokens, plan.layout.num_tokens
    if prices.peak_bytes(_within(plan.layout, high, made_for)) <= limit:
        return high, limit
    while high - low > low // 20:  # peaks grow with the budget
        middle = (low + high + 1) // 2
        fits = prices.peak_bytes(_within(plan.layout, middle, made_for)) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low, limit


def _within(layout: PackedLayout, tokens: int, made_for: Purpose) -> Plan:
    """The plan under so many tokens, made for the same as another."""
    return replace(partition(layout, tokens, made_for.prices.seconds), made_for=made_for)


def _in_runs(
    tree: TokenTree,
    room: int,
    lay_out: Callable[[TokenTree], PackedLayout],
    made_for: Purpose,
    prices: CostModel,
    *,
    whole_rows: bool,
) -> Iterator[Way]:
    """The rows in the fewest runs that fit, and in some more: each run is a part of its own."""
    fewest = max(2, math.ceil(lay_out(tree).num_tokens / room))
    cutter, found = Balancer(tree, prices, whole_rows=whole_rows), 0
    for runs in range(fewest, math.ceil(RUNS_WITHIN * fewest) + RUNS_TRIED):
        cut = cutter.over(runs)
        if cut.tokens.max() > room:
            continue
        run_of_row = cut.rank_of()
        apart = build_tree(list(tree.trajectories), apart=run_of_row)
        layout = lay_out(apart)
        run_of = run_of_row[_owners(apart)][layout.tree_index]
        _, part_of = np.unique(run_of, return_inverse=True)
        plan = replace(Plan.of_parts(layout, part_of), made_for=made_for)
        yield Way(largest_first(plan, prices), apart, f"{runs} runs")
        found += 1
        if found == RUNS_TRIED:
            return


def _owners(tree: TokenTree) -> Int64s:
    """int64 [N]: a trajectory through every token."""
    order = np.argsort(tree.trajectory_last, kind="stable")
    return order[np.searchsorted(tree.trajectory_last[order], np.arange(tree.num_tokens))]


def _total(offers: Sequence[Sequence[Offer]], chosen: Sequence[int]) -> float:
    return lockstep_seconds([own[number].passes for own, number in zip(offers, chosen)])


def _improved(offers: Sequence[Sequence[Offer]], chosen: Sequence[int]) -> list[int]:
    """One rank after the other takes the way that is best beside the others', as long as that helps."""
    found, best, steps = list(chosen), _total(offers, chosen), 0
    size = sum(len(own[number].passes.kinds) for own, number in zip(offers, found))
    idle = 0
    while idle < len(offers):
        for rank, own in enumerate(offers):
            before = found[rank]
            for number in range(len(own)):
                steps += size
                total = _total(offers, [*found[:rank], number, *found[rank + 1 :]])
                if total < best * (1 - 1e-9):
                    best, found[rank] = total, number
            idle = 0 if found[rank] != before else idle + 1
            if idle >= len(offers) or steps > _STEPS:
                return found
    return found
