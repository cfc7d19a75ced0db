"""The rows of a run with the log-probabilities that it computes itself: under the old policy and the reference."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.ranks import Ranks
from treetrain.train.accumulate import StepSplitter
from treetrain.train.batches import Int64s
from treetrain.train.objective import OLD, REFERENCE
from treetrain.train.prepare import Prepared
from treetrain.train.references import ReferencePolicy, score_references
from treetrain.train.scores import RowScores
from treetrain.train.updates import Update, Updates
from treetrain.trainers.watch import facts_of_step


class Rollouts:
    """Gives every step its rows.

    Args:
        prepared: the run.
        updates: its steps; it keeps the old log-probabilities of the running batch.
        reference: the reference policy.
        split: a step, or a batch, into calls.
    """

    def __init__(self, prepared: Prepared, updates: Updates, reference: ReferencePolicy, split: StepSplitter) -> None:
        self._prepared, self._updates, self._split = prepared, updates, split
        self._policy = reference
        self._reference = RowScores(REFERENCE) if REFERENCE in prepared.computed else None
        self._eval_reference = RowScores(REFERENCE) if REFERENCE in prepared.eval_computed else None
        pieces = {"reference": self._reference, "eval_reference": self._eval_reference}
        self.pieces = {name: piece for name, piece in pieces.items() if piece is not None}
        """What is kept over the whole run: parts of its state."""

    def score_references(self, *, untouched: bool, between: Callable[[], None]) -> int:
        """Score all rows that the run may come to, and the held-out ones, under the reference; returns how many.

        See `references.score_references`.
        """
        return score_references(self._policy, self._to_score(), untouched=untouched, between=between)

    def _to_score(self) -> Iterator[tuple[RowScores, Sequence[Trajectory], Int64s]]:
        if self._reference is not None:
            for batch in self._updates.visited():
                if len(self._reference) == len(self._prepared.rows):
                    break
                for call in self._split(batch):
                    yield self._reference, self._prepared.rows, call
        if self._eval_reference is not None:
            for numbers in self._prepared.eval_steps:
                yield self._eval_reference, self._prepared.eval_rows, numbers

    def begin(self, engine: TreeEngine, update: Update) -> dict[str, float]:
        """Before a step: old log-probabilities, if it is the first one of its batch.

        Returns:
            What that took.
        """
        if self._prepared.watch is not None:
            self._prepared.watch.begin()
        old = self._updates.old
        if OLD not in self._prepared.computed or len(old):
            return {}
        started = time.perf_counter()
        for call in self._split(update.batch_rows):
            old.compute(engine, self._prepared.rows, call)
        return {"old_logprobs_seconds": time.perf_counter() - started}

    def rows(self, numbers: Int64s) -> list[Trajectory]:
        """Rows of a step, with all that the loss needs."""
        rows = []
        for number in numbers.tolist():
            row = self._prepared.rows[number]
            if OLD in self._prepared.computed:
                row = self._updates.old.attached(row, number)
            rows.append(row if self._reference is None else self._reference.attached(row, number))
        return rows

    def known_beforehand(self, update: Update) -> bool:
        """Whether the rows of a step that has not begun are known: its batch's old policy may be yet to come."""
        scored = update.batch == self._updates.batch and len(self._updates.old) > 0
        return OLD not in self._prepared.computed or scored

    def eval_rows(self) -> list[Trajectory]:
        """The held-out rows, with all that their loss needs."""
        rows, scores = self._prepared.eval_rows, self._eval_reference
        return rows if scores is None else [scores.attached(row, number) for number, row in enumerate(rows)]

    def approx_kl(self, metrics: Mapping[str, Any]) -> float | None:
        """How far the policy was from the old one, as a step's loss measured it; a mixture names its losses."""
        return next((value for name, value in metrics.items() if name.rpartition("/")[2] == "approx_kl"), None)

    def watched(self, rows: list[Trajectory], ranks: Ranks) -> dict[str, float]:
        """What to watch of a step of a policy loss, besides the metrics of the loss; `rows` are those of all ranks."""
        return {} if self._prepared.watch is None else self._prepared.watch.read(ranks) | facts_of_step(rows)
