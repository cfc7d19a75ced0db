"""Evaluates a loss on log-probabilities of some trajectories."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.engine.batch import Reads
from treetrain.engine.loss import PackedLoss
from treetrain.engine.results import Metrics


def linear_coefficients(
    loss: PackedLoss, rows: Reads, num_edges: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """[E] d sum / d log-probability of every edge, for a loss that states it beforehand; else None."""
    per_prediction = loss.coefficients(rows.facts(loss, device, dtype))
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
    loss: PackedLoss, logprobs: Tensor, entropies: Tensor | None, rows: Reads, values: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """The loss's unnormalised sum over some trajectories, and its metrics as (weighted sum, weight).

    Args:
        logprobs: [T], of the used predictions.
        entropies: [T], or None.
        values: [T] or [T, c], of the states that make these predictions; None for a loss that needs none.
    """
    return loss.packed(logprobs, entropies, rows.facts(loss, logprobs.device, logprobs.dtype), values)


class Evaluation(NamedTuple):
    """A loss over some trajectories with its gradients."""

    total: Tensor
    """The sum divided by the normaliser, detached."""
    sums: Metrics
    edges: Tensor | None
    """[T] d loss / d log-probability of each used prediction; None where the loss does not depend on them."""
    rows: Tensor | None
    """[T] d loss / d entropy, likewise."""
    values: Tensor | None = None
    """[T] or [T, c] d loss / d value, likewise."""


def evaluate_gradients(
    loss: PackedLoss,
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
    if values is None and "predicted_values" in loss.needs:
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
