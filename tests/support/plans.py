"""Layouts and forests of rows, plans of every shape forced on the engine, and what every plan must hold."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from treetrain.core.attention.schedule import Forest
from treetrain.core.engine.engine_model import Call, EngineModel
from treetrain.core.planning.partition import _Cutter
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.engine import TreeEngine


def layout_of(rows) -> PackedLayout:
    """Layout of rows of token ids, every token computed."""
    return pack(build_tree(rows), trim=False)


def attention_forest(rows) -> Forest:
    """The same as the attention layer sees it."""
    return Forest.of(layout_of(rows))


def keeping_graphs(graphs: str) -> Callable[[Plan], Plan | None]:
    """In the place of `Call.plan_keeping_graphs`: all graphs are kept, those of every second part, or none."""

    def choose(plan: Plan) -> Plan | None:
        second = np.arange(plan.num_parts) % 2 == 1
        found = {"kept": plan.keeping_graphs(), "partly": plan.keeping_graphs(second), "recomputed": None}
        return found[graphs]

    return choose


class _Answering(EngineModel):
    answers: dict[str, Any]

    def call(self, **asked: Any) -> Call:
        call = super().call(**asked)
        vars(call).update(self.answers)
        return call


def calls_answer(engine: TreeEngine, **answers: Callable[..., Any]) -> None:
    """Let functions stand in the place of methods of `Call` in every call of an engine."""
    engine.prepared.__class__, engine.prepared.answers = _Answering, answers  # type: ignore[assignment, attr-defined]


def layout_of_parents(parent: np.ndarray) -> PackedLayout:
    """Layout of a forest given by its parents in pre-order, nothing predicted."""
    count, before = len(parent), parent.tolist()
    depth, ends = [0] * count, list(range(1, count + 1))
    for token in range(count):
        if before[token] >= 0:
            depth[token] = depth[before[token]] + 1
    for token in range(count - 1, -1, -1):
        if before[token] >= 0:
            ends[before[token]] = max(ends[before[token]], ends[token])
    none = np.zeros(0, np.int64)
    return PackedLayout(
        input_ids=np.zeros(count, np.int64),
        positions=np.array(depth, np.int64),
        parent=parent,
        ends=np.array(ends, np.int64),
        tree_index=np.arange(count),
        edge_rows=none,
        edge_targets=none,
        edge_tokens=none,
    )


def nested_forks(count: int) -> PackedLayout:
    """A chain of `count` tokens with a leaf of one token at each but the last."""
    return layout_of_parents(np.concatenate([np.arange(-1, count - 1), np.arange(count - 2, -1, -1)]))


def star(leaves: int, size: int) -> PackedLayout:
    """One token with so many leaves of `size` tokens."""
    parent = np.arange(-1, leaves * size)
    parent[1::size] = 0
    return layout_of_parents(parent)


Keep = Literal["none", "all", "mixed"]
"""Which inner parts are kept; mixed: every second one."""


def uniform(layout: PackedLayout, chunk: int, keep: Keep = "none") -> Plan:
    """Few parts of at most so many tokens; how many are alive does not matter."""
    cutter = _Cutter(layout, chunk, chunk, 0)
    return _kept(layout, cutter.plan(np.full(len(cutter.region_size), chunk), recompute=True).part_of, keep)


def one_segment_per_part(layout: PackedLayout, keep: Keep = "none") -> Plan:
    """Every run without a fork is a part."""
    length = np.diff(layout.segment_start)
    return _kept(layout, np.repeat(np.arange(len(length)), length), keep)


def _kept(layout: PackedLayout, part_of: np.ndarray, keep: Keep) -> Plan:
    number = np.arange(int(part_of.max(initial=-1)) + 1)
    return Plan.of_parts(layout, part_of, {"none": number < 0, "all": number >= 0, "mixed": number % 2 == 0}[keep])


@dataclass
class LinearPrices:
    """Seconds, in those of a token, and bytes that are linear in what they count."""

    part: float = 44.0
    """Price of a pass with graph."""
    prefill: float = 14.0
    """Price of a pass without graph."""
    again: float = 0.35
    """Price of a recomputed token."""
    token_bytes: float = 1000.0
    plans: int = 0
    """How many it was asked about."""
    speeds, device, hiding_tokens = SimpleNamespace(source=""), "cpu", 0

    def seconds(self, plan: Plan) -> float:
        self.plans += 1
        return float(sum(self.seconds_by(plan).values()))

    def seconds_by(self, plan: Plan) -> dict[str, float]:
        without = plan.num_prefills
        return {
            "layers": float(plan.layout.num_tokens),
            "recomputation": self.again * plan.recomputed_tokens,
            "bytes": 0.0,
            "passes": self.part * plan.num_parts + self.prefill * without,
        }

    def peak_bytes(self, plan: Plan) -> float:
        return float(sum(self.bytes_by(plan).values()))

    def bytes_by(self, plan: Plan) -> dict[str, float]:
        return {"graphs": self.token_bytes * plan.peak_tokens, "KV cache": 50.0 * plan.cached_tokens}


def check_plan(plan: Plan) -> None:
    """Check what must hold for every plan, recomputed from its parts token by token."""
    layout, parts = plan.layout, plan.num_parts
    assert sorted(set(plan.part_of.tolist())) == list(range(parts))
    is_inner = np.zeros(parts, bool)
    exported = np.zeros(layout.num_tokens, bool)
    for token, before in enumerate(layout.parent.tolist()):
        own = plan.part_of[token]
        other = plan.part_of[before] if before >= 0 else -1
        if other == own:
            continue
        assert plan.attach[own] == before, "the pieces of a part continue one token"
        assert plan.parent[own] == other
        assert other < own, "a part stands after the one it continues"
        if before >= 0:
            is_inner[other] = True
        while before >= 0 and plan.part_of[before] == other:
            exported[before] = True
            before = layout.parent[before]
    assert (exported == plan.exported).all()
    assert (plan.is_inner == is_inner).all()
    assert not plan.kept[~is_inner].any()
    assert ((plan.prefill >= 0) == (is_inner & ~plan.kept)).all(), (
        "parts that are recomputed, and no others, are prefilled"
    )
    for part in range(parts):
        alive, above = plan.sizes[part], plan.parent[part]
        while above >= 0:
            alive += plan.sizes[above] if plan.kept[above] else 0
            above = plan.parent[above]
        assert alive == plan.alive[part]


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


def on_plan(make_plan: Callable[[PackedLayout], Plan]) -> type[TreeEngine]:
    """An engine whose plan of a layout is what a function says; `plans` lists them."""

    class OnPlan(TreeEngine):
        plans: list[Plan] = []  # noqa: RUF012

        def plan_of(self, call: Call, layout: PackedLayout) -> Plan:
            self.plans.append(make_plan(layout))
            return self.plans[-1]

        def _faster(self, call: Call, tree: TokenTree, plan: Plan) -> tuple[TokenTree, Plan]:
            return tree, plan  # else rows without sharing could take its place, and the model is counted for that

    return OnPlan


def planned(shape: str, keep: Keep) -> type[TreeEngine]:
    """An engine whose plans have one shape, whatever a budget would choose."""
    return on_plan(lambda layout: SHAPES[shape](layout, keep))
