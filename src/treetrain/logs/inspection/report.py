"""The report on the rows of a file: figures, sharing within batches, and a verdict.

The text, the JSON object and the page are made from it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from treetrain.core.planning.cost import ModelCounts
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.token_tree import Row, TokenTree, build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.groups import TOKENS_PER_STEP, batches_of_pass, cut_evenly, make_groups
from treetrain.logs.inspection.diagnosis import Diagnosis, diagnose
from treetrain.logs.inspection.prepared import Decodes
from treetrain.logs.once import repeats, sampled_apart
from treetrain.models.work import TreeStats, cheapest_rows, ideal_speedup, linear_work, tree_stats

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
class Inspection:
    """The sharing of a file's rows, and the causes that limit it."""

    files: tuple[str, ...] = ()
    format: str = "tokens"
    view: str | None
    """"calls" or "transcript"; None for token rows."""
    notes: tuple[str, ...] = ()
    tokenizer: Decodes | None
    """None if the rows are shown as token ids."""
    shape: Shape
    tree: TokenTree
    """The rows as one batch."""
    stats: TreeStats
    remarks: Sequence[tuple[str, ...]] = ()
    """Remarks on each row's record; empty if the records are not known."""
    sampled: float = 1.0
    """Share of the groups in the files that the rows are; 1 for all."""
    longest_rows: float
    """FLOPs of the rows that no other row extends or repeats / FLOPs of all rows, each by itself."""
    trained_again: int
    """Trained tokens that repeat one that an earlier row trains; `count="once"` leaves them out."""
    batch_size: int | None
    """Rows of a batch; None: the steps of `treetrain train`, whole groups of about `TOKENS_PER_STEP` flat tokens."""
    batches: dict[str, float]
    """Speed-up by FLOPs within these batches, for three orders of the rows: "grouped", so that rows that share a prefix
    are together, "file", "shuffled"; empty if all rows are one batch."""
    transcripts: float = 1.0
    """FLOPs of whole conversations / FLOPs of their calls, each row by itself."""
    diagnosis: Diagnosis
    """Why the rows do not share more."""
    plan: Plan | None = None
    """The plan of `tree`, if one was asked for."""

    def baseline(self) -> tuple[str, float]:
        """The cheapest way without a tree to train the same sampled tokens, and its FLOPs / those of all rows apart."""
        ways = [("every row by itself", 1.0), ("the rows that no other row extends, each by itself", self.longest_rows)]
        if self.diagnosis.broken:
            ways.append(("whole conversations (--view transcript), each by itself", self.transcripts))
        return min(ways, key=lambda way: way[1])

    def verdict(self) -> str:
        """One sentence: whether to train these rows as a tree, what that gains, against what, on which assumption."""
        if not self.stats.trained_flat:
            return "Nothing to train: no token of these rows has a loss weight."
        way, cheapest = self.baseline()
        here = self.stats.flop_speedup or 1.0
        order = "all rows as one batch"
        if self.batches:
            here = self.batches["grouped"]
            order = f"batches of {self.batch_size} rows grouped by prefix"
            if self.batch_size is None:
                order = f"steps of treetrain train (whole groups, about {TOKENS_PER_STEP:,} tokens)"
        here *= cheapest
        # Repairs of lost sharing change the speed-up of all rows at once; batches gain about as much.
        repaired = self.diagnosis.repaired_flop_speedup / max(self.diagnosis.flop_speedup, 1e-9)
        answer = "yes" if here >= WORTH else "not yet" if here * repaired >= WORTH else "no"
        assumed = f"FLOPs of {self.shape.name} and {order}"
        if self.sampled < 1:
            assumed += f", on a sample of {self.sampled:.2%} of the groups"
        fix = "; first change what is named under 'why not more'" if self.diagnosis.causes and repaired >= WORTH else ""
        if answer == "no" and (self.stats.flop_speedup or 1.0) * cheapest >= WORTH:
            fix = "; larger batches share more" if self.batch_size else "; larger steps (--tokens_per_step) share more"
        return f"Train as a tree: {answer}, {here:.2f}x against {way}, assuming {assumed}{fix}."

    def batch_words(self) -> tuple[str, dict[str, str]]:
        """The batches, and the speed-up in each order over the cheapest way, in a few words."""
        names = {"grouped": "grouped by prefix", "file": "in file order", "shuffled": "shuffled"}
        if self.batch_size is None:
            names["grouped"] = "in whole groups"
        _, cheapest = self.baseline()
        title = "in steps of train" if self.batch_size is None else f"in batches of {self.batch_size}"
        return title, {names[order]: f"{speed * cheapest:.2f}" for order, speed in self.batches.items()}

    def as_dict(self) -> dict[str, object]:
        """Plain JSON data."""
        return {
            "files": list(self.files),
            "format": self.format,
            "view": self.view,
            "shape": {"name": self.shape.name, "assumed": self.shape.assumed},
            "file": dataclasses.asdict(self.stats),
            "sampled": self.sampled,
            "trained_again": self.trained_again,
            "baseline": dict(zip(("way", "flops_of_all_rows"), self.baseline())),
            "batch_size": self.batch_size,
            "tokens_per_step": None if self.batch_size else TOKENS_PER_STEP,
            "batches": self.batches,
            "transcripts": self.transcripts,
            "diagnosis": {
                **dataclasses.asdict(dataclasses.replace(self.diagnosis, forks=())),
                "explanation": self.diagnosis.explain(),
            },
            "verdict": self.verdict(),
            "notes": list(self.notes),
            "plan": None if self.plan is None else self.plan.explanation(),
        }


