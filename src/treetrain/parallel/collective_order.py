"""The common order in which ranks call the model under FSDP, and plans that make ranks wait little in that order.

Under FSDP every call of the model is a collective, so all ranks go through one sequence of passes. If a rank's next
pass is of another kind, the rank runs a pass over a single token with no effect, and waits for the slowest rank.

    rank 0    F  F  B  .  B        F forward, B backward, P prefill,
    rank 1    F  .  B  F  B        . a pass over one token

Why it is correct: the order only ever takes the next pass of a rank, so it contains each rank's own sequence.
Prefills and forwards come before backwards. Between a prefill and a forward, the kind that more ranks have next comes
first. A backward comes when it is the next pass of every rank that has passes left. A rank without a backward of its
own has then finished. Up to there the order has more forwards than backwards, so this rank still has the graph of a
one-token forward for its backward.

Ranks with equal work still wait if their parts differ in size or order. So each rank offers several candidates, all
within its budget:

    its own plan
    plans under smaller budgets, whose parts have other sizes
    ranges: its rows cut into contiguous ranges of about equal predicted time, as few as fit as one part each, or more

Ranges share nothing, so a path that two of them need is computed twice. But the sequence of every rank is then forward,
backward, forward, backward, in passes of about the same time, and this can save more waiting than it costs. The ranks
choose the combination of candidates whose common order is the fastest found. The search is deterministic, so all ranks
make the same choice.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from treetrain.core.planning.make import within_bytes
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Bytes, Costs, Passes, Plan, Purpose, depth_first
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import TokenTree
from treetrain.parallel.balance import Balancer

Kind = Literal["prefill", "forward", "backward"]
KINDS: dict[str, Kind] = {"P": "prefill", "F": "forward", "B": "backward"}
SMALLER = (0.85, 0.7, 0.55)
"""Plans are also offered for these fractions of the budget, to get parts of other sizes."""
RANGES_OFFERED = 3
"""How many numbers of ranges are offered, from the fewest that fit: with more ranges ranks may match better."""
MOST_RANGES = 1.5
"""How far the number of ranges may exceed the tokens divided by the budget, as a factor. Ranges whose rows share a long
path compute it several times, so the smallest number may not fit."""
MOST_PARTS = 512
"""A plan with more parts gets no alternatives: over so many passes the ranks' differences even out."""
_STEPS = 400_000
"""The passes that `choose` looks at before it stops, which takes less than a second."""


class Turn(NamedTuple):
    """One pass of all ranks."""

    kind: Kind
    takers: tuple[int, ...]
    """Ranks that run a pass of their own; the others run one over a single token."""


class Candidate(NamedTuple):
    """One way to run a rank's rows."""

    plan: Plan
    tree: TokenTree
    """The tree of the plan's layout: the rank's rows, where rows of different ranges share nothing."""
    name: str
    """Candidates of one kind have the same name on all ranks."""


class Offer(NamedTuple):
    """The part of a candidate that other ranks need."""

    name: str
    passes: Passes


def common_order(ranks: Sequence[str]) -> list[Turn]:
    """Merge the ranks' sequences, as `Plan.kinds`, into one that contains each of them in order."""
    at = [0] * len(ranks)
    turns = []
    while True:
        ready: dict[str, list[int]] = {}
        for rank, place in enumerate(at):
            if place < len(ranks[rank]):
                ready.setdefault(ranks[rank][place], []).append(rank)
        if not ready:
            return turns
        letter = max(ready, key=lambda letter: (letter != "B", len(ready[letter]), letter))
        turns.append(Turn(KINDS[letter], tuple(ready[letter])))
        for rank in ready[letter]:
            at[rank] += 1


def timed_order(ranks: Sequence[Passes]) -> list[tuple[Turn, float]]:
    """The common order of the ranks' passes, with the seconds of the slowest rank in each."""
    seconds = [iter(own.seconds) for own in ranks]
    turns = common_order([own.kinds for own in ranks])
    return [(turn, max(next(seconds[rank]) for rank in turn.takers)) for turn in turns]


def order_seconds(ranks: Sequence[Passes]) -> float:
    """Predict the seconds of the common order."""
    return sum(seconds for _, seconds in timed_order(ranks))


def candidates(
    tree: TokenTree,
    plan: Plan,
    lay_out: Callable[[TokenTree], PackedLayout],
    *,
    whole_rows: bool = False,
    apart: bool = True,
    free_bytes: float | None = None,
) -> list[Candidate]:
    """List the ways to compute a rank's rows within the plan's budget: first in one part if that fits, else the plan.

    Args:
        tree: the tree of the rank's rows.
        plan: a plan from `make_plan`; any other plan gets no alternatives.
        lay_out: returns the layout to compute for a tree of these rows.
        whole_rows: whether the layout has all predictions, not only the trained ones.
        apart: whether rows may be cut into ranges that share nothing.
        free_bytes: free bytes of the device, for a plan without a budget; None means as much as the plan needs.
    """
    purpose, layout = plan.purpose, plan.layout
    if purpose is None or not plan.num_parts:
        return [Candidate(plan, tree, "as planned")]
    cost = purpose.cost

    def within(tokens: int) -> Plan:
        return replace(partition(layout, tokens, cost.seconds), purpose=purpose)

    own = Candidate(largest_first(plan, cost), tree, "as planned")
    if plan.num_parts == 1 or plan.num_parts > MOST_PARTS:
        return [own]
    budget, limit = _limits(plan, purpose, free_bytes)
    if layout.num_tokens <= budget:
        whole = within(layout.num_tokens)
        if limit is None or cost.peak_bytes(whole) <= limit:
            return [Candidate(whole, tree, "whole"), own]
    others = [
        Candidate(largest_first(within(max(1, int(budget * share))), cost), tree, f"{share} of the budget")
        for share in SMALLER
    ]
    if apart:
        ranges = _in_ranges(tree, budget, lay_out, purpose, whole_rows=whole_rows)
        others += itertools.islice(ranges, RANGES_OFFERED)
    return [own, *(other for other in others if limit is None or cost.peak_bytes(other.plan) <= limit)]


