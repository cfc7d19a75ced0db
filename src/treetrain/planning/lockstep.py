"""Ranks that must call the model in one order: whose turn it is at every slot, and how long the slot takes.

Under FSDP every call of the model is a collective, so all ranks go through the same sequence of passes. A rank that has
no pass of the slot's kind runs one over a single token that counts for nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from treetrain.planning.plan import Plan
from treetrain.planning.rates import Rates

Kind = Literal["prefill", "forward", "backward"]
LETTERS: dict[Kind, str] = {"prefill": "P", "forward": "F", "backward": "B"}
KINDS: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


class Pass(NamedTuple):
    """One event of a plan with its predicted time."""

    kind: Kind
    seconds: float


class Timed(NamedTuple):
    """A rank's sequence of passes, in few bytes."""

    kinds: str
    """See `spelled`."""
    seconds: list[float]


class Turn(NamedTuple):
    """One pass of all ranks."""

    kind: Kind
    takers: tuple[int, ...]
    """Ranks that run a pass of their own; the others stand in with one that counts for nothing."""


class Slot(NamedTuple):
    """One pass of all ranks, with its time."""

    kind: Kind
    seconds: float
    """Of the slowest rank that has such a pass."""
    busy: int
    """Ranks that have one; the others wait."""


def spelled(kinds: Iterable[Kind]) -> str:
    """A sequence of passes, a letter each: P(ublish), F(orward), B(ackward)."""
    return "".join(LETTERS[kind] for kind in kinds)


def common_order(ranks: Sequence[str]) -> list[Turn]:
    """One sequence of passes that holds every rank's own in its order.

    Forwards come first, the kind that more ranks have next; a backward is everybody's when nobody has a forward left to
    run before it. So at every backward slot a rank that has none of its own has a stand-in's graph left to go through:
    it has run all its passes, and so far there were more forwards than backwards.

    Args:
        ranks: every rank's sequence, see `spelled`.
    """
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


def passes_of(plan: Plan, rates: Rates) -> list[Pass]:
    """The events of a plan with their seconds, whose sum is that of `CostModel.seconds`."""
    layout, parts = plan.layout, plan.num_parts
    if not parts:
        return []
    both = rates.at(layout.positions)
    whole = np.bincount(plan.part_of, both, parts)
    heads = rates.row * np.bincount(plan.part_of[layout.rows], minlength=parts)
    forward = whole * rates.forward_share + heads / 3 + rates.graph_pass / 3
    backward = whole * (1 - rates.forward_share) + heads * 2 / 3 + rates.graph_pass * 2 / 3
    number = plan.prefill[plan.part_of]
    late = plan.exported & (number >= 0)
    prefill = rates.forward_share * np.bincount(number[late], both[late]) + rates.forward_pass
    seconds = {"forward": forward, "backward": backward, "prefill": prefill}
    return [Pass(event.kind, float(seconds[event.kind][event.number])) for event in plan.events()]


def timed(passes: Sequence[Pass]) -> Timed:
    """Passes as what is told to other ranks."""
    return Timed(spelled(one.kind for one in passes), [one.seconds for one in passes])


def in_lockstep(ranks: Sequence[Timed]) -> list[Slot]:
    """The common order of the ranks' passes, with times."""
    at = [0] * len(ranks)
    slots = []
    for turn in common_order([own.kinds for own in ranks]):
        seconds = max(ranks[rank].seconds[at[rank]] for rank in turn.takers)
        slots.append(Slot(turn.kind, seconds, len(turn.takers)))
        for rank in turn.takers:
            at[rank] += 1
    return slots


def lockstep_seconds(ranks: Sequence[Timed]) -> float:
    """How long the common order takes."""
    return sum(slot.seconds for slot in in_lockstep(ranks))