def inspect_rows(
    rows: Sequence[Trajectory],
    shape: Shape,
    *,
    view: str | None = None,
    tokenizer: Decodes | None = None,
    batch_size: int | None = None,
) -> Inspection:
    """Measure what rows share.

    Args:
        rows: the rows; in the calls view each conversation's calls in order.
        shape: the model that FLOPs are counted for.
        view: "calls" or "transcript"; None for token rows.
        tokenizer: anything with `decode`; examples then show text instead of ids.
        batch_size: rows of a batch, for the sharing that is left in batches; None: steps of `treetrain train`.
    """
    tree = build_tree(rows)
    return Inspection(
        view=view,
        tokenizer=tokenizer,
        shape=shape,
        tree=tree,
        stats=tree_stats(tree, shape.counts),
        longest_rows=_longest_rows(tree, shape.counts),
        trained_again=trained_again(rows, tree),
        batch_size=batch_size,
        batches=sharing_in_batches(rows, tree, shape.counts, batch_size),
        diagnosis=diagnose(rows, shape.counts, tokenizer, tree=tree),
    )


def trained_again(rows: Sequence[Trajectory], tree: TokenTree) -> int:
    """Number of trained tokens of rows that repeat a sampled token which an earlier row trains (`logs/once.py`).

    Args:
        rows: K rows.
        tree: all of them as one batch.
    """
    again = repeats(rows, None if sampled_apart(rows).any() else tree)
    return sum(len(at) for _, _, at in again)


def sharing_in_batches(
    rows: Sequence[Trajectory], tree: TokenTree, counts: ModelCounts, size: int | None = None
) -> dict[str, float]:
    """Measure the speed-up by FLOPs within batches, for three orders of the rows.

    Args:
        rows: K rows.
        tree: all of them as one batch.
        counts: the model that FLOPs are counted for.
        size: rows of a batch: those of an optimizer step on one process, gradient accumulation included. None: the
            steps of `treetrain train`, whole groups of about `TOKENS_PER_STEP` flat tokens.

    Returns:
        One number for each order, of a sample of the batches if there are many; none if all rows fit one batch.
    """
    drawn, length = np.random.default_rng(0), tree.trajectory_length
    rows_in_order, shuffled = np.arange(len(rows)), drawn.permutation(len(rows))
    if size is None:
        groups = make_groups(rows, tokens_per_step=TOKENS_PER_STEP)
        tokens = np.add.reduceat(length[np.concatenate(groups)], np.cumsum([0, *map(len, groups[:-1])]))
        count, order = batches_of_pass(tokens, TOKENS_PER_STEP), drawn.permutation(len(groups))
        if count < 2:
            return {}
        orders = {
            "grouped": [
                np.concatenate([groups[number] for number in step]) for step in cut_evenly(order, tokens[order], count)
            ],
            "file": cut_evenly(rows_in_order, length, count),
            "shuffled": cut_evenly(shuffled, length[shuffled], count),
        }
    elif len(rows) <= size:
        return {}
    else:
        by_prefix = np.argsort(tree.trajectory_last, kind="stable")  # depth-first: neighbours share the most
        orders = {
            name: np.split(order, range(size, len(rows), size))
            for name, order in (("grouped", by_prefix), ("file", rows_in_order), ("shuffled", shuffled))
        }
    found = {}
    for name, batches in orders.items():
        batches = [batches[number] for number in drawn.permutation(len(batches)).tolist()]
        tokens = np.cumsum([length[batch].sum() for batch in batches])
        batches = batches[: max(int((tokens <= SAMPLED).sum()), 1)]
        apart = np.repeat(np.arange(len(batches)), list(map(len, batches)))
        forest = build_tree([rows[number] for number in np.concatenate(batches).tolist()], apart=apart)
        found[name] = ideal_speedup(forest, counts)
    return found


def linear_flops(rows: Sequence[Row], counts: ModelCounts) -> float:
    """FLOPs of a step with every row by itself."""
    return counts.flops(*linear_work(build_tree(rows), counts.attention_ranges))


def _longest_rows(tree: TokenTree, counts: ModelCounts) -> float:
    """FLOPs of `cheapest_rows` / FLOPs of all rows, each by itself."""
    rows = cheapest_rows(tree)
    linear = counts.flops(*linear_work(tree, counts.attention_ranges))
    if len(rows) == (tree.trajectory_last >= 0).sum() or not linear:
        return 1.0
    return linear_flops(rows, counts) / linear
