"""A moving average of the weights, as a callback of any `transformers.Trainer`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from treetrain.trainers.checkpoints import save_whole


class WeightAverage(TrainerCallback):
    """Keeps an exponential moving average of the trained weights in float32, and saves it at the end as a model.

    After every step: average <- decay * average + (1 - decay) * weights. It begins as the weights are when training
    begins. Checkpoints of `SafeCheckpointsMixin` hold it.

    Args:
        decay: 0 to below 1; 0.999 looks back about 1000 steps.
        folder: within the output folder, for the averaged model.

    Raises:
        ValueError: another decay.
    """

    def __init__(self, decay: float, folder: str = "ema") -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to below 1")
        self.decay, self.folder = decay, folder
        self.values: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Begin with the weights as they are."""
        self.values = {n: p.detach().to(torch.float32, copy=True) for n, p in _trained(model)}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Take in the weights of this step."""
        for name, parameter in _trained(model):
            self.values[name].lerp_(parameter.detach().float(), 1 - self.decay)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **given: Any) -> None:
        """Save the averaged model."""
        with self.in_place(model):
            save_whole(model, Path(args.output_dir, self.folder), given.get("processing_class"), write=args.should_save)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """For the length of the block the model has the average as its weights."""
        with torch.no_grad():
            aside = {name: parameter.detach().clone() for name, parameter in _trained(model)}
            _set(model, self.values)
        try:
            yield
        finally:
            with torch.no_grad():
                _set(model, aside)

    def state_dict(self) -> dict[str, Any]:
        """The average by the parameters' names."""
        return {"values": self.values}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an average."""
        for name, value in self.values.items():
            value.copy_(state["values"][name])


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _set(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in _trained(model):
        parameter.copy_(values[name])
