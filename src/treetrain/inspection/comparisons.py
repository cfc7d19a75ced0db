"""How the speed-up of a file changes with batch size, row order, view and chat template."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.planning.cost import ModelCounts
from treetrain.tree.assemble import Int64s
from treetrain.tree.attention_range import pairs_of_rows
from treetrain.tree.build import build_tree
from treetrain.tree.stats import ideal_speedup, linear_work, needed_tokens, tree_work
from treetrain.tree.token_tree import TokenTree

SAMPLED = 4_000_000
"""From this many flat tokens on, sharing in batches is estimated from a sample of batches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSharing:
    """Sharing within batches, for one batch size and order of rows."""

    order: str
    """"file": as in the file; "shuffled": at random; "grouped": rows that share a prefix together."""
    size: int
    """Rows of a batch."""
    batches: int
    measured: int
    """Batches that were measured, drawn at random."""
    token_speedup: float
    flop_speedup: float


def sharing_in_batches(
    rows: Sequence[Trajectory], tree: TokenTree, counts: ModelCounts, size: int
) -> tuple[BatchSharing, ...]:
    """Measure sharing within batches of `size` rows, for three orders of the rows.

    Args:
        rows: K rows.
        tree: all of them as one batch.
        counts: the model that FLOPs are counted for.
        size: rows of a batch: those of an optimizer step on one process, gradient accumulation included.

    Returns:
        One entry for each order; none if all rows fit one batch.
    """
    if len(rows) <= size:
        return ()
    drawn = np.random.default_rng(0)
    orders = {
        "grouped": np.argsort(tree.trajectory_last, kind="stable"),  # depth-first: neighbours share the most
        "file": np.arange(len(rows)),
        "shuffled": drawn.permutation(len(rows)),
    }
    found = []
    for name, order in orders.items():
        batches = np.split(order, range(size, len(rows), size))
        picked, tokens = [], 0
        for number in drawn.permutation(len(batches)).tolist():
            picked.append(batches[number])
            tokens += int(tree.trajectory_length[batches[number]].sum())
            if tokens >= SAMPLED:
                break
        apart = np.repeat(np.arange(len(picked)), [len(batch) for batch in picked])
        forest = build_tree([rows[number] for number in np.concatenate(picked).tolist()], apart=apart)
        found.append(
            BatchSharing(
                order=name,
                size=size,
                batches=len(batches),
                measured=len(picked),
                token_speedup=forest.num_flat_tokens / max(forest.num_tokens, 1),
                flop_speedup=ideal_speedup(forest, counts),
            )
        )
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ViewCost:
    """The cost of training the same conversations in one view with one chat template."""

    view: str
    """"calls" or "transcript"."""
    template: str
    """"own": the tokenizer's or the one given; "chatml": the built-in one, which keeps prefixes."""
    rows: int
    flat: int
    unique: int
    trained: int
    """Trained tokens, summed over the rows."""
    linear_flops: float
    """FLOPs of a step with every row by itself."""
    tree_flops: float
    """FLOPs of a step as a tree."""

    @property
    def flop_speedup(self) -> float:
        """`linear_flops` / `tree_flops`."""
        return self.linear_flops / self.tree_flops if self.tree_flops else 1.0


def view_cost(view: str, template: str, rows: Sequence[Trajectory], counts: ModelCounts) -> ViewCost:
    """Count what rows cost by themselves and as a tree."""
    tree = build_tree(rows)
    uses, _ = tree.trained_edges()
    return ViewCost(
        view=view,
        template=template,
        rows=len(rows),
        flat=tree.num_flat_tokens,
        unique=tree.num_tokens,
        trained=int(uses.sum()),
        linear_flops=counts.flops(*linear_work(tree, counts.attention_ranges)),
        tree_flops=counts.flops(*tree_work(tree, counts.attention_ranges)),
    )


def compare_views(
    read: Callable[[str, str], Sequence[Trajectory]], templates: Sequence[str], counts: ModelCounts
) -> tuple[ViewCost, ...]:
    """Compare both views of conversations, with each of these chat templates.

    A view that a template cannot render is left out.

    Args:
        read: returns the rows for a view ("calls", "transcript") and a template.
        templates: "own", "chatml".
        counts: the model that FLOPs are counted for.
    """
    found = []
    for view in ("calls", "transcript"):
        for template in templates:
            try:
                found.append(view_cost(view, template, read(view, template), counts))
            except DataError:
                continue
    return tuple(found)


def transcripts_speedup(tree: TokenTree, counts: ModelCounts) -> float | None:
    """FLOPs of training only the rows that no other row extends / FLOPs of the tree; None if no row extends another.

    A call that a later call extends is a prefix of the later call's row. So one row per leaf of the tree, with the
    trained tokens of all rows on its path, trains the same tokens: these rows are the transcripts. The result is
    the speed-up for users who train transcripts already.
    """
    last = np.unique(tree.trajectory_last[tree.trajectory_last >= 0])
    leaves = last[tree.end[last] == last + 1]
    flops = counts.flops(*tree_work(tree, counts.attention_ranges))
    if len(leaves) == len(last) or not flops:
        return None
    uses, _ = tree.trained_edges()
    length = _marked_above(tree, needed_tokens(tree, np.flatnonzero(uses)))[leaves]
    scored = int(_marked_above(tree, uses > 0)[leaves].sum())
    return counts.flops(int(length.sum()), pairs_of_rows(length, counts.attention_ranges), scored) / flops


def _marked_above(tree: TokenTree, marked: NDArray[np.bool_]) -> Int64s:
    """int64 [N]: number of marked tokens from the root to each token, itself included."""
    at = np.flatnonzero(marked)
    steps = np.zeros(tree.num_tokens + 1, np.int64)
    steps[at] += 1
    steps -= np.bincount(tree.end[at], minlength=len(steps))
    return np.cumsum(steps)[:-1]
