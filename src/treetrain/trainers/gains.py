"""Measures the gain from shared prefixes in a trainer: for its logs, and in a line after the first steps."""

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from transformers import Trainer

from treetrain.core.errors import DataError
from treetrain.core.planning.cost import CostModel
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.core.tree.trajectory import common_prefix
from treetrain.models.work import linear_work, tree_work
from treetrain.trainers.batches import ModelInputs, model_inputs, rows_of

if TYPE_CHECKING:
    from treetrain.core.engine.score import Scored

STEPS = 3
"""Optimizer steps before the line and the warning."""
LITTLE = 0.1
"""The least share of the tokens that a change must save to be worth a warning."""
SMALL_PART = 64
"""Parts of fewer tokens take longer than their FLOPs say: a pass costs something whatever its size."""
MANY_TWICE = 0.25
"""Tokens run forward twice, as a share of those computed, that are worth a larger budget."""
LOOKED_AT = 4096
"""At most so many rows of the training data are searched for prefixes that a step could share."""
MOST_KEPT = 1 << 20
"""Tokens of calls without a tree: after so many no more are kept for the warning."""


def line_of_steps(steps: Sequence[Mapping[str, float]]) -> str:
    """A sentence with what sharing saved in some steps of a `TreeTrainer`, and what to do where that is little.

    Args:
        steps: numbers of every step, by the names in its logs (without `tree/`).
    """
    names = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
    flat, unique, computed, twice, parts = (sum(step[name] for step in steps) for name in names)
    tree, linear = (sum(step.get(name, 0.0) for step in steps) for name in ("tree_flops", "linear_flops"))
    text = f"treetrain: in the first {len(steps)} steps {unique:,.0f} of {flat:,.0f} tokens were in the tree, "
    text += f"{flat / unique:.1f} times fewer, in {parts / len(steps):.1f} parts a step"
    text += f"; {linear / tree:.1f} times as fast by FLOPs." if tree else "."
    if unique > (1 - LITTLE / 10) * flat:
        text += (
            " The rows of a step have no prefixes in common: treetrain inspect says what prevents it, and "
            "execution='linear' trains such data as well."
        )
    elif unique > (1 - LITTLE) * flat:
        text += " That is little: treetrain inspect says what would share more."
    if computed < SMALL_PART * parts:
        text += f" Parts of {computed / parts:.0f} tokens are slow, with or without a tree: raise tokens_per_step"
        text += " or the budget." if parts > len(steps) else "."
    elif twice > MANY_TWICE * computed:
        text += f" {twice:,.0f} tokens ran forward twice to fit the budget: a larger one is faster."
    return text


class GainsState(TypedDict):
    """The state on which the next logs depend."""

    counts: dict[str, float]
    once: dict[str, float]
    logged: list[str]
    trees: int


