"""One step in several calls of forward and backward: the gradients of one call, in the memory of a smaller one."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.router_balance import RouterBalance
from treetrain.engine.step import StepResult, summed
from treetrain.train.batches import BatchPlan, Int64s
from treetrain.train.spread import own_rows
from treetrain.tree.token_tree import TokenTree


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


class Call(NamedTuple):
    """One call of forward and backward that can be made: all of it that weights do not change."""

    rows: Sequence[Trajectory]
    """Of all ranks."""
    own: TokenTree | list[Trajectory]
    """What this rank computes of them: a tree where it has all of them, in which nothing is shared if the engine shares
    nothing."""
    unique_tokens: int
    """Of the tree of all rows."""


def prepare(engine: TreeEngine, calls: Sequence[Sequence[Trajectory]]) -> list[Call]:
    """Build the trees of a step.

    Args:
        engine: of one rank or of several, each of which computes a share of every call.
        calls: the rows of all ranks.
    """
    shares = [own_rows(engine, call) for call in calls]
    return [
        Call(call, share.rows if share.tree is None else share.tree, share.unique_tokens)
        for call, share in zip(calls, shares, strict=True)
    ]


def forward_backward(engine: TreeEngine, calls: Sequence[Call], loss: Any) -> StepResult:
    """Accumulate the gradients of a step, call by call, all divided by the normaliser of the whole step."""
    if len(calls) == 1 and engine.ranks.alone:
        return engine.forward_backward(calls[0].own, loss)
    rows = [row for call in calls for row in call.rows]
    loss = loss.for_step(rows)
    normaliser = loss.normaliser(rows)
    balance = _balance(engine, [call.own for call in calls])
    results = [
        engine.forward_backward(call.own, loss, normaliser, balance, sync=number == len(calls))
        for number, call in enumerate(calls, start=1)
    ]
    # What several ranks compute of one path is one token of the batch.
    return summed(results, unique_tokens=sum(call.unique_tokens for call in calls))


def _balance(engine: TreeEngine, calls: Sequence[TokenTree | list[Trajectory]]) -> RouterBalance | None:
    """How the routers spread all tokens of the step; None where no auxiliary loss asks for it."""
    if not engine.capabilities.auxiliary:
        return None
    return functools.reduce(operator.add, [engine.router_balance(call) for call in calls])
