"""Ranks that must call the model in one order: whose turn it is at every slot, and how long the slot takes.

Under FSDP every call of the model is a collective, so all ranks go through the same sequence of passes. A rank that has
no pass of the slot's kind runs one over a single token that counts for nothing.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from treetrain.plan.plan import Plan
from treetrain.plan.rates import Rates

Kind = Literal["publish", "forward", "backward"]


class Pass(NamedTuple):
    """One event of a plan with its predicted time."""

    kind: Kind
    seconds: float


class Slot(NamedTuple):
    """One pass of all ranks."""

    kind: Kind
    seconds: float
    """Of the slowest rank that has such a pass."""
    busy: int
    """Ranks that have one; the others wait."""


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
    number = plan.publish[plan.part_of]
    late = plan.exported & (number >= 0)
    publish = rates.forward_share * np.bincount(number[late], both[late]) + rates.forward_pass
    seconds = {"forward": forward, "backward": backward, "publish": publish}
    return [Pass(event.kind, float(seconds[event.kind][event.number])) for event in plan.events()]


def in_lockstep(ranks: Sequence[Sequence[Pass]]) -> list[Slot]:
    """One sequence of passes that holds every rank's own in its order.

    Forwards come first, the kind that more ranks have next; a backward is everybody's when nobody has a forward left to
    run before it.
    """
    at = [0] * len(ranks)
    slots = []
    while True:
        ready: dict[Kind, list[int]] = {}
        for rank, place in enumerate(at):
            if place < len(ranks[rank]):
                ready.setdefault(ranks[rank][place].kind, []).append(rank)
        if not ready:
            return slots
        kind: Kind = max(ready, key=lambda kind: (kind != "backward", len(ready[kind]), kind))
        slots.append(Slot(kind, max(ranks[rank][at[rank]].seconds for rank in ready[kind]), len(ready[kind])))
        for rank in ready[kind]:
            at[rank] += 1
