"""The plans of a step over several ranks: each rank's own, or under FSDP the ones whose passes line up."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from treetrain.engine.batch import Batch
from treetrain.engine.begin import Begun
from treetrain.engine.packed import wide_dtype
from treetrain.engine.planning import AMPLE, formula_cost
from treetrain.engine.ranks import Ranks, check_same
from treetrain.engine.router_balance import RouterBalance
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
    engine: Any,
    planned: Callable[[], tuple[Begun, Plan]],
    aligned: Alignment | None,
    *,
    sync: bool,
    balance: RouterBalance | None = None,
) -> tuple[Begun, Plan]:
    """What this rank runs, and when sharded gradients are reduced; a collective call.

    Args:
        planned: finds what it would run by itself.
        aligned: None where the ranks' passes have nothing to do with one another.
        sync: whether the step ends with this call.
        balance: of the routers, as the caller gave it.

    Raises:
        RanksDisagree: another rank ends the step elsewhere, or divides it by another normaliser.
    """

    ranks: Ranks = engine.ranks

    def ways() -> tuple[tuple[Begun, list[Way]], Any]:
        begun, plan = planned()
        own = [Way(plan, begun.batch.tree, "")] if aligned is None else _ways(begun, plan, aligned)
        offers = offers_of(own) if aligned else []
        return (begun, own), (
            _same(ranks, begun, sync, balance),
            [_reduces_once(engine, way.plan) for way in own],
            offers,
        )

    (begun, own), found = ranks.agree("planning", ways)
    for name in found[0][0]:
        check_same(name, [same[name] for same, *_ in found])
    told = [(room, offers) for _, room, offers in found]
    chosen = choose([offers for _, offers in told]) if aligned else [0] * ranks.size
    way = own[chosen[ranks.rank]]
    if isinstance(begun.batch, Batch) and way.tree is not begun.batch.tree:
        begun = begun._replace(batch=Batch.of(way.tree, weighted=begun.batch.weighted))
    at_last = all(room[number] for (room, _), number in zip(told, chosen))
    return begun._replace(reduces="never" if not sync else "last" if at_last else "each"), way.plan


def _same(ranks: Ranks, begun: Begun, sync: bool, balance: RouterBalance | None) -> dict[str, Any]:
    """What the ranks of a step must not differ in, now that it is known."""
    if ranks.alone:
        return {}
    return {
        "sync": sync,
        "the normaliser that the loss gives": begun.normaliser * ranks.size,
        "the balance of the routers": None if balance is None else (balance.tokens, balance.choices.tolist()),
    }


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
