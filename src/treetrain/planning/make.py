"""Find a plan for a budget in tokens or bytes, for one process or for each of several ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from treetrain.planning.balance import Balancer, Dispatch
from treetrain.planning.budget import Bytes, parse_budget, within_bytes
from treetrain.planning.collective_order import candidates, choose, offers_of
from treetrain.planning.cost import ModelShape
from treetrain.planning.explain import Purpose
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree

PART_TOKENS = {"cpu": 8192, "cuda": 32_768}
"""Size that parts need not exceed if no budget binds, by kind of device: measured on a CPU, an estimate for a GPU.
Where memory is short, parts are smaller."""


def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: CostModel | ModelShape | str,
    *,
    budget: Any = None,
    free_bytes: int | None = None,
) -> Plan:
    """Find a fast plan for a batch within a budget; `plan.explain()` describes it.

    Args:
        rows: the batch: K rows (trajectories, or lists or arrays of token ids), their tree, or a packed layout. For
            rows and trees, the plan covers the tokens that their trained predictions need.
        cost: a cost model, or a model's shape or its name ("qwen3-8b", see `ModelShape.named`) for a cost model by
            formula.
        budget: tokens whose graph may be alive at once (int), or bytes above model, gradients and optimiser state
            ("8GiB"; see `parse_budget`). None: parts of about PART_TOKENS if that needs no recomputation, bounded only
            by `free_bytes`.
        free_bytes: free bytes of the device, used without a budget.

    Raises:
        ValueError: an invalid or too small budget, or an unknown shape name.
        DataError: invalid rows.
    """
    cost, budget = CostModel.of(cost), parse_budget(budget)
    layout = rows if isinstance(rows, PackedLayout) else _trained(as_tree(rows))
    if isinstance(budget, Bytes):
        plan, tokens = within_bytes(layout, cost, budget)
    elif budget is not None:
        plan, tokens = partition(layout, budget, cost.seconds), budget
    else:
        size = max(PART_TOKENS[cost.device], cost.hiding_tokens)
        plan, tokens = partition(layout, None, cost.seconds, part_tokens=size), None
        if free_bytes is not None and cost.peak_bytes(plan) > free_bytes:
            plan, tokens = within_bytes(layout, cost, Bytes(free_bytes))
    return replace(plan, made_for=Purpose(cost=cost, budget=budget, tokens=tokens))


class RankPlans(NamedTuple):
    """A batch divided over ranks, and the plan of each rank for a tree of its rows in the order of their numbers."""

    dispatch: Dispatch
    plans: list[Plan]
    """Without parts where a rank computes nothing."""


def plan_ranks(
    tree: TokenTree,
    cost: CostModel,
    ranks: int,
    *,
    budget: Any = None,
    free_bytes: int | None = None,
    aligned: bool = False,
    balancer: Balancer | None = None,
) -> RankPlans:
    """Divide a batch over ranks and plan each, within the same budget or the same free bytes.

    Args:
        aligned: whether the ranks run every pass together, as under FSDP; see `collective_order`. A rank's rows may
            then be cut into runs that share nothing, if that is faster.
        balancer: that of the tree, if it has been made.

    Raises:
        ValueError: an invalid number of ranks, or a budget that is invalid or too small for some rank.
    """
    dispatch, plans = (balancer or Balancer(tree, cost)).over(ranks), []
    trees = [build_tree([tree.trajectories[number] for number in own.tolist()]) for own in dispatch.trajectories]
    for rank, own in enumerate(trees):
        try:
            plans.append(make_plan(own, cost, budget=budget, free_bytes=free_bytes))
        except ValueError as error:
            raise ValueError(f"rank {rank} of {ranks}: {error}") from error
    if aligned:
        offered = [candidates(own, plan, _trained, free_bytes=free_bytes) for own, plan in zip(trees, plans)]
        chosen = choose([offers_of(own) for own in offered])
        plans = [own[number].plan for own, number in zip(offered, chosen)]
    return RankPlans(dispatch, plans)


def _trained(tree: TokenTree) -> PackedLayout:
    """The layout of the tokens that training computes."""
    return pack(tree, tree.trained_edges()[0] > 0)
