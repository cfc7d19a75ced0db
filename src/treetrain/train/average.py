"""The exponential moving average of the weights, kept in float32 beside them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.train.sharding import local


class WeightAverage:
    """After every step: average <- decay * average + (1 - decay) * weights. It begins as the weights are.

    Args:
        model: its trainable parameters are averaged; what is frozen is not copied.
        decay: 0 to below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values: dict[str, Tensor] = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        # Of shards every rank averages its own; float32 is the least that the average has.
        current = [local(parameter.detach()).float() for parameter in self._parameters.values()]
        own = [local(value) for value in self.values.values()]
        torch._foreach_lerp_(own, current, 1 - self.decay)  # type: ignore[attr-defined]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For the length of the block the model has the average as its weights."""
        with torch.no_grad():
            aside = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self._set(self.values)
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(aside)

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """The average by the parameters' names."""
        return {"values": self.values}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an average."""
        for name, value in self.values.items():
            value.copy_(state["values"][name])
