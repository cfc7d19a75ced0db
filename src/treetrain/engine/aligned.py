"""The plans of a step over several ranks: each rank's own, or under FSDP the ones whose passes line up."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from treetrain.engine.batch import Batch
from treetrain.engine.begin import Begun
from treetrain.engine.packed import wide_dtype
from treetrain.engine.planning import AMPLE, formula_cost
from treetrain.engine.ranks import Ranks
from treetrain.plan.align import Way, choose, offers_of, ways_of
from treetrain.plan.budget import Bytes
from treetrain.plan.plan import Plan
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree


class Alignment(NamedTuple):
    """What the ways of a rank depend on, where every pass is one of all ranks."""

    free_bytes: Callable[[], int | None] | None
    """Of the device; None where there is a budget."""
    apart: bool
    """Whether tokens may be computed twice: not where all tokens of a step are counted."""


def agreed_plan(
    engine: Any, planned: Callable[[], tuple[Begun, Plan]], aligned: Alignment | None, *, sync: bool
) -> tuple[Begun, Plan]:
    """What this rank runs, and when sharded gradients are reduced; a collective call.

    Args:
        planned: finds what it would run by itself.
        aligned: None where the ranks' passes have nothing to do with one another.
        sync: whether the step ends with this call.
    """

    ranks: Ranks = engine.ranks

    def ways() -> tuple[tuple[Begun, list[Way]], Any]:
        begun, plan = planned()
        own = [Way(plan, begun.batch.tree, "")] if aligned is None else _ways(begun, plan, aligned)
        return (begun, own), ([_reduces_once(engine, way.plan) for way in own], offers_of(own) if aligned else [])

    (begun, own), told = ranks.agree("planning", ways)
    chosen = choose([offers for _, offers in told]) if aligned else [0] * ranks.size
    way = own[chosen[ranks.rank]]
    if isinstance(begun.batch, Batch) and way.tree is not begun.batch.tree:
        begun = begun._replace(batch=Batch.of(way.tree, weighted=begun.batch.weighted))
    at_last = all(room[number] for (room, _), number in zip(told, chosen))
    return begun._replace(reduces="never" if not sync else "last" if at_last else "each"), way.plan


def _reduces_once(engine: Any, plan: Plan) -> bool:
    """Whether there is room for all gradients as a whole until the last backward."""
    if not engine.in_lockstep or engine.reduce != "auto":
        return engine.reduce == "step"
    cost = formula_cost(engine.model)
    if cost is None:
        return False
    whole = sum(p.numel() for p in engine.parameters if p.requires_grad) * wide_dtype(engine.model).itemsize
    room = engine.budget.count if isinstance(engine.budget, Bytes) else engine.free_bytes()
    return room is not None and AMPLE * (cost.peak_bytes(plan) + whole) < room


def _ways(begun: Begun, plan: Plan, aligned: Alignment) -> list[Way]:
    """How a rank's rows can be run; the plan given is the first."""
    batch, free = begun.batch, aligned.free_bytes() if aligned.free_bytes else None
    weighted = not isinstance(batch, Batch) or batch.weighted
    return ways_of(
        batch.tree,
        plan,
        partial(_laid_out, weighted=weighted),
        whole_rows=not weighted,
        # A tree of nodes stays as it is: its rows are not to be written out.
        apart=aligned.apart and isinstance(batch, Batch),
        free_bytes=None if free is None else free / AMPLE,
    )


def _laid_out(tree: TokenTree, *, weighted: bool) -> PackedLayout:
    """As `Batch.of` does."""
    return pack(tree, tree.trained_edges()[0] > 0) if weighted else pack(tree)
