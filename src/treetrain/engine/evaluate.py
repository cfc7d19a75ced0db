"""Calls a loss, ours or a user's own, on the log-probabilities of one part."""

from typing import Any

import torch
from torch import Tensor

from treetrain.engine.batch import Part
from treetrain.engine.head import Scores

MetricSums = dict[str, tuple[Any, Any]]
"""Name -> (weighted sum, weight), so that parts, micro-batches and ranks add up."""


def linear_coefficients(loss: Any, part: Part, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """[E] d sum / d log-probability of every edge, for a loss that states it beforehand; else None."""
    if not hasattr(loss, "coefficients"):
        return None
    facts = loss.pack(part.trajectories, device=device, dtype=dtype, used=part.used)
    per_prediction = loss.coefficients(facts)
    if per_prediction is None:
        return None
    edges = torch.from_numpy(part.layout.flat_edges).to(device)
    # Float64 on the way: a shared edge may collect thousands of rows.
    total = torch.zeros(len(part.layout.edge_targets), dtype=torch.float64, device=device)
    return total.index_add_(0, edges, per_prediction.double()).to(dtype)


def evaluate(loss: Any, scores: Scores, part: Part) -> tuple[Tensor, MetricSums]:
    """The loss's unnormalised sum over a part, and its metrics as (weighted sum, weight)."""
    logprobs = part.per_prediction(scores.logprobs)
    entropies = None if scores.entropies is None else part.per_prediction_entropy(scores.entropies)
    if hasattr(loss, "packed"):
        facts = loss.pack(part.trajectories, device=logprobs.device, dtype=logprobs.dtype, used=part.used)
        return loss.packed(logprobs, entropies, facts)
    return _evaluate_rows(loss, logprobs, entropies, part)


def _evaluate_rows(loss: Any, logprobs: Tensor, entropies: Tensor | None, part: Part):
    """A user's own loss: called row by row, or once with lists where its scope is the batch."""
    rows = part.per_trajectory(logprobs)
    entropy_rows = [None] * len(rows) if entropies is None else part.per_trajectory(entropies)
    if getattr(loss, "scope", "trajectory") == "batch":
        total, metrics = loss(rows, None if entropies is None else entropy_rows, part.trajectories)
        return total, _as_sums(metrics)
    total, sums = logprobs.new_zeros(()), {}
    for row, entropy_row, trajectory in zip(rows, entropy_rows, part.trajectories):
        row_sum, metrics = loss(row, entropy_row, trajectory)
        total = total + row_sum
        sums = add_sums(sums, _as_sums(metrics))
    return total, sums


def _as_sums(metrics: dict[str, Any] | None) -> MetricSums:
    """A plain number is the mean of one observation."""
    sums = {}
    for name, value in (metrics or {}).items():
        pair = value if isinstance(value, tuple) else (value, 1.0)
        sums[name] = tuple(v.detach() if isinstance(v, Tensor) else v for v in pair)
    return sums


def add_sums(a: MetricSums, b: MetricSums) -> MetricSums:
    """Metrics of two parts as those of both."""
    total = dict(a)
    for name, (value, weight) in b.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + value, before[1] + weight)
    return total


def means(sums: MetricSums) -> dict[str, float]:
    """Weighted sums to means; one without weight is left out."""
    return {name: float(total) / float(weight) for name, (total, weight) in sums.items() if float(weight) != 0}