def offers_of(own: Sequence[Candidate]) -> list[Offer]:
    """The offers of a rank's candidates. Passes count as one second each if the plan is not from `make_plan`."""
    offers = []
    for candidate in own:
        plan = candidate.plan
        passes = Passes(plan.kinds, [1.0] * len(plan.kinds)) if plan.purpose is None else plan.purpose.cost.passes(plan)
        offers.append(Offer(candidate.name, passes))
    return offers


def choose(offers: Sequence[Sequence[Offer]]) -> list[int]:
    """Choose a candidate number per rank so that the common order is fast. All ranks get the same result.

    The search starts with the best choice of one candidate name for all ranks. Then each rank in turn takes its best
    candidate, given those of the others, while that helps.

    Args:
        offers: the offers of every rank.
    """

    def total(numbers: Sequence[int]) -> float:
        return order_seconds([own[number].passes for own, number in zip(offers, numbers)])

    by_name = [{offer.name: number for number, offer in enumerate(own)} for own in offers]
    names = dict.fromkeys(name for own in by_name for name in own)
    chosen = min(([own.get(name, 0) for own in by_name] for name in names), key=total)
    best = total(chosen)
    steps = 0
    unchanged = 0
    size = sum(len(own[number].passes.kinds) for own, number in zip(offers, chosen))
    while unchanged < len(offers):
        for rank, own in enumerate(offers):
            before = chosen[rank]
            for number in range(len(own)):
                seconds = total([*chosen[:rank], number, *chosen[rank + 1 :]])
                if seconds < best * (1 - 1e-9):
                    best, chosen[rank] = seconds, number
            steps += size * len(own)
            unchanged = 0 if chosen[rank] != before else unchanged + 1
            if unchanged >= len(offers) or steps > _STEPS:
                return chosen
    return chosen


def largest_first(plan: Plan, cost: Costs) -> Plan:
    """The same parts with the slowest siblings first, so that ranks run parts of similar size together."""
    seconds = np.bincount(plan.part_of, cost.token_seconds(plan.layout.positions), plan.num_parts)
    order = depth_first(plan.parent, -seconds)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    parent, prefill = plan.parent[order], plan.prefill[order]
    # Prefills are numbered in the order they run, which is the order of their first parts.
    _, first = np.unique(prefill[prefill >= 0], return_index=True)
    prefill[prefill >= 0] = np.argsort(np.argsort(first))[prefill[prefill >= 0]]
    return replace(
        plan,
        part_of=number[plan.part_of],
        parent=np.where(parent >= 0, number[parent], -1),
        attach=plan.attach[order],
        kept=plan.kept[order],
        prefill=prefill,
    )


def _limits(plan: Plan, purpose: Purpose, free_bytes: float | None) -> tuple[int, float | None]:
    """Return the tokens that may be alive at once, and the bytes if the budget is not in tokens."""
    budget, cost = purpose.budget, purpose.cost
    if isinstance(budget, int):
        return budget, None
    limit = free_bytes if budget is None else float(budget.count)
    if purpose.tokens is not None:
        return purpose.tokens, limit
    peak = cost.peak_bytes(plan)
    if limit is None or peak > limit:
        return plan.peak_tokens, peak
    return within_bytes(plan.layout, cost, Bytes(int(limit)))[1], limit


def _in_ranges(
    tree: TokenTree,
    budget: int,
    lay_out: Callable[[TokenTree], PackedLayout],
    purpose: Purpose,
    *,
    whole_rows: bool,
) -> Iterator[Candidate]:
    """Cut the rows into contiguous ranges that each fit as one part; begin with the fewest ranges."""
    fewest = max(2, math.ceil(lay_out(tree).num_tokens / budget))
    balancer = Balancer(tree, purpose.cost, whole_rows=whole_rows)
    for ranges in range(fewest, math.ceil(MOST_RANGES * fewest) + RANGES_OFFERED):
        divided = balancer.over(ranges)
        if divided.tokens.max() > budget:
            continue
        range_of_row = divided.rank_of
        shares = tree.num_tokens < tree.num_flat_tokens  # rows of the linear baseline stay apart
        apart = tree.rebuilt(merge=shares, apart=range_of_row)
        layout = lay_out(apart)
        # A token belongs to one range, so that of the first row through it is its own.
        rows = np.argsort(apart.trajectory_last, kind="stable")
        first_row = rows[np.searchsorted(apart.trajectory_last[rows], layout.tree_index)]
        _, part_of = np.unique(range_of_row[first_row], return_inverse=True)
        plan = replace(Plan.of_parts(layout, part_of), purpose=purpose)
        yield Candidate(largest_first(plan, purpose.cost), apart, f"{ranges} ranges")
