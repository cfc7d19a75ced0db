"""Checks of the settings of a step."""

from collections.abc import Sequence

import torch
from torch import nn


def check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError where a backward could not reach any parameter."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
    if not any(p.requires_grad for p in parameters):
        raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")


def check_temperature(temperature: float) -> float:
    """A temperature above 0. Raises ValueError for anything else."""
    if temperature > 0 and temperature != float("inf"):
        return float(temperature)
    raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")
