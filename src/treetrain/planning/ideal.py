"""The ideal speed-up of a tree: the ratio of the FLOPs of rows and of the tree."""

from collections.abc import Sequence

from treetrain.planning.cost import ModelCounts, ModelShape
from treetrain.planning.plan import Plan, heights
from treetrain.tree.build import Row, as_tree
from treetrain.tree.stats import TreeStats, flop_speedup, tree_stats
from treetrain.tree.token_tree import TokenTree


def stats(rows: Sequence[Row] | TokenTree, shape: ModelCounts | ModelShape | str | None = None) -> TreeStats:
    """Compute how many tokens a batch shares, where, and the ideal speed-up.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        shape: a model's counts or shape, or a shape's name ("qwen3-8b"), for the speed-ups in FLOPs; None leaves
            them out.

    Returns:
        Flat and unique tokens, overlap, forks, duplicates, trained tokens and, with a shape, the ideal speed-up.

    Raises:
        DataError: invalid rows.
        ValueError: an unknown shape name.
    """
    return tree_stats(as_tree(rows), ModelShape.of(shape) if isinstance(shape, str) else shape)


def ideal_speedup(tree: TokenTree, shape: ModelCounts | ModelShape, *, dedup: bool = False) -> float:
    """FLOPs of the linear baseline over FLOPs of the tree, for one training step; 1 if nothing is trained.

    Both sides stop after the token that predicts the last trained one. Both run the LM head only for trained
    predictions: the baseline once per prediction of a row, the tree once per hidden state.

    Args:
        tree: the batch.
        shape: the model's counts or shape.
        dedup: compare with a baseline that computes exact duplicates once.
    """
    return flop_speedup(tree, shape, dedup=dedup)


def budget_share(plan: Plan, counts: ModelCounts, budget: int) -> float:
    """FLOPs of a step without recomputation over FLOPs with the least that a budget in tokens allows; at most 1."""
    layout = plan.layout
    again = layout.positions[heights(layout) > budget]
    once = counts.flops(layout.num_tokens, counts.pairs_at(layout.positions), len(layout.rows))
    return once / (once + counts.flops(len(again), counts.pairs_at(again), 0) / 3) if once else 1.0
