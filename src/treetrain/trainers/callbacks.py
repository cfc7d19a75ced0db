"""Callbacks with state in checkpoints: numbers of the steps since the last log, and a moving weight average."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from treetrain.engine.loss import StepResult
from treetrain.trainers.checkpoints import save_whole

EXECUTION = "tree/"
"""Name prefix of numbers about the execution of steps."""
COUNTS = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
SUMMED = (*COUNTS, "seconds", "scoring_seconds", "tree_flops", "linear_flops")
"""Numbers that add up over steps."""


class StepLog(TrainerCallback):
    """Collects the numbers of steps; each log gives their sums, means and extremes since the last one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def add(self, result: StepResult, numbers: dict[str, float]) -> None:
        """Add a step.

        Args:
            result: of all its calls.
            numbers: further numbers of the step. Those in `SUMMED` add up; names ending in `_max` and `_min` are
                extremes; the others are averaged, as the loss and its metrics are.
        """
        counts = {name: getattr(result, name) for name in COUNTS}
        self.steps.append({"loss": result.loss} | result.metrics | counts | numbers)

    def read(self) -> dict[str, float]:
        """Return the numbers of these steps and clear them; empty if there was no step."""
        logs: dict[str, float] = {}
        for name in dict.fromkeys(name for step in self.steps for name in step):
            values = [step[name] for step in self.steps if name in step]
            if name in SUMMED:
                logs[EXECUTION + name] = sum(values)
            elif name.endswith(("_max", "_min")):
                logs[name] = (max if name.endswith("_max") else min)(values)
            else:
                logs[name] = sum(values) / len(values)
        if self.steps:
            logs[EXECUTION + "overlap"] = 1 - logs[EXECUTION + "unique_tokens"] / logs[EXECUTION + "flat_tokens"]
        if work := logs.get(EXECUTION + "tree_flops"):
            logs[EXECUTION + "ideal_speedup"] = logs[EXECUTION + "linear_flops"] / work
        self.steps = []
        return logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the steps of an earlier training."""
        self.steps = []

    def state_dict(self) -> dict[str, str]:
        """The numbers, as text."""
        return {"json": json.dumps(self.steps)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Restore the numbers."""
        self.steps = json.loads(state["json"])


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class WeightAverage(TrainerCallback):
    """Keeps an exponential moving average of the trained weights in float32, and saves it at the end as a model.

    After every step: average <- decay * average + (1 - decay) * weights. It starts as the weights at the start of
    training. `SafeCheckpointsMixin` saves it in checkpoints.

    Args:
        decay: 0 to below 1; 0.999 looks back about 1000 steps.
        folder: within the output folder, for the averaged model.

    Raises:
        ValueError: a decay out of this range.
    """

    def __init__(self, decay: float, folder: str = "ema") -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to below 1")
        self.decay, self.folder = decay, folder
        self.values: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Start from the current weights."""
        self.values = {name: p.detach().to(torch.float32, copy=True) for name, p in _trained(model).items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Add the weights of this step to the average."""
        for name, parameter in _trained(model).items():
            self.values[name].lerp_(parameter.float(), 1 - self.decay)

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **given: Any) -> None:
        """Save the averaged model; the average replaces the model's weights meanwhile."""
        trained = _trained(model)
        before = {name: parameter.clone() for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.copy_(self.values[name])
            save_whole(model, Path(args.output_dir, self.folder), given.get("processing_class"), write=args.should_save)
        finally:
            for name, parameter in trained.items():
                parameter.copy_(before[name])

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name."""
        return {"values": self.values}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an average."""
        for name, value in self.values.items():
            value.copy_(state["values"][name])


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
