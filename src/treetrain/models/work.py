"""Statistics of a tree: shared tokens, where they are, and the speed-ups they allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool

from treetrain.core.planning.cost import ModelCounts
from treetrain.core.tree.layout import FULL, AttentionRange, Pairs, needed_tokens, pairs_at
from treetrain.core.tree.token_tree import Int64s, Row, TokenTree, as_tree, trajectories_through
from treetrain.core.tree.trajectory import Trajectory
from treetrain.shapes import ModelShape


class FlopCounter(Protocol):
    """A model's FLOP counts, for the FLOP speed-ups; `core.planning.cost.ModelCounts` implements it."""

    @property
    def attention_ranges(self) -> tuple[AttentionRange, ...]:
        """How far the layers see, each once."""
        ...

    def flops(self, tokens: int, pairs: Pairs, head_rows: int) -> float:
        """FLOPs of a training step with these numbers of tokens, visible (query, key) pairs and LM-head rows."""
        ...


class Work(NamedTuple):
    """The work of a step, independent of the model."""

    tokens: int
    """Tokens through the layers."""
    pairs: Pairs
    """Visible (query, key) pairs per head and layer."""
    head_rows: int
    """Hidden states through the LM head."""


@dataclass(frozen=True, kw_only=True)
class TreeStats:
    """Statistics of a batch. "Context" tokens are not trained."""

    trajectories: int
    trees: int
    """Number of roots; trajectories of different trees share nothing."""
    flat: int
    """Tokens summed over the trajectories."""
    unique: int
    """Tokens in the tree."""
    overlap: float
    """1 - unique / flat; 0 for an empty batch."""
    token_speedup: float
    """flat / unique; 1 for an empty batch."""
    flop_speedup: float | None
    """FLOPs of all rows computed separately / FLOPs of the tree, both trimmed after the last trained token."""
    longest_path: int
    segments: int
    forks: int
    """Tokens with more than one child."""
    max_out_degree: int
    """Largest number of children of one token."""
    leaves: int
    duplicates: int
    """Non-empty trajectories with the same tokens as an earlier one."""
    trained_flat: int
    """Trained predictions, summed over the trajectories."""
    trained_unique: int
    """Tree tokens whose prediction is trained by some trajectory."""
    saved_trained: int
    """Flat tokens that sharing saves, at trained tokens; saved_trained + saved_context = flat - unique."""
    saved_context: int
    """Flat tokens that sharing saves, at context tokens."""


def tree_stats(tree: TokenTree, shape: FlopCounter | None = None) -> TreeStats:
    """Compute a tree's statistics; `treetrain.stats` also accepts rows and names of shapes.

    Args:
        tree: the batch.
        shape: the model's counts (`ModelCounts`, or anything that counts FLOPs); None leaves the FLOP speed-ups out.
    """
    flat, unique = tree.num_flat_tokens, tree.num_tokens
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=unique)
    forks = children > 1
    uses, _ = tree.trained_edges()
    trained = uses > 0
    saved = trajectories_through(tree) - 1
    return TreeStats(
        trajectories=tree.num_trajectories,
        trees=int((tree.parent < 0).sum()),
        flat=flat,
        unique=unique,
        overlap=1 - unique / flat if flat else 0.0,
        token_speedup=flat / unique if unique else 1.0,
        flop_speedup=None if shape is None else ideal_speedup(tree, shape),
        longest_path=int(tree.trajectory_length.max(initial=0)),
        segments=tree.num_segments,
        forks=int(forks.sum()),
        max_out_degree=int(children.max(initial=0)),
        leaves=int((children == 0).sum()),
        duplicates=int((tree.trajectory_last >= 0).sum() - distinct_rows(tree).sum()),
        trained_flat=int(uses.sum()),
        trained_unique=int(trained.sum()),
        saved_trained=int(saved[trained].sum()),
        saved_context=int(saved[~trained].sum()),
    )


def stats(rows: Sequence[Row] | TokenTree, shape: ModelCounts | ModelShape | str | None = None) -> TreeStats:
    """Compute how many tokens a batch shares, where, and the ideal speed-up.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        shape: a model's counts or shape, or a shape's name ("qwen3-8b"), for the speed-ups in FLOPs; None leaves
            them out.

    Raises:
        DataError: invalid rows.
        ValueError: an unknown shape name.
    """
    shape = ModelShape.of(shape) if isinstance(shape, str) else shape
    return tree_stats(as_tree(rows), shape.counts() if isinstance(shape, ModelShape) else shape)


