"""The best evaluation of a run: when to stop for want of a better one, and the weights it had."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.train.config import TrainConfig


class Best:
    """Follows evaluations; lower is better.

    Args:
        model: whose weights are kept.
        patience: so many evaluations in a row without a better one end the run; 0 never ends it.
        min_delta: a value is better only if it is lower by more than this.
        keep: whether the weights of the best evaluation are kept, in CPU memory.
    """

    def __init__(self, model: nn.Module, *, patience: int, min_delta: float, keep: bool) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._patience, self._min_delta, self._keep = patience, min_delta, keep
        self.value, self.step, self.worse = math.inf, 0, 0
        self._weights: dict[str, Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig) -> "Best | None":
        """As a run's settings say; None where evaluations are not compared."""
        if not config.follows_best:
            return None
        patience, min_delta = config.early_stop_patience, config.early_stop_min_delta
        return cls(model, patience=patience, min_delta=min_delta, keep=config.keep_best)

    def add(self, step: int, value: float) -> None:
        """An evaluation after `step` steps."""
        if not value < self.value - (self._min_delta if math.isfinite(self.value) else 0.0):
            self.worse += 1
            return
        self.value, self.step, self.worse = value, step, 0
        if self._keep:
            self._weights = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    @property
    def exhausted(self) -> bool:
        """Whether the run should end."""
        return 0 < self._patience <= self.worse

    @torch.no_grad()
    def restore(self) -> bool:
        """Give the model the weights of the best evaluation; False where none are kept."""
        if self._weights is None:
            return False
        for name, parameter in self._parameters.items():
            parameter.copy_(self._weights[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """All of it, the kept weights too."""
        return {"value": self.value, "step": self.step, "worse": self.worse, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.value, self.step, self.worse = state["value"], state["step"], state["worse"]
        self._weights = state["weights"]
