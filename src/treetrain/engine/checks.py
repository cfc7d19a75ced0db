"""What is checked before a step: that something can be trained, and what its loss is divided by."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from treetrain.data.trajectory import Trajectory


def check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError where a backward could not reach any parameter."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
    if not any(p.requires_grad for p in parameters):
        raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")


def step_loss(loss: Any, trajectories: Sequence[Trajectory], normaliser: float | None) -> Any:
    """The loss with what it must know of the whole step, which these trajectories are unless a normaliser is given.

    Raises:
        ValueError: a part of a step, and a loss that was not told of the whole one.
    """
    if normaliser is None:
        return loss.for_step(trajectories) if hasattr(loss, "for_step") else loss
    if getattr(loss, "needs_step", False):
        raise ValueError(
            f"{type(loss).__name__} was given a normaliser, so a part of a step, but was not told of the whole step: "
            "call loss = loss.for_step(all trajectories of the step) first, and pass loss.normaliser(the same)"
        )
    return loss


def step_normaliser(loss: Any, trajectories: Sequence[Trajectory], normaliser: float | None) -> float:
    """What a step's sum is divided by; checks first that the loss finds every fact it needs.

    Raises:
        DataError: a fact is missing, or nothing is trained.
        ValueError: a normaliser that is not above 0 and finite.
    """
    if hasattr(loss, "check"):
        loss.check(trajectories)
    return check_normaliser(loss.normaliser(trajectories) if normaliser is None else normaliser)


def check_normaliser(normaliser: float) -> float:
    """A normaliser above 0 and finite. Raises ValueError for anything else."""
    value = float(normaliser)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"the normaliser is {value}; a step's loss is divided by it, so it must be above 0 and finite")
    return value


def check_temperature(temperature: float) -> float:
    """A temperature above 0. Raises ValueError for anything else."""
    if temperature > 0 and temperature != float("inf"):
        return float(temperature)
    raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")
