"""How likely a model finds rows that it is not trained on."""

from collections.abc import Sequence

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine


def evaluate(engine: TreeEngine, rows: Sequence[Trajectory], steps: Sequence[np.ndarray]) -> tuple[float, int]:
    """Mean negative log-likelihood of weighted tokens, in nats, and how many there are; no gradient.

    Args:
        engine: tree or linear; it is what decides the numerics.
        rows: the held-out rows.
        steps: row numbers of every call, so that memory does not grow with the rows.
    """
    total, weight, tokens = 0.0, 0.0, 0
    for numbers in steps:
        members = [rows[number] for number in numbers.tolist()]
        for row, logprobs in zip(members, engine.logprobs(members), strict=True):
            weights = row.weights[1:]
            total -= float(weights @ logprobs.double().cpu().numpy())
            weight += float(weights.sum())
            tokens += int(np.count_nonzero(weights))
    return total / weight, tokens
