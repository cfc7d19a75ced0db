"""How much faster a tree could be at best: the ratio of what rows and tree compute."""

from collections.abc import Sequence

from treetrain.planning.cost import ModelCounts, ModelShape
from treetrain.planning.plan import Plan, heights
from treetrain.tree.build import Row, as_tree
from treetrain.tree.stats import TreeStats, flop_speedup, tree_stats
from treetrain.tree.token_tree import TokenTree


def stats(rows: Sequence[Row] | TokenTree, shape: ModelCounts | ModelShape | str | None = None) -> TreeStats:
    """How much a batch shares, where, and what that is worth at best.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        shape: a model's counts or shape, or the name of one ("qwen3-8b"), for the speed-ups in FLOPs; None leaves
            them out.

    Returns:
        Flat and unique tokens, overlap, forks, repeats, trained tokens and, with a shape, the FLOP-ideal speed-up.

    Raises:
        DataError: rows that are none.
        ValueError: no shape's name.
    """
    return tree_stats(as_tree(rows), ModelShape.of(shape) if isinstance(shape, str) else shape)


def ideal_speedup(tree: TokenTree, shape: ModelCounts | ModelShape, *, dedup: bool = False) -> float:
    """FLOPs of every trajectory by itself over FLOPs of the tree, for one training step; 1 if nothing is trained.

    Both sides stop computing behind the token that predicts the last trained one, and run the LM head only where
    a prediction is trained: every such prediction of a row, every such hidden state of the tree.

    Args:
        tree: the batch.
        shape: the model's counts or shape.
        dedup: compare with a baseline that computes exact repeats once.
    """
    return flop_speedup(tree, shape, dedup=dedup)


def budget_share(plan: Plan, counts: ModelCounts, budget: int) -> float:
    """FLOPs of a tree's step over those with the least recomputation that a budget in tokens allows: at most 1."""
    layout = plan.layout
    again = layout.positions[heights(layout) > budget]
    once = counts.flops(layout.num_tokens, counts.pairs_at(layout.positions), len(layout.rows))
    return once / (once + counts.flops(len(again), counts.pairs_at(again), 0) / 3) if once else 1.0
