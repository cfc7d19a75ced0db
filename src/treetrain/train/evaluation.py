"""How a model does on rows that it is not trained on."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.evaluate import MetricSums, add_sums, means
from treetrain.train.spread import logprobs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Of all held-out rows."""

    nll: float
    """Mean negative log-likelihood of the weighted tokens, in nats."""
    trained_tokens: int
    """Tokens that have a weight."""
    loss: float | None
    """What would be trained; None where the rows lack a fact that it needs."""
    metrics: dict[str, float]
    """Of that loss."""

    def values(self) -> dict[str, float]:
        """The figures that are the lower the better."""
        return {"nll": self.nll} | ({} if self.loss is None else {"loss": self.loss})

    def as_record(self) -> dict[str, float]:
        """For metrics.jsonl."""
        return self.metrics | self.values() | {"trained_tokens": self.trained_tokens}


@torch.no_grad()
def evaluate(
    engine: TreeEngine, rows: Sequence[Trajectory], steps: Iterable[np.ndarray], loss: Any = None
) -> Evaluation:
    """Log-likelihood and loss of held-out rows.

    Args:
        engine: tree or linear; it is what decides the numerics. Its ranks share every call.
        rows: the held-out rows.
        steps: row numbers of every call, whole units, so that memory does not grow with the rows.
        loss: the one that is trained; it is divided by its normaliser over all rows. None: the likelihood alone.
    """
    nll, weight, tokens, total = 0.0, 0.0, 0, 0.0
    sums: MetricSums = {}
    loss = loss if loss is None else loss.for_step(rows)
    for numbers in steps:
        members = [rows[number] for number in numbers.tolist()]
        scored, entropies = _scores(engine, members, loss)
        for row, scores in zip(members, scored, strict=True):
            weights = row.weights[1:]
            # An untrained token may be impossible, and 0 times infinity is no number.
            nll -= float(weights @ np.where(weights != 0, scores.double().cpu().numpy(), 0.0))
            weight += float(weights.sum())
            tokens += int(np.count_nonzero(weights))
        if loss is not None:
            part, found = _loss(loss, scored, entropies, members)
            total += part
            sums = add_sums(sums, found)
    return Evaluation(
        nll=nll / weight,
        trained_tokens=tokens,
        loss=None if loss is None else total / loss.normaliser(rows),
        metrics=means(sums),
    )


def _scores(engine: TreeEngine, rows: list[Trajectory], loss: Any) -> tuple[list[Tensor], list[Tensor] | None]:
    if loss is not None and loss.needs_entropy:
        return logprobs(engine, rows, return_entropy=True)
    return logprobs(engine, rows), None


def _loss(
    loss: Any, scored: list[Tensor], entropies: list[Tensor] | None, rows: list[Trajectory]
) -> tuple[float, MetricSums]:
    """The unnormalised sum of a call, and its metrics."""
    if loss.scope == "batch":
        total, sums = loss(scored, entropies, rows)
        return float(total), sums
    total, sums = 0.0, {}
    for number, row in enumerate(rows):
        if row.weights[1:].any():
            part, found = loss(scored[number], None if entropies is None else entropies[number], row)
            total += float(part)
            sums = add_sums(sums, found)
    return total, sums
