"""Calls a loss, ours or a user's own, on log-probabilities of some trajectories."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from treetrain.engine.batch import Reads, Selection

MetricSums = dict[str, tuple[Any, Any]]
"""Name -> (weighted sum, weight), so that parts, micro-batches and ranks add up."""


def linear_coefficients(
    loss: Any, rows: Reads, num_edges: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """[E] d sum / d log-probability of every edge, for a loss that states it beforehand; else None."""
    if not hasattr(loss, "coefficients"):
        return None
    facts = rows.facts(loss, device, dtype)
    per_prediction = loss.coefficients(facts)
    if per_prediction is None:
        return None
    # Float64 on the way: a shared edge may collect thousands of rows.
    total = torch.zeros(num_edges, dtype=torch.float64, device=device)
    return total.index_add_(0, torch.from_numpy(rows.edges).to(device), per_prediction.double()).to(dtype)


def evaluate(loss: Any, logprobs: Tensor, entropies: Tensor | None, rows: Reads) -> tuple[Tensor, MetricSums]:
    """The loss's unnormalised sum over some trajectories, and its metrics as (weighted sum, weight).

    Args:
        logprobs: [T], of the used predictions.
        entropies: [T], or None.
    """
    if hasattr(loss, "packed"):
        facts = rows.facts(loss, logprobs.device, logprobs.dtype)
        return loss.packed(logprobs, entropies, facts)
    assert isinstance(rows, Selection)
    return _evaluate_rows(loss, logprobs, entropies, rows)


class Evaluation(NamedTuple):
    """A loss over some trajectories with its gradients."""

    total: Tensor
    """The sum divided by the normaliser, detached."""
    sums: MetricSums
    edges: Tensor | None
    """[T] d loss / d log-probability of each used prediction; None where the loss does not depend on them."""
    rows: Tensor | None
    """[T] d loss / d entropy, likewise."""


def evaluate_gradients(
    loss: Any, normaliser: float, logprobs: Tensor, entropies: Tensor | None, rows: Reads
) -> Evaluation:
    """A loss over some trajectories and its gradients, apart from the model's graph.

    Args:
        logprobs: [E] of all edges.
        entropies: [R] of all rows, or None.
    """
    with torch.enable_grad():
        given = rows.per_prediction(logprobs).requires_grad_()
        spread = None if entropies is None else rows.per_prediction_entropy(entropies).requires_grad_()
        total, sums = evaluate(loss, given, spread, rows)
        inputs = [x for x in (given, spread) if x is not None]
        grads = [None] * len(inputs)
        if total.requires_grad:
            grads = list(torch.autograd.grad(total / normaliser, inputs, allow_unused=True))
    return Evaluation(total.detach() / normaliser, sums, grads[0], grads[1] if spread is not None else None)


def _evaluate_rows(loss: Any, logprobs: Tensor, entropies: Tensor | None, rows: Selection):
    """A user's own loss: called row by row, or once with lists where its scope is the batch."""
    # Clones: it may write into what it is given.
    logprob_rows = [row.clone() for row in rows.per_trajectory(logprobs)]
    entropy_rows: list[Tensor | None] = [None] * len(logprob_rows)
    if entropies is not None:
        entropy_rows = [row.clone() for row in rows.per_trajectory(entropies)]
    if getattr(loss, "scope", "trajectory") == "batch":
        total, metrics = loss(logprob_rows, None if entropies is None else entropy_rows, list(rows.trajectories))
        return torch.as_tensor(total), _as_sums(metrics)
    total, sums = logprobs.new_zeros(()), {}
    for row, entropy_row, trajectory in zip(logprob_rows, entropy_rows, rows.trajectories):
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
