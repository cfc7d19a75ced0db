"""Plans of every shape, forced on the engine whatever a budget would choose."""

from collections.abc import Callable

from support.layouts import Keep, one_segment_per_part, uniform
from treetrain.engine.engine import TreeEngine
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout

Shape = Callable[[PackedLayout, Keep], Plan]


def _parts_of(share: int) -> Shape:
    return lambda layout, keep: uniform(layout, max(layout.num_tokens // share, 1), keep)


def _chunks_of(tokens: int) -> Shape:
    return lambda layout, keep: uniform(layout, tokens, keep)


def _shared_prefill(layout: PackedLayout, keep: Keep) -> Plan:
    """Chunks of three tokens; recomputed parts below one another share their passes without graph."""
    plan = uniform(layout, 3, keep)
    return Plan.of_parts(layout, plan.part_of, plan.kept, prefill_limit=9)


SHAPES: dict[str, Shape] = {
    "1 part": _parts_of(1),
    "N/2": _parts_of(2),
    "N/4": _parts_of(4),
    "N/16": _parts_of(16),
    "one segment per part": one_segment_per_part,
    "chunks of 7": _chunks_of(7),
    "chunks of 2": _chunks_of(2),
    "shared prefill": _shared_prefill,
}
KEEPS: tuple[Keep, ...] = ("none", "all", "mixed")


def planned(shape: str, keep: Keep) -> type[TreeEngine]:
    """An engine whose plans have one shape."""

    class Planned(TreeEngine):
        plans: list[Plan] = []  # noqa: RUF012 - one list for all engines of this kind is what tests look at

        def plan_of(self, layout: PackedLayout) -> Plan:
            plan = SHAPES[shape](layout, keep)
            self.plans.append(plan)
            return plan

    return Planned
