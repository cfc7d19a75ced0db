"""Losses on values that the model predicts.

v = the value predicted for the state before a token, R = its return, both in the unit of the rewards.
"""

import dataclasses
import math

import torch
from torch import Tensor

from treetrain.engine.loss import Metrics
from treetrain.losses.loss import Facts, Loss, LossSum, Reduction, check_number, weighted_means


def value_loss(
    predicted: Tensor, facts: Facts, *, clip: float | None = 0.2, reduction: Reduction = "token"
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss: max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, an unnormalised sum.

    v is the value predicted now, old that when the rows were sampled (`values`), R the return (`returns`). The larger
    of both errors keeps v near its old value and never rewards a step away from the return. Implementations of PPO
    (arXiv 1707.06347) add it to the policy loss; the paper itself has the plain square. Divide it by the normaliser
    of the policy loss of the same reduction, and add it with a coefficient (0.5 is common).

    Args:
        predicted: [T], for the predictions that `facts` holds, in the unit of the returns.
        facts: with returns, and with values unless `clip` is None.
        clip: c, 0 or more; None for (v - R)^2 / 2, without old values.
        reduction: how tokens are weighed, as in the losses.

    Metrics: value_loss, value, value_clip_fraction (tokens whose gradient is 0), and the two sums that explained
    variance is made of: value_error (mean of (R - v)^2) and return_square (mean of R^2, with `return` its mean).

    Raises:
        DataError: a trained trajectory without returns or values.
        ValueError: shapes that disagree, or a clip below 0.
    """
    if predicted.shape != (len(facts),):
        raise ValueError(f"predicted values have shape {tuple(predicted.shape)}, the facts {len(facts)} predictions")
    check_clip(clip)
    facts = facts.like(predicted)
    returns, shares = facts.returns, facts.shares(reduction)
    # Not a product with 0: the head may give NaN or infinity at untrained tokens.
    predicted = torch.where(shares != 0, predicted, 0)
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


def check_clip(clip: float | None, name: str = "clip") -> None:
    """Raise ValueError unless it is None or a number from 0 on."""
    if clip is not None:
        check_number(name, clip, 0.0, math.inf)


def value_facts(clip: float | None) -> tuple[str, ...]:
    """The facts that `value_loss` reads."""
    return ("returns",) if clip is None else ("returns", "values")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped value loss alone. Made by `value`."""

    mergeable = True  # it does not read the advantage

    clip: float | None
    """How far a value may move from the old one; None for the plain square."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_clip(self.clip)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("predicted_values", *value_facts(self.clip))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        assert values is not None
        return value_loss(values, facts, clip=self.clip, reduction=self.reduction)


def value(*, clip: float | None = 0.2, reduction: Reduction = "token") -> ValueLoss:
    """A critic's loss: PPO's clipped value loss (see `value_loss`) on values that the model predicts.

    For a model for token classification with one label, or a value head on a causal LM (`TreeEngine(model,
    value_head=...)`). A row's entry t is about the state before its token t: the value is predicted from the hidden
    state of token t - 1, `returns[t]` is what it should be, `values[t]` what it was when the row was sampled.

    Args:
        clip: how far a value may move from the old one, 0 or more; None for (v - R)^2 / 2, without `values`.
        reduction: "token" (default), the mean over all tokens; "trajectory", over each row's tokens first.

    Metrics: those of `value_loss`.

    Raises:
        ValueError: an argument out of its range.
    """
    return ValueLoss(clip=clip, reduction=reduction)
