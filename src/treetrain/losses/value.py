"""Regression of a value head on returns. A function of predicted values, for models that have such a head."""

import torch
from torch import Tensor

from treetrain.losses.base import Metrics, check_number
from treetrain.losses.facts import Facts, Reduction


def value_loss(
    predicted: Tensor, facts: Facts, *, clip: float | None = 0.2, reduction: Reduction = "token"
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss: max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, an unnormalised sum.

    v is the value predicted now, old that when the rows were sampled (`values`), R the return (`returns`). The larger
    of both errors holds v near its old value without ever rewarding a step away from the return. It is what
    implementations of PPO (arXiv 1707.06347) add to the policy loss; the paper itself has the plain square. To be
    divided by the normaliser of the policy loss of the same reduction, and added with a coefficient (0.5 is common).

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
    if clip is not None:
        check_number("clip", clip, 0.0, float("inf"))
    facts = facts.like(predicted)
    returns, shares = facts.returns, facts.shares(reduction)
    # Not multiplied by 0: what a head says of untrained tokens may be anything.
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
        "value_loss": 0.5 * error.detach(),
        "value": predicted.detach(),
        "value_clip_fraction": held.to(predicted.dtype),
        "value_error": (returns - predicted.detach()).square(),
        "return": returns,
        "return_square": returns.square(),
    }
    weight = shares.sum()
    metrics: Metrics = {name: ((shares * x).sum(), weight) for name, x in watched.items()}
    return 0.5 * (shares * error).sum(), metrics
