"""The one order in which ranks call the model under FSDP, and plans that leave little waiting in it.

Every call of the model is a collective under FSDP, so all ranks go through one sequence of passes. A rank that has no
pass of the kind that is due runs one over a single token that counts for nothing, and waits for the slowest.

    rank 0    F  F  B  .  B        F forward, B backward, P prefill,
    rank 1    F  .  B  F  B        . a pass over one token

Why it is right. Only the next pass of a rank is ever taken, so the common order holds every rank's own in its order.
Forwards come first, the kind that more ranks have next; a backward is due when no rank has a forward left to run
before it. So at a backward a rank that has none of its own has run all its passes, and so far there were more forwards
than backwards: the graph of a pass over one token is left for it to go through.

Ranks with equal work still wait where their parts differ in size or order. So each rank offers several candidates, all
within its budget: its own plan, plans under smaller budgets, and *runs*, its rows cut into a few contiguous ranges of
equal predicted time that share nothing. A run is a part of its own, so that every rank's sequence is forward, backward,
forward, backward. The path that two runs need is computed twice, which is less than what waiting costs. All ranks
together take the candidates whose common order is the fastest; from the same offers all find the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from treetrain.planning.balance import Balancer
from treetrain.planning.budget import Bytes, within_bytes
from treetrain.planning.explain import Purpose
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan, depth_first
from treetrain.planning.price import CostModel, Rates
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

Kind = Literal["prefill", "forward", "backward"]
LETTERS: dict[Kind, str] = {"prefill": "P", "forward": "F", "backward": "B"}
KINDS: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}
SMALLER = (0.85, 0.7, 0.55)
"""Plans are also offered under these shares of the budget: ranks then have parts of other sizes."""
RUNS_OFFERED, RUNS_WITHIN = 3, 1.5
"""Numbers of runs offered, from the fewest that fit; and how many times the fewest thinkable are looked at."""
MOST_PARTS = 512
"""A plan of more is taken as it is: with so many passes the ranks' differences even out."""
_STEPS = 400_000
"""Passes looked at in the search for the ranks' candidates; bounds its time to part of a second."""


class Passes(NamedTuple):
    """A rank's sequence of passes."""

    kinds: str
    """A letter each; see `spelled`."""
    seconds: list[float]


class Turn(NamedTuple):
    """One pass of all ranks."""

    kind: Kind
    takers: tuple[int, ...]
    """Ranks that run a pass of their own; the others run one over a single token."""


class Candidate(NamedTuple):
    """One way to run a rank's rows."""

    plan: Plan
    tree: TokenTree
    """The tree that the plan's layout is of: the rank's rows, those of other runs apart."""
    name: str
    """The same on all ranks for candidates of one kind."""


class Offer(NamedTuple):
    """All that other ranks need to know of a candidate."""

    name: str
    passes: Passes


def spelled(kinds: Iterable[Kind]) -> str:
    """A sequence of passes, a letter each: P(refill), F(orward), B(ackward)."""
    return "".join(LETTERS[kind] for kind in kinds)


def common_order(ranks: Sequence[str]) -> list[Turn]:
    """One sequence of passes that holds every rank's own, as `spelled`, in its order."""
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
    """The common order of the ranks' passes, with the seconds of each: those of its slowest rank."""
    seconds = [iter(own.seconds) for own in ranks]
    turns = common_order([own.kinds for own in ranks])
    return [(turn, max(next(seconds[rank]) for rank in turn.takers)) for turn in turns]


def order_seconds(ranks: Sequence[Passes]) -> float:
    """Seconds of the common order."""
    return sum(seconds for _, seconds in timed_order(ranks))


def passes_of(plan: Plan, rates: Rates) -> Passes:
    """The passes of a plan with their seconds, whose sum is that of `CostModel.seconds`."""
    layout, parts = plan.layout, plan.num_parts
    if not parts:
        return Passes("", [])
    both = rates.at(layout.positions)
    whole = np.bincount(plan.part_of, both, parts)
    heads = rates.row * np.bincount(plan.part_of[layout.rows], minlength=parts)
    again = plan.is_recomputed_token
    prefilled = np.bincount(plan.prefill[plan.part_of[again]], both[again])
    seconds = {
        "forward": whole * rates.forward_share + heads / 3 + rates.graph_pass / 3,
        "backward": whole * (1 - rates.forward_share) + heads * 2 / 3 + rates.graph_pass * 2 / 3,
        "prefill": prefilled * rates.forward_share + rates.forward_pass,
    }
    events = list(plan.events())
    return Passes(spelled(e.kind for e in events), [float(seconds[e.kind][e.number]) for e in events])


