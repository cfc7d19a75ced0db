"""The report on the rows of a file: figures by group, batch size, row order, view and chat template, and a verdict.

The text, the JSON object and the page are made from it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.inspection.diagnosis import Diagnosis, diagnose
from treetrain.planning.cost import ModelCounts
from treetrain.planning.plan import Plan
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import build_tree
from treetrain.tree.layout import needed_tokens, pairs_of_rows
from treetrain.tree.stats import TreeStats, ideal_speedup, linear_work, tree_stats, tree_work
from treetrain.tree.token_tree import TokenTree

SAMPLED = 4_000_000
"""From this many flat tokens on, sharing in batches is estimated from a sample of batches."""
WORTH = 1.1
"""Ratio of FLOPs from which a change is worth making."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model that FLOPs are counted for."""

    counts: ModelCounts
    name: str
    assumed: bool
    """Whether it is the default, since none was named."""

    @property
    def words(self) -> str:
        """The name in messages."""
        return f"{self.name} (assumed; --model or --shape names another)" if self.assumed else self.name


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WithinGroups:
    """Sharing within groups of rows, summed over the groups."""

    count: int
    overlap: float
    token_speedup: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The sharing of a file's rows, and the causes that limit it."""

    files: tuple[str, ...] = ()
    format: str = "tokens"
    view: str | None
    """"calls" or "transcript"; None for token rows."""
    notes: tuple[str, ...] = ()
    tokenizer: Any
    """None if the rows are shown as token ids."""
    shape: Shape
    tree: TokenTree
    """The rows as one batch."""
    stats: TreeStats
    sampled: float = 1.0
    """Share of the groups in the files that the rows are; 1 for all."""
    groups: WithinGroups | None
    """None if no row has a group."""
    transcripts_speedup: float | None
    """FLOPs of training only the rows that no other row extends / FLOPs of the tree; None if no row extends another."""
    batches: tuple[BatchSharing, ...]
    """Sharing within batches: grouped, in file order, shuffled; empty if all rows are one batch."""
    views: tuple[ViewCost, ...] = ()
    """Conversations as calls and as transcripts, with their own template and one that keeps prefixes; else empty."""
    diagnosis: Diagnosis
    """Why the rows do not share more."""
    plan: Plan | None = None
    """The plan of `tree`, if one was asked for."""

    def verdict(self) -> str:
        """One line: whether to train these rows as a tree, what that gains, and what to change first."""
        whole = self.stats.flop_speedup or 1.0
        by_order = {one.order: one.flop_speedup for one in self.batches}
        here = by_order.get("grouped", whole)
        causes, repaired = self.diagnosis.causes, self.diagnosis.repaired_flop_speedup
        fix, worst = "", None
        if causes and repaired >= WORTH * whole:
            worst = max(causes, key=lambda lost: lost.tokens)
            others = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
            fix = (
                f"; fix first: {worst.title}{others} (then {repaired:.2f}x in place of {whole:.2f}x, all rows at once)"
            )
        model = f"on {self.shape.name} by FLOPs"
        if self.sampled < 1:
            fix += f" (measured on a sample of {self.sampled:.2%} of the groups)"
        if here < WORTH:
            return f"Train as a tree: {'not yet' if worst else 'no'}, {here:.2f}x {model}{fix}."
        said = f"Train as a tree: yes, {here:.2f}x {model}"
        if self.batches:
            shuffled = f", {by_order['shuffled']:.2f}x shuffled" if by_order["shuffled"] * WORTH < here else ""
            said += f" in batches of {self.batches[0].size} grouped by prefix{shuffled}"
        transcripts = self.over_transcripts()
        if transcripts is not None and transcripts * WORTH < whole:
            said += f" ({whole:.2f}x all rows at once; {transcripts:.2f}x against training whole conversations instead)"
        return f"{said}{fix}."

    def over_transcripts(self) -> float | None:
        """FLOPs of training the same conversations as transcripts, each by itself / FLOPs of the tree.

        None if the rows are no calls. It is exact if calls extend each other; else it is taken from `views`.
        """
        if self.transcripts_speedup is not None or self.view != "calls":
            return self.transcripts_speedup
        flops = {one.view: one for one in self.views if one.template == self.views[0].template}
        if len(flops) < 2 or not flops["calls"].tree_flops:
            return None
        return flops["transcript"].linear_flops / flops["calls"].tree_flops

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "files": list(self.files),
            "format": self.format,
            "view": self.view,
            "shape": {"name": self.shape.name, "assumed": self.shape.assumed},
            "file": dataclasses.asdict(self.stats),
            "sampled": self.sampled,
            "groups": None if self.groups is None else dataclasses.asdict(self.groups),
            "transcripts_speedup": self.transcripts_speedup,
            "batches": [dataclasses.asdict(one) for one in self.batches],
            "views": [dataclasses.asdict(one) | {"flop_speedup": one.flop_speedup} for one in self.views],
            "diagnosis": dataclasses.asdict(self.diagnosis) | {"explanation": self.diagnosis.explain()},
            "verdict": self.verdict(),
            "notes": list(self.notes),
            "plan": None if self.plan is None else self.plan.explanation(),
        }


def inspect_rows(
    rows: Sequence[Trajectory],
    shape: Shape,
    *,
    view: str | None = None,
    tokenizer: Any = None,
    batch_size: int = 8,
    stats: TreeStats | None = None,
) -> Inspection:
    """Measure what rows share.

    Args:
        rows: the rows; in the calls view each conversation's calls in order.
        shape: the model that FLOPs are counted for.
        view: "calls" or "transcript"; None for token rows.
        tokenizer: anything with `decode`; examples then show text instead of ids.
        batch_size: rows of a batch, for the sharing that is left in batches.
        stats: figures of a tree that was given as a tree, where `rows` are a sample of its trajectories.
    """
    tree = build_tree(rows)
    return Inspection(
        view=view,
        tokenizer=tokenizer,
        shape=shape,
        tree=tree,
        stats=stats or tree_stats(tree, shape.counts),
        groups=sharing_within_groups(rows),
        transcripts_speedup=transcripts_speedup(tree, shape.counts),
        batches=sharing_in_batches(rows, tree, shape.counts, batch_size),
        diagnosis=diagnose(rows, shape.counts, tokenizer, tree=tree),
    )


def sharing_within_groups(rows: Sequence[Trajectory]) -> WithinGroups | None:
    """Measure what the rows of each group share; None if no row has a group."""
    group = columns_of(rows).group
    named = np.flatnonzero(group >= 0)
    if not len(named):
        return None
    forest = build_tree([rows[number] for number in named.tolist()], apart=group[named])
    flat, unique = forest.num_flat_tokens, forest.num_tokens
    return WithinGroups(
        count=int(group.max()) + 1,
        overlap=1 - unique / flat if flat else 0.0,
        token_speedup=flat / unique if unique else 1.0,
    )


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
    for view, template in itertools.product(("calls", "transcript"), templates):
        try:
            tree = build_tree(read(view, template))
        except DataError:
            continue
        found.append(
            ViewCost(
                view=view,
                template=template,
                rows=tree.num_trajectories,
                flat=tree.num_flat_tokens,
                unique=tree.num_tokens,
                trained=int(tree.trained_edges()[0].sum()),
                linear_flops=counts.flops(*linear_work(tree, counts.attention_ranges)),
                tree_flops=counts.flops(*tree_work(tree, counts.attention_ranges)),
            )
        )
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
