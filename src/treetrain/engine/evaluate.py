"""Calls a loss, ours or a user's own, on log-probabilities of some trajectories."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.engine.batch import Reads, Selection
from treetrain.engine.checks import checked_sum
from treetrain.engine.results import MetricSums, add_sums


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
    return total.index_add_(0, on_device(rows.edges, device), per_prediction.double()).to(dtype)


def added_up(like: Tensor, places: np.ndarray, found: Tensor | None) -> Tensor:
    """Gradients added up where they were read from, in the shape and dtype of `like`.

    Args:
        places: int64 [T]: where in `like`.
        found: [T] or [T, c]; None: zeros.
    """
    # Float64 on the way: a place may collect thousands of rows.
    total = torch.zeros_like(like, dtype=torch.float64)
    if found is not None:
        total.index_add_(0, on_device(places, like.device), found.double())
    return total.to(like.dtype)


def evaluate(
    loss: Any, logprobs: Tensor, entropies: Tensor | None, rows: Reads, values: Tensor | None = None
) -> tuple[Tensor, MetricSums]:
    """The loss's unnormalised sum over some trajectories, and its metrics as (weighted sum, weight).

    Args:
        logprobs: [T], of the used predictions.
        entropies: [T], or None.
        values: [T] or [T, c], of the states that make these predictions; None for a loss that needs none.
    """
    if hasattr(loss, "packed"):
        facts = rows.facts(loss, logprobs.device, logprobs.dtype)
        given = {} if values is None else {"values": values}
        return checked_sum(loss, loss.packed(logprobs, entropies, facts, **given))
    assert isinstance(rows, Selection)
    return _evaluate_rows(loss, logprobs, entropies, rows, values)


class Evaluation(NamedTuple):
    """A loss over some trajectories with its gradients."""

    total: Tensor
    """The sum divided by the normaliser, detached."""
    sums: MetricSums
    edges: Tensor | None
    """[T] d loss / d log-probability of each used prediction; None where the loss does not depend on them."""
    rows: Tensor | None
    """[T] d loss / d entropy, likewise."""
    values: Tensor | None = None
    """[T] or [T, c] d loss / d value, likewise."""


def evaluate_gradients(
    loss: Any,
    normaliser: float,
    logprobs: Tensor,
    entropies: Tensor | None,
    rows: Reads,
    values: Tensor | None = None,
) -> Evaluation:
    """A loss over some trajectories and its gradients, apart from the model's graph.

    Args:
        logprobs: [E] of all edges.
        entropies: [R] of all rows, or None.
        values: [R] or [R, c] of all rows; None where no row has been scored, or the loss needs none.
    """
    if values is None and getattr(loss, "needs_values", False):
        values = logprobs.new_zeros(len(rows.rows) and int(rows.rows.max()) + 1)
    with torch.enable_grad():
        given = rows.per_prediction(logprobs).requires_grad_()
        spread = None if entropies is None else rows.per_prediction_entropy(entropies).requires_grad_()
        valued = None if values is None else rows.per_prediction_entropy(values).requires_grad_()
        total, sums = evaluate(loss, given, spread, rows, valued)
        inputs = (given, spread, valued)
        grads: list[Tensor | None] = [None] * 3
        if total.requires_grad:
            live = [number for number, x in enumerate(inputs) if x is not None]
            found = torch.autograd.grad(total / normaliser, [inputs[n] for n in live], allow_unused=True)  # type: ignore[misc]
            for number, grad in zip(live, found):
                grads[number] = grad
    return Evaluation(total.detach() / normaliser, sums, *grads)


def _evaluate_rows(loss: Any, logprobs: Tensor, entropies: Tensor | None, rows: Selection, values: Tensor | None):
    """A user's own loss: called row by row, or once with lists where its scope is the batch.

    One that says ``needs_values`` gets them as the keyword argument ``values``.
    """
    # Clones: it may write into what it is given.
    logprob_rows = [row.clone() for row in rows.per_trajectory(logprobs)]
    entropy_rows: list[Tensor | None] = [None] * len(logprob_rows)
    if entropies is not None:
        entropy_rows = [row.clone() for row in rows.per_trajectory(entropies)]
    value_rows: list[Tensor] = []
    if values is not None:
        value_rows = [row.clone() for row in rows.per_trajectory(values)]
    if getattr(loss, "scope", "trajectory") == "batch":
        given = {} if values is None else {"values": value_rows}
        returned = loss(logprob_rows, None if entropies is None else entropy_rows, list(rows.trajectories), **given)
        total, metrics = checked_sum(loss, returned)
        return torch.as_tensor(total), _as_sums(metrics)
    total, sums = logprobs.new_zeros(()), {}
    options = [{}] * len(logprob_rows) if values is None else [{"values": row} for row in value_rows]
    for row, entropy_row, trajectory, given in zip(logprob_rows, entropy_rows, rows.trajectories, options):
        row_sum, metrics = checked_sum(loss, loss(row, entropy_row, trajectory, **given))
        total = total + row_sum
        sums = add_sums(sums, _as_sums(metrics))
    return total, sums


def _as_sums(metrics: dict[str, Any] | None) -> MetricSums:
    """A plain number is the mean of one observation. Clones: a loss may go on to write into what it has reported."""
    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in (metrics or {}).items()}
    return {name: (_fixed(total), _fixed(weight)) for name, (total, weight) in pairs.items()}


def _fixed(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
