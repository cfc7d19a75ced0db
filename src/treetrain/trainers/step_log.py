"""Numbers of training steps, kept until they are logged: means, sums and extremes over the steps in between."""

import json
import resource
import sys
from typing import Any

import torch
from transformers import TrainerCallback

from treetrain.engine.results import StepResult, add_metrics, mean_metrics

EXECUTION = "tree/"
"""Beginning of the names of what tells how a step was executed."""
COUNTS = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
SUMMED = (*COUNTS, "seconds", "scoring_seconds", "tree_flops", "linear_flops")
"""Numbers that add up over steps."""


class StepLog(TrainerCallback):
    """The steps since the last log. A callback, so that checkpoints hold them (see `SafeCheckpointsMixin`)."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._losses: list[float] = []
        self._metrics: Any = {}
        self._numbers: list[dict[str, float]] = []

    def add(self, result: StepResult, numbers: dict[str, float]) -> None:
        """A step is done.

        Args:
            result: of all its calls.
            numbers: what else is known of it. Those in `SUMMED` tell how it was executed, and add up; names ending in
                `_max` and `_min` are extremes; of others the mean is logged.
        """
        self._losses.append(result.loss)
        self._metrics = add_metrics(self._metrics, result.metric_sums)
        self._numbers.append({name: getattr(result, name) for name in COUNTS} | numbers)

    def read(self) -> dict[str, float]:
        """The numbers of these steps; empty where there was none. Begins anew."""
        if not self._losses:
            return {}
        found = mean_metrics(self._metrics) | {"loss": sum(self._losses) / len(self._losses)}
        for name in dict.fromkeys(name for numbers in self._numbers for name in numbers):
            values = [numbers[name] for numbers in self._numbers if name in numbers]
            if name in SUMMED:
                found[EXECUTION + name] = sum(values)
            elif name.endswith(("_max", "_min")):
                found[name] = (max if name.endswith("_max") else min)(values)
            else:
                found[name] = sum(values) / len(values)
        found[EXECUTION + "overlap"] = 1 - found[EXECUTION + "unique_tokens"] / found[EXECUTION + "flat_tokens"]
        if work := found.get(EXECUTION + "tree_flops"):
            found[EXECUTION + "ideal_speedup"] = found[EXECUTION + "linear_flops"] / work
        self._begin()
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """No step has been made."""
        self._begin()

    def state_dict(self) -> dict[str, str]:
        """The numbers, as text."""
        metrics = {name: [float(total), float(weight)] for name, (total, weight) in self._metrics.items()}
        return {"json": json.dumps([self._losses, metrics, self._numbers])}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on with these."""
        self._losses, metrics, self._numbers = json.loads(state["json"])
        self._metrics = {name: tuple(pair) for name, pair in metrics.items()}


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
