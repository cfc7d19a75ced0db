"""Whether sharing pays: a batch that shares next to nothing is run row by row where that is predicted to be faster."""

from collections.abc import Callable

from treetrain.planning.make import PART_TOKENS
from treetrain.planning.partition import whole_trees
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack
from treetrain.tree.stats import linear_work
from treetrain.tree.token_tree import TokenTree

WORTH_A_LOOK = 1.05
"""Rows that compute more than so many times the tree's tokens are not looked at: a pass costs less than that."""


def rows_if_faster(
    tree: TokenTree, plan: Plan, budget: int | None, seconds: Callable[[Plan], float]
) -> tuple[TokenTree, Plan] | None:
    """The batch with nothing shared and the plan of what it trains, if that is predicted to be faster; else None.

    A shared prefix of a token or two may cost a pass of its own, which takes longer than to compute it in every row.

    Args:
        plan: of the tree.
        budget: in tokens; rows that do not fit into it whole are not run row by row.
        seconds: predicted time of a plan.
    """
    if plan.num_parts < 2 or linear_work(tree).tokens > WORTH_A_LOOK * plan.layout.num_tokens:
        return None
    rows = build_tree(list(tree.trajectories), merge=False)
    layout = pack(rows, rows.trained_edges()[0] > 0)
    if budget is not None and int(layout.positions.max(initial=0)) >= budget:
        return None
    alone = whole_trees(layout, min(PART_TOKENS, budget or PART_TOKENS))
    return (rows, alone) if seconds(alone) < seconds(plan) else None
