"""What a loss asks of all rows of a run, where they are not in memory: found from their columns."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from treetrain.data.columns import GIVEN
from treetrain.data.lazy_rows import LazyRows
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.losses import Loss
from treetrain.train.batches import BatchPlan, Int64s

REFERENCE = "ref_logprobs"


def check_lazy_rows(loss: Loss, rows: LazyRows, plan: BatchPlan, computed: Iterable[str]) -> None:
    """Raise what the loss would raise for rows in memory. Only rows that something is wrong with are read.

    Args:
        loss: of the run.
        rows: all rows of the run.
        plan: its steps; the rows of a pair are never in two of them.
        computed: facts that the run computes itself.

    Raises:
        DataError: a trained row that lacks a fact, a negative weight, rows that are no pairs; or a fact that must be
            computed for all rows before the first step.
    """
    if REFERENCE in computed:
        raise DataError(
            "the reference policy's log-probabilities of the whole run are computed before its first step and kept, "
            "which needs all rows in memory: give the rows ref_logprobs, or data_in_memory true"
        )
    columns, computed = rows.columns, set(computed)
    lacking = np.zeros(len(rows), bool)
    for fact in set(loss.needs_facts) - computed:
        lacking |= columns.trained & ~columns.given[fact]
    for number in np.flatnonzero(columns.negative | lacking)[:1].tolist():
        loss.normaliser([_filled(rows[number], computed)])
    if loss.scope == "batch":
        for numbers in plan.epoch(0, shuffle=False):
            _check_step(loss, rows, numbers, computed)


def _check_step(loss: Loss, rows: LazyRows, numbers: Int64s, computed: set[str]) -> None:
    try:
        loss.check([_sketch(rows, number, computed) for number in numbers.tolist()])
    except DataError:
        # The rows themselves know their names; every process reads them, since each is here.
        loss.check([_filled(rows[number], computed) for number in numbers.tolist()])
        raise


def _sketch(rows: LazyRows, number: int, computed: set[str]) -> Trajectory:
    """A row of two tokens with the facts, the weight, the pair and the label of a row."""
    columns = rows.columns
    given: dict[str, Any] = {name: np.zeros(2) for name in GIVEN if columns.given[name][number] or name in computed}
    chosen, pair = int(columns.chosen[number]), int(columns.pair[number])
    return Trajectory(
        [0, 0],
        loss_weights=[0.0, columns.weight[number]],
        pair=None if pair < 0 else pair,
        chosen=None if chosen < 0 else bool(chosen),
        id=rows.place(number),
        **given,
    )


def _filled(row: Trajectory, computed: set[str]) -> Trajectory:
    return row.replace(**{fact: np.zeros(len(row)) for fact in computed})
