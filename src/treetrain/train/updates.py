"""Which rows every optimiser step has: a batch is updated once or several times, whole or in minibatches.

A *batch* is a step of `BatchPlan`. It is passed over `updates_per_batch` times, each time in up to `minibatches` parts
of whole units, drawn by the seed; every part is an optimiser step.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from treetrain.train.batches import BatchPlan, Int64s
from treetrain.train.config import TrainConfig
from treetrain.train.scores import RowScores

_ORDER = 1  # keeps the random numbers of minibatches apart from those of the batches


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """One optimiser step."""

    epoch: int
    """Pass over the data, from 0."""
    batch: int
    """From 0 over the whole run."""
    number: int
    """Pass over the batch, from 1."""
    minibatch: int
    """Part of that pass, from 1."""
    batch_rows: Int64s
    """Row numbers of the batch."""
    rows: Int64s
    """Row numbers of this step, in the order of the file."""


class UpdatePlan:
    """The optimiser steps of every batch; the same for every execution, found again from the seed alone.

    Args:
        plan: the batches.
        updates_per_batch: passes over each.
        minibatches: parts of every pass, each an optimiser step; a batch of fewer units has as many parts as units.
    """

    def __init__(self, plan: BatchPlan, *, updates_per_batch: int = 1, minibatches: int = 1) -> None:
        self.plan, self.updates_per_batch, self.minibatches = plan, updates_per_batch, minibatches
        self._unit_of = plan.unit_of_rows()

    def of_batch(self, batch: int, epoch: int, rows: Int64s) -> list[Update]:
        """The steps of a batch, in their order."""
        units = np.unique(self._unit_of[rows])
        return [
            Update(epoch=epoch, batch=batch, number=number, minibatch=part, batch_rows=rows, rows=members)
            for number in range(1, self.updates_per_batch + 1)
            for part, members in enumerate(self._parts(batch, number, rows, units), start=1)
        ]

    def steps_of_batch(self, rows: Int64s) -> int:
        """How many steps a batch has."""
        return self.updates_per_batch * min(self.minibatches, len(np.unique(self._unit_of[rows])))

    def total_steps(self, epochs: int) -> int:
        """Optimiser steps of so many passes over the data, none left out."""
        batches = self.plan.steps(self.plan.total_steps(epochs))
        return sum(self.steps_of_batch(rows) for _, rows in batches)

    def _parts(self, batch: int, number: int, rows: Int64s, units: Int64s) -> list[Int64s]:
        """Row numbers of the minibatches of a pass: shuffled units, cut where the parts are of about equal size."""
        count = min(self.minibatches, len(units))
        if count == 1:
            return [rows]
        order = np.random.default_rng([self.plan.seed, _ORDER, batch, number]).permutation(units)
        filled = np.cumsum(self.plan.unit_tokens[order])
        cuts = np.searchsorted(filled, filled[-1] * np.arange(1, count) / count, side="left") + 1
        places = np.arange(1, count)
        # Every part has a unit, however large one of them is.
        cuts = np.minimum(np.maximum.accumulate(cuts - places) + places, len(order) - count + places)
        return [np.sort(np.concatenate([self.plan.units[unit] for unit in part])) for part in np.split(order, cuts)]


class Updates:
    """Where a run is in its batches, and what it keeps of the running one: a part of the state of a run.

    Args:
        config: of the run.
        plan: its batches.
        total: its optimiser steps, if none is left out.
    """

    def __init__(self, config: TrainConfig, plan: BatchPlan, total: int) -> None:
        self.plan, self.total = update_plan(config, plan), total
        self.target_kl = config.target_kl
        self.batches = total if config.steps else plan.total_steps(config.epochs or 1)
        """At most so many batches are begun."""
        self.batch = self.done = 0
        self._steps: list[Update] = []
        self._coming: list[Update] = []
        """Of the batch after that."""
        self.old = RowScores("old_logprobs")
        """Of the rows of the running batch, as the policy was before its first step."""

    @property
    def at_end(self) -> bool:
        """Whether there is no batch left."""
        return self.batch >= self.batches

    def __iter__(self) -> Iterator[Update]:
        """The steps that are left. `advance` must be called after each."""
        batches = enumerate(self.plan.plan.steps(self.batches, skip=self.batch), self.batch)
        steps = self._of_next(batches)
        while steps:
            self._steps, self._coming = steps, self._of_next(batches)
            number, coming = self.batch, self._coming
            while self.batch == number:
                yield steps[self.done]
            steps = coming

    def _of_next(self, batches: Iterator[tuple[int, tuple[int, Int64s]]]) -> list[Update]:
        """The steps of the next batch; none behind the last."""
        return next((self.plan.of_batch(number, epoch, rows) for number, (epoch, rows) in batches), [])

    def following(self) -> Update | None:
        """The step after the running one; None where that depends on how this one goes, or there is none."""
        rest = self._steps[self.done + 1 :]
        if rest:
            return None if self.target_kl is not None else rest[0]
        return self._coming[0] if self._coming else None

    def advance(self, update: Update, approx_kl: float | None) -> int:
        """A step is done.

        Args:
            update: the step.
            approx_kl: how far the policy was from the old one in it; None where that is not known.

        Returns:
            How many steps of the batch are left out because it was too far.
        """
        self.done += 1
        rest = self.plan.steps_of_batch(update.batch_rows) - self.done
        leave = rest if self.target_kl is not None and approx_kl is not None and approx_kl > self.target_kl else 0
        if leave == rest:
            self.batch, self.done = self.batch + 1, 0
            self.old.clear()
        return leave

    def visited(self) -> Iterator[Int64s]:
        """Row numbers of every batch that the run may come to, from its beginning on."""
        steps = 0
        for _, rows in self.plan.plan.steps(self.batches):
            if steps >= self.total:
                return
            yield rows
            steps += 1 if self.target_kl is not None else self.plan.steps_of_batch(rows)

    def state_dict(self) -> dict[str, Any]:
        """The next step, and what belongs to its batch."""
        return {"batch": self.batch, "done": self.done, "old": self.old.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that step."""
        self.batch, self.done = state["batch"], state["done"]
        self.old.load_state_dict(state["old"])


def update_plan(config: TrainConfig, plan: BatchPlan) -> UpdatePlan:
    """The optimiser steps of a run's batches."""
    return UpdatePlan(plan, updates_per_batch=config.updates_per_batch, minibatches=config.minibatches)


def total_steps(config: TrainConfig, plan: BatchPlan) -> int:
    """Optimiser steps of a run; with `target_kl` and epochs the most that it can have."""
    return config.steps or update_plan(config, plan).total_steps(config.epochs or 1)