def ideal_speedup(tree: TokenTree, shape: FlopCounter) -> float:
    """FLOPs of the linear baseline over FLOPs of the tree; 1 if nothing is trained.

    Both sides stop after the token that predicts the last trained one. Both run the LM head only for trained
    predictions: the baseline once per prediction of a row, the tree once per hidden state.

    Args:
        tree: the batch.
        shape: counts a step's FLOPs on the model.
    """
    ranges = shape.attention_ranges
    ours = shape.flops(*tree_work(tree, ranges))
    return shape.flops(*linear_work(tree, ranges)) / ours if ours else 1.0


def tree_work(
    tree: TokenTree, ranges: Sequence[AttentionRange] = (FULL,), among: Bool[np.ndarray, " N"] | None = None
) -> Work:
    """The work of the tree in one packed pass: each token that a trained prediction depends on, once.

    Args:
        tree: the batch.
        ranges: how far the model's layers see, each once.
        among: count only these tokens. None counts all.
    """
    uses, _ = tree.trained_edges()
    edges = np.flatnonzero(uses)
    kept = needed_tokens(tree, edges)
    predicts = np.zeros(tree.num_tokens, bool)  # much faster than np.unique
    predicts[tree.parent[edges]] = True
    if among is not None:
        kept, predicts = kept & among, predicts & among
    pairs = pairs_at(tree.depth[kept].astype(np.int64), ranges)
    return Work(int(kept.sum()), pairs, int(predicts.sum()))


def linear_work(
    tree: TokenTree, ranges: Sequence[AttentionRange] = (FULL,), rows: Bool[np.ndarray, " K"] | None = None
) -> Work:
    """The work of the linear baseline: every trajectory up to the token that predicts its last trained token.

    Args:
        tree: the batch.
        ranges: how far the model's layers see, each once.
        rows: count only these trajectories. None counts all.
    """
    uses, length = tree.trained_edges(rows)
    return Work(int(length.sum()), pairs_of_rows(length, ranges), int(uses.sum()))


def distinct_rows(tree: TokenTree) -> Bool[np.ndarray, " K"]:
    """Mark one non-empty trajectory per distinct token sequence: the one trained furthest."""
    _, deepest = tree.trained_edges()
    order = np.lexsort((-deepest, tree.trajectory_last))
    last = tree.trajectory_last[order]
    mark = np.zeros(tree.num_trajectories, bool)
    mark[order] = (np.diff(last, prepend=-1) != 0) & (last >= 0)
    return mark


def cheapest_rows(tree: TokenTree) -> list[Trajectory]:
    """Find the rows that train everything at the least cost without a tree: no other row extends or repeats them.

    A row that another one extends is a prefix of it, so its trained tokens can be trained there: calls that extend each
    other become transcripts. Each row's loss weights are added to one row that contains it, so a sum of weighted
    log-probabilities stays the same. Other facts are taken from the longest row.
    """
    given = np.flatnonzero(tree.trajectory_last >= 0)
    last, where = np.unique(tree.trajectory_last[given], return_inverse=True)
    kept = np.append(last[1:], tree.num_tokens) >= tree.end[last]
    rows = tree.trajectories
    if kept.all() and len(last) == len(given):
        return [rows[number] for number in given.tolist()]
    # In pre-order, the first kept row at or after a row's last token lies below that token.
    target = np.searchsorted(np.flatnonzero(kept), np.arange(len(last)))[where]
    members: list[list[int]] = [[] for _ in range(int(kept.sum()))]
    for number, at in zip(given.tolist(), target.tolist()):
        members[at].append(number)
    found = []
    for numbers in members:
        if len(numbers) == 1:
            found.append(rows[numbers[0]])
            continue
        longest = max(numbers, key=lambda number: tree.trajectory_length[number])
        weights = rows[longest].weights
        for number in numbers:
            if number != longest:
                weights[: tree.trajectory_length[number]] += rows[number].weights
        found.append(rows[longest].replace(loss_weights=weights))
    return found


def pairs_of_rows(lengths: Int64s, ranges: Sequence[AttentionRange] = (FULL,)) -> Pairs:
    """Count the visible pairs of separate rows of these lengths."""
    # A row's pairs depend on its length alone, so a running sum over depths is enough.
    depth = np.arange(int(lengths.max(initial=0)))
    return {each: int(np.append(0, np.cumsum(each.seen(depth)))[lengths].sum()) for each in ranges}
