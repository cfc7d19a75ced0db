"""Calls a loss on rows by itself, for values worked out by hand."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from treetrain import Trajectory, losses


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def value_and_gradients(
    loss: Any, rows: Sequence[Trajectory], now: Sequence[Sequence[float]]
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Value, gradient of every row and mean metrics, at the rows' log-probabilities `now`."""
    logprobs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in now]
    total, metrics = loss(logprobs, None, rows)
    value = total / loss.normaliser(rows)
    found = torch.autograd.grad(value, logprobs, allow_unused=True, materialize_grads=True)
    return value.item(), [gradient.tolist() for gradient in found], losses.mean_metrics(metrics)