def candidates(
    tree: TokenTree,
    plan: Plan,
    lay_out: Callable[[TokenTree], PackedLayout],
    *,
    whole_rows: bool = False,
    apart: bool = True,
    free_bytes: float | None = None,
) -> list[Candidate]:
    """The ways that a rank can run its rows, each within the plan's budget; the given plan comes first, or whole.

    Args:
        tree: of the rank's rows.
        plan: of `make_plan`; one that was made otherwise is the only candidate.
        lay_out: what is computed of a tree of these rows.
        whole_rows: whether that is all of them, instead of what training needs.
        apart: whether rows may be cut into runs that share nothing.
        free_bytes: where the plan has no budget, what the device has free; None: as much as the plan needs.
    """
    purpose = _purpose(plan)
    if purpose is None or not plan.num_parts:
        return [Candidate(plan, tree, "as planned")]
    (made_for, prices), layout = purpose, plan.layout

    def within(tokens: int) -> Plan:
        return replace(partition(layout, tokens, prices.seconds), made_for=made_for)

    own = Candidate(largest_first(plan, prices), tree, "as planned")
    if plan.num_parts == 1 or plan.num_parts > MOST_PARTS:
        return [own]
    room, limit = _room(plan, made_for, prices, free_bytes)
    if layout.num_tokens <= room:
        whole = within(layout.num_tokens)
        if limit is None or prices.peak_bytes(whole) <= limit:
            return [Candidate(whole, tree, "whole"), own]
    others = [
        Candidate(largest_first(within(max(1, int(room * share))), prices), tree, f"{share} of the budget")
        for share in SMALLER
    ]
    others += _in_runs(tree, room, lay_out, made_for, prices, whole_rows=whole_rows) if apart else []
    return [own, *(other for other in others if limit is None or prices.peak_bytes(other.plan) <= limit)]


def offers_of(own: Sequence[Candidate]) -> list[Offer]:
    """The offers that a rank makes to the others."""
    return [Offer(candidate.name, _passes(candidate.plan)) for candidate in own]


def choose(offers: Sequence[Sequence[Offer]]) -> list[int]:
    """The number of each rank's candidate, so that the common order is fast. All ranks find the same.

    One kind for all ranks is tried first. Then one rank after the other takes the candidate that is best beside the
    others', as long as that helps.

    Args:
        offers: per rank.
    """

    def total(numbers: Sequence[int]) -> float:
        return order_seconds([own[number].passes for own, number in zip(offers, numbers)])

    by_name = [{offer.name: number for number, offer in enumerate(own)} for own in offers]
    names = dict.fromkeys(name for own in by_name for name in own)
    found = min(([own.get(name, 0) for own in by_name] for name in names), key=total)
    best, steps, unchanged = total(found), 0, 0
    size = sum(len(own[number].passes.kinds) for own, number in zip(offers, found))
    while unchanged < len(offers):
        for rank, own in enumerate(offers):
            before = found[rank]
            for number in range(len(own)):
                seconds = total([*found[:rank], number, *found[rank + 1 :]])
                if seconds < best * (1 - 1e-9):
                    best, found[rank] = seconds, number
            steps += size * len(own)
            unchanged = 0 if found[rank] != before else unchanged + 1
            if unchanged >= len(offers) or steps > _STEPS:
                return found
    return found


def largest_first(plan: Plan, prices: CostModel) -> Plan:
    """The same parts, siblings in the order of their seconds: ranks then meet in parts of about the same size."""
    seconds = np.bincount(plan.part_of, Rates.of(prices).at(plan.layout.positions), plan.num_parts)
    order = depth_first(plan.parent, -seconds)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    parent, prefill = plan.parent[order], plan.prefill[order]
    # Prefills are numbered in the order they run: by their first part.
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


def _passes(plan: Plan) -> Passes:
    purpose = _purpose(plan)
    if purpose is not None:
        return passes_of(plan, Rates.of(purpose[1]))
    kinds = spelled(event.kind for event in plan.events())
    return Passes(kinds, [1.0] * len(kinds))


def _purpose(plan: Plan) -> tuple[Purpose, CostModel] | None:
    """The budget and the cost model of `make_plan`; None for a plan that was made otherwise."""
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
    peak = prices.peak_bytes(plan)
    if limit is None or peak > limit:
        return plan.peak_tokens, peak
    return within_bytes(plan.layout, prices, Bytes(int(limit)))[1], limit


def _in_runs(
    tree: TokenTree,
    room: int,
    lay_out: Callable[[TokenTree], PackedLayout],
    made_for: Purpose,
    prices: CostModel,
    *,
    whole_rows: bool,
) -> Iterator[Candidate]:
    """The rows in the fewest runs that fit, and in some more: each run is a part of its own."""
    fewest = max(2, math.ceil(lay_out(tree).num_tokens / room))
    balancer, found = Balancer(tree, prices, whole_rows=whole_rows), 0
    for runs in range(fewest, math.ceil(RUNS_WITHIN * fewest) + RUNS_OFFERED):
        divided = balancer.over(runs)
        if divided.tokens.max() > room:
            continue
        run_of_row = divided.rank_of()
        apart = build_tree(list(tree.trajectories), apart=run_of_row)
        layout = lay_out(apart)
        _, part_of = np.unique(run_of_row[_a_row_through(apart)][layout.tree_index], return_inverse=True)
        plan = replace(Plan.of_parts(layout, part_of), made_for=made_for)
        yield Candidate(largest_first(plan, prices), apart, f"{runs} runs")
        found += 1
        if found == RUNS_OFFERED:
            return


def _a_row_through(tree: TokenTree) -> Int64s:
    """int64 [N]: a trajectory through every token."""
    order = np.argsort(tree.trajectory_last, kind="stable")
    return order[np.searchsorted(tree.trajectory_last[order], np.arange(tree.num_tokens))]
