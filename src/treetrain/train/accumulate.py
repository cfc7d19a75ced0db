"""One step in several calls of forward and backward: the gradients of one call, in the memory of a smaller one."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.router_balance import RouterBalance
from treetrain.engine.step import StepResult, summed
from treetrain.train.batches import BatchPlan, Int64s
from treetrain.train.spread import own_rows


class StepSplitter:
    """Splits the rows of a step into calls of whole units, so that no group and no pair is torn.

    Args:
        plan: of the run.
        tokens: flat tokens that a call is filled up to; a larger unit is a call of its own. None: one call.
    """

    def __init__(self, plan: BatchPlan, tokens: int | None) -> None:
        self._plan, self._tokens = plan, tokens
        self._unit_of = plan.unit_of_rows()

    def __call__(self, numbers: Int64s) -> list[Int64s]:
        """Row numbers of every call, each in the order of the file."""
        if self._tokens is None:
            return [numbers]
        calls: list[list[Int64s]] = []
        filled = 0
        for unit in np.unique(self._unit_of[numbers]).tolist():
            size = int(self._plan.unit_tokens[unit])
            if not calls or filled + size > self._tokens:
                calls.append([])
                filled = 0
            calls[-1].append(self._plan.units[unit])
            filled += size
        return [np.sort(np.concatenate(call)) for call in calls]


def forward_backward(engine: TreeEngine, calls: Sequence[Sequence[Trajectory]], loss: Any) -> StepResult:
    """Accumulate the gradients of a step, call by call, all divided by the normaliser of the whole step.

    Args:
        engine: of one rank or of several, each of which computes a share of every call.
        calls: the rows of all ranks.
    """
    if len(calls) == 1 and engine.ranks.alone:
        return engine.forward_backward(calls[0], loss)
    rows = [row for call in calls for row in call]
    loss = loss.for_step(rows)
    normaliser = loss.normaliser(rows)
    shares = [own_rows(engine, call) for call in calls]
    balance = _balance(engine, [share.rows for share in shares])
    results = [
        engine.forward_backward(share.rows, loss, normaliser, balance, sync=number == len(calls))
        for number, share in enumerate(shares, start=1)
    ]
    result = summed(results, loss=sum(result.loss for result in results))
    # What several ranks compute of one path is one token of the batch.
    return dataclasses.replace(result, unique_tokens=sum(share.unique_tokens for share in shares))


def _balance(engine: TreeEngine, calls: Sequence[Sequence[Trajectory]]) -> RouterBalance | None:
    """How the routers spread all tokens of the step; None where no auxiliary loss asks for it."""
    if not engine.capabilities.auxiliary:
        return None
    return functools.reduce(operator.add, [engine.router_balance(call) for call in calls])
