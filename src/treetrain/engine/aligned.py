"""The plans of a step over several ranks: each rank's own, or under FSDP the ones whose passes line up."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from treetrain.engine.batch import Batch
from treetrain.engine.begin import Begun
from treetrain.engine.packed import wide_dtype
from treetrain.engine.planning import AMPLE, formula_cost
from treetrain.engine.ranks import Ranks, check_same
from treetrain.engine.routing import RouterBalance
from treetrain.planning.budget import Bytes
from treetrain.planning.collective_order import Candidate, candidates, choose, offers_of
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree


def agreed_plan(
    engine: Any,
    planned: Callable[[], tuple[Begun, Plan]],
    *,
    apart: bool,
    sync: bool,
    balance: RouterBalance | None = None,
) -> tuple[Begun, Plan]:
    """What this rank runs, and when sharded gradients are reduced; a collective call.

    Args:
        planned: finds what it would run by itself.
        apart: whether tokens may be computed twice, so that the ranks' passes line up.
        sync: whether the step ends with this call.
        balance: of the routers, as the caller gave it.

    Raises:
        RanksDisagree: another rank ends the step elsewhere, or divides it by another normaliser.
    """
    ranks: Ranks = engine.ranks
    aligned: bool = engine.in_lockstep

    def offered() -> tuple[tuple[Begun, list[Candidate]], Any]:
        begun, plan = planned()
        own = _ways(engine, begun, plan, apart=apart) if aligned else [Candidate(plan, begun.batch.tree, "")]
        offers = offers_of(own) if aligned else []
        return (begun, own), (_same(ranks, begun, sync, balance), _have_room(engine, own), offers)

    (begun, own), found = ranks.agree("planning", offered)
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


def _have_room(engine: Any, ways: Sequence[Candidate]) -> list[bool]:
    """Of each way, whether there is room for all gradients as a whole until the last backward."""
    if not engine.in_lockstep or engine.reduce != "auto":
        return [engine.reduce == "step"] * len(ways)
    cost = formula_cost(engine.model)
    room = engine.budget.count if isinstance(engine.budget, Bytes) else engine.free_bytes()
    if cost is None or room is None:
        return [False] * len(ways)
    whole = sum(p.numel() for p in engine.parameters if p.requires_grad) * wide_dtype(engine.model).itemsize
    return [AMPLE * (cost.peak_bytes(way.plan) + whole) < room for way in ways]


def _ways(engine: Any, begun: Begun, plan: Plan, *, apart: bool) -> list[Candidate]:
    """How a rank's rows can be run; the plan given is the first."""
    batch, free = begun.batch, engine.free_bytes() if engine.budget is None else None
    weighted = not isinstance(batch, Batch) or batch.weighted
    return candidates(
        batch.tree,
        plan,
        partial(_laid_out, weighted=weighted),
        whole_rows=not weighted,
        # A tree of nodes stays as it is: its rows are not to be written out.
        apart=apart and isinstance(batch, Batch),
        free_bytes=None if free is None else free / AMPLE,
    )


def _laid_out(tree: TokenTree, *, weighted: bool) -> PackedLayout:
    """As `Batch.of` does."""
    return pack(tree, tree.trained_edges()[0] > 0) if weighted else pack(tree)
