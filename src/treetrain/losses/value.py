"""Losses on values that the model predicts.

v = the value predicted for the state before a token, R = its return, both in the unit of the rewards.
"""

import dataclasses
import math

import torch
from torch import Tensor

from treetrain.engine.loss import Metrics
from treetrain.losses.loss import Facts, Loss, LossSum, Reduction, check_number, weighted_means


def clipped_value_loss(
    predicted: Tensor, facts: Facts, *, clip: float | None, reduction: Reduction
) -> tuple[Tensor, Metrics]:
    """The sum and the metrics of `value`, for predicted values [T]."""
    returns, shares = facts.returns, facts.shares(reduction)
    error = (predicted - returns).square()
    held = torch.zeros_like(error, dtype=torch.bool)
    if clip is not None:
        change = predicted - facts.values
        clipped = (facts.values + change.clamp(-clip, clip) - returns).square()
        # Where nothing is clipped both are equal but for rounding, which must not count.
        held = (change.abs() > clip) & (clipped > error)
        error = torch.where(held, clipped.detach(), error)
    watched = {
        "value_loss": 0.5 * error,
        "value": predicted,
        "value_clip_fraction": held.to(predicted.dtype),
        "value_error": (returns - predicted.detach()).square(),
        "return": returns,
        "return_square": returns.square(),
    }
    return 0.5 * (shares * error).sum(), weighted_means(watched, shares)


def value_facts(clip: float | None) -> tuple[str, ...]:
    """The facts that a value loss reads."""
    return ("returns",) if clip is None else ("returns", "values")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped value loss alone. Made by `value`."""

    mergeable = True  # it does not read the advantage

    clip: float | None
    """How far a value may move from the old one; None for the plain square."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        if self.clip is not None:
            check_number("clip", self.clip, 0.0, math.inf)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("predicted_values", *value_facts(self.clip))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        assert values is not None
        return clipped_value_loss(values, facts, clip=self.clip, reduction=self.reduction)


def value(*, clip: float | None = 0.2, reduction: Reduction = "token") -> ValueLoss:
    """A critic's loss: PPO's clipped value loss, max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2.

    v is the value predicted now, old that when the rows were sampled (`values`), R the return (`returns`). The larger
    of both errors keeps v near its old value and never rewards a step away from the return. Implementations of PPO
    (arXiv 1707.06347) add it to the policy loss, see `ppo`; the paper itself has the plain square.

    For a model for token classification with one label, or a value head on a causal LM (`TreeEngine(model,
    value_head=...)`). A row's entry t is about the state before its token t: v is predicted from the hidden state of
    token t - 1.

    Args:
        clip: c, 0 or more; None for (v - R)^2 / 2, without `values`.
        reduction: "token" (default), the mean over all tokens; "trajectory", over each row's tokens first.

    Metrics: value_loss, value, value_clip_fraction (tokens whose gradient is 0), and the two sums that explained
    variance is made of: value_error (mean of (R - v)^2) and return_square (mean of R^2, with `return` its mean).

    Raises:
        ValueError: an argument out of its range.
    """
    return ValueLoss(clip=clip, reduction=reduction)
