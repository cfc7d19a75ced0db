"""Callbacks for any `transformers.Trainer`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback


class WeightAverage(TrainerCallback):
    """Keeps an exponential moving average of the trained weights, in float32, and saves it at the end as a model.

    After every step: average <- decay * average + (1 - decay) * weights. It begins as the weights are when training
    begins, or goes on.

    Args:
        decay: 0 to below 1; 0.999 looks back about 1000 steps.
        folder: within the output folder, where the averaged model is saved at the end.

    Raises:
        ValueError: another decay.
    """

    def __init__(self, decay: float, folder: str = "ema") -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to below 1")
        self.decay, self.folder = decay, folder
        self.values: dict[str, Tensor] = {}