class Gains:
    """Counts what this process computes and what it would compute without trees."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._counts: Counter[str] = Counter()  # since the last logs
        self._first: Counter[str] = Counter()  # of the first steps
        self._untreed: list[np.ndarray] = []  # rows of calls that no tree answered
        self._steps = self._trees = 0
        # Scores, start, predicted seconds of the plain path.
        self._timed: tuple[weakref.ref[Scored], float, float] | None = None
        self._measured: float | None = None
        self._logged: set[str] = set()  # names that were logged once
        self._kept: dict[str, float] = {}  # numbers of a stopped run, to be logged once
        self.once: dict[str, float] = {}
        """Numbers that are logged once."""
        self.plain_rate: float | None = None
        """FLOP/s of the plain forward and backward over a few rows; None if that is not known."""

    def now(self) -> float:
        """The time; while a measurement may begin or end, the time when the device has done all its work."""
        if self._trees <= 2 and self._trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def add(self, scored: "Scored", tree: TokenTree, cost: CostModel | None, started: float) -> None:
        """Count a tree that is trained; the backward of the second ends a measurement, as the first also warms up."""
        self._trees += 1
        counts: dict[str, float] = {
            "flat": scored.flat_tokens,
            "unique": scored.unique_tokens,
            "computed": scored.computed_tokens,
            "parts": scored.parts,
            "trees": 1,
        }
        if cost is not None:
            for name, work in (("row_flops", linear_work), ("tree_flops", tree_work)):
                counts[name] = cost.counts.flops(*work(tree, cost.counts.attention_ranges))
            if self._trees == 2 and self.plain_rate is not None:
                self._timed = weakref.ref(scored), started, counts["row_flops"] / self.plain_rate
        self._counts.update(counts)
        self._first.update(counts)

    def add_backward(self, scored: "Scored") -> None:
        """End the measurement, if this is the tree that is measured."""
        if self._timed is not None and scored is self._timed[0]():
            _, started, plain_seconds = self._timed
            self._measured = self.once["tree/measured_speedup"] = plain_seconds / (self.now() - started)
            self._timed = None

    def add_call(self, kwargs: ModelInputs) -> None:
        """Count a call of the model for the loss that no tree answers."""
        if self._steps >= STEPS or sum(map(len, self._untreed)) > MOST_KEPT:
            return
        call = {name: kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids")}
        if call["input_ids"] is None or any(x is not None and x.dim() != 2 for x in call.values()):
            return
        with suppress(DataError):  # these calls are the trainer's own, and may mean other things by their arguments
            self._untreed += rows_of(call, rewards=True).ids
            self._first["calls"] += 1

    def state_dict(self) -> GainsState:
        """Return the state on which the next logs depend."""
        once = self.once | self._kept
        return {"counts": dict(self._counts), "once": once, "logged": sorted(self._logged), "trees": self._trees}

    def load_state_dict(self, state: GainsState) -> None:
        """Go on with the logs of a stopped run."""
        self._counts, self._kept = Counter(state["counts"]), dict(state["once"])
        self._logged, self._trees = set(state["logged"]), state["trees"]

    def take_logs(self) -> dict[str, float]:
        """Return the numbers since the last call, and reset them."""
        counts, self._counts = self._counts, Counter()
        once, self.once, self._kept = self.once | self._kept, {}, {}
        logs = {name: value for name, value in once.items() if name not in self._logged}
        self._logged |= logs.keys()
        if counts["trees"]:
            logs["tree/overlap"] = 1 - counts["unique"] / max(counts["flat"], 1)
            logs["tree/parts"] = counts["parts"] / counts["trees"]
        if counts["tree_flops"]:
            logs["tree/ideal_speedup"] = counts["row_flops"] / counts["tree_flops"]
        return logs

    def end_step(self) -> None:
        """After the first steps print what they gained, and warn once if much more could be gained."""
        self._steps += 1
        if self._steps == STEPS and self._trainer.accelerator.is_local_main_process:
            advice = self._advice()
            print(f"{self.line}{self._hint() if advice is None else ''}")
            if advice is not None:
                warnings.warn(f"{self.line} {advice}", stacklevel=2)
        if self._steps == STEPS:
            self._untreed = []

    @property
    def line(self) -> str:
        """A sentence with the gain of the first steps."""
        first = self._first
        computed, flat = first["computed"], first["flat"]
        if not computed:
            return f"share_prefixes: in the first {STEPS} steps no call of the model was answered from a tree."
        text = f"share_prefixes: in the first {STEPS} steps {computed:,} of {flat:,} tokens were computed"
        text += f", {flat / computed:.1f} times fewer, in {first['parts'] / first['trees']:.1f} parts a tree"
        if first["tree_flops"]:
            text += f"; {first['row_flops'] / first['tree_flops']:.1f} times as fast by FLOPs"
        if self._measured is not None:
            text += f", {self._measured:.1f} measured"
            if first["tree_flops"] and self._measured > first["row_flops"] / first["tree_flops"]:
                text += " (which can be more: rows by themselves also pay for small calls)"
        return text + "."

    def _hint(self) -> str:
        """Say what to do if nothing is gained and no advice would help; nothing otherwise."""
        first = self._first
        if not first["computed"]:
            return (
                " Take log-probabilities in the loss (tt.token_logprobs(model, inputs)), give a plain Trainer labels, "
                "or leave share_prefixes out."
            )
        if self._overlap < LITTLE / 10:
            return (
                " The rows of a step have no prefixes in common: leave share_prefixes out for such data, or see what "
                "prevents it (treetrain inspect)."
            )
        if self._measured is not None and self._measured < 1:
            more = "a larger budget or " if first["parts"] > first["trees"] else ""
            return (
                f" That is slower than without, as small steps are: try {more}more rows in a step "
                "(per_device_train_batch_size, gradient_accumulation_steps), or leave share_prefixes out."
            )
        if self._overlap < LITTLE:
            return " That is little: more rows of a prompt in a step share more."
        return ""

    @property
    def _overlap(self) -> float:
        """The share of tokens that the first steps did not compute."""
        return 1 - self._first["unique"] / max(self._first["flat"], 1)

    def _advice(self) -> str | None:
        """Say what to change in order to share much more; None if nothing would help."""
        first, loose = self._first, sum(map(len, self._untreed))
        tree = build_tree(self._untreed)
        if tree.num_flat_tokens - tree.num_tokens > LITTLE * (first["flat"] + loose):
            return (
                f"But {first['calls']} calls of the model in compute_loss asked for logits, which no tree gives; "
                f"of their {loose:,} tokens {1 - tree.num_tokens / loose:.0%} could be shared. Take "
                "log-probabilities, those of the labels if the batch has labels: tt.token_logprobs(model, inputs)"
            )
        overlap = self._overlap
        if (generation := self._generation()) > overlap + LITTLE:
            args: Any = self._trainer.args
            each, steps = args.steps_per_generation, args.gradient_accumulation_steps
            return (
                f"A generation of {each} micro-batches is trained in steps of {steps}, each with a random part of "
                f"every group: {generation:.0%} of its tokens could be shared. Set "
                f"gradient_accumulation_steps={each}, or "
                f"steps_per_generation={steps} with whole groups in a step"
            )
        if (
            overlap >= LITTLE
            or hasattr(self._trainer, "num_generations")
            or "_get_train_sampler" in vars(self._trainer)
        ):
            return None
        key, possible = self._possible()
        if possible < overlap + LITTLE:
            return None
        return (
            f"Rows with common prefixes are in different steps: {possible:.0%} of the tokens in {key} could be shared. "
            f'Before share_prefixes(trainer), add: tt.group_batches(trainer, key="{key}")'
        )

    def _generation(self) -> float:
        """The share of tokens that one step over a whole generation would save, if it takes several; else 0."""
        args, buffered = self._trainer.args, getattr(self._trainer, "_buffered_inputs", None)
        if not buffered or getattr(args, "steps_per_generation", 0) <= args.gradient_accumulation_steps:
            return 0.0
        calls = [call for call in map(model_inputs, buffered) if call is not None]
        tree = build_tree([row for call in calls for row in rows_of(call, rewards=True).ids])
        return 1 - tree.num_tokens / max(tree.num_flat_tokens, 1)

    def _possible(self) -> tuple[str, float]:
        """Return a column of token ids, and the share of its tokens that grouping rows by prefix would save."""
        dataset: Any = self._trainer.train_dataset
        args = self._trainer.args
        columns = getattr(dataset, "column_names", None) or []
        key = next((name for name in ("input_ids", "prompt_ids") if name in columns), None)
        if key is None or not hasattr(dataset, "__len__") or not len(dataset):
            return "", 0.0
        from treetrain.trainers.groups import group_rows

        ids = [np.asarray(row) for row in dataset.select_columns(key)[:LOOKED_AT][key]]
        most = args.per_device_train_batch_size * args.gradient_accumulation_steps
        saved = sum(common_prefix(ids[a], ids[b]) for group in group_rows(ids, most) for a, b in pairwise(group))
        return key, saved / max(sum(map(len, ids)), 1)
