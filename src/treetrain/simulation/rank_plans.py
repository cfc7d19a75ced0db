"""The plans of all ranks of a step, as the engine makes them."""

from typing import NamedTuple

from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.make import make_plan, trained_layout
from treetrain.core.planning.plan import Bytes, Plan
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.parallel.balance import Balancer, Dispatch
from treetrain.parallel.collective_order import candidates, choose, offers_of


class RankPlans(NamedTuple):
    """A batch divided over ranks, and the plan of each rank for a tree of its rows in the order of their numbers."""

    dispatch: Dispatch
    plans: list[Plan]
    """A rank that computes nothing has a plan without parts."""


def plan_ranks(
    tree: TokenTree,
    cost: CostModel,
    ranks: int,
    *,
    budget: int | str | Bytes | None = None,
    free_bytes: int | None = None,
    aligned: bool = False,
    balancer: Balancer | None = None,
) -> RankPlans:
    """Divide a batch over ranks and plan each, within the same budget or the same free bytes.

    Args:
        aligned: whether the ranks run every pass together, as under FSDP; see `collective_order`. A rank's rows may
            then be cut into ranges that share nothing, if that is faster.
        balancer: the tree's, if it has been made already.

    Raises:
        ValueError: an invalid number of ranks, or a budget that is invalid or too small for some rank.
    """
    dispatch, plans = (balancer or Balancer(tree, cost)).over(ranks), []
    merge = tree.num_tokens < tree.num_flat_tokens  # the linear baseline's rows stay apart on every rank
    trees = [
        build_tree([tree.trajectories[number] for number in own.tolist()], merge=merge) for own in dispatch.trajectories
    ]
    for rank, own in enumerate(trees):
        try:
            plans.append(make_plan(own, cost, budget=budget, free_bytes=free_bytes))
        except ValueError as error:
            raise ValueError(f"rank {rank} of {ranks}: {error}") from error
    if aligned:
        offered = [candidates(own, plan, trained_layout, free_bytes=free_bytes) for own, plan in zip(trees, plans)]
        chosen = choose([offers_of(own) for own in offered])
        plans = [own[number].plan for own, number in zip(offered, chosen)]
    return RankPlans(dispatch, plans)
