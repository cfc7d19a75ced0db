"""Numbers of training steps, kept until they are logged: means, sums and extremes over the steps in between."""

import resource
import sys
from typing import Any

import torch

from treetrain.engine.evaluate import add_sums, means
from treetrain.engine.step import StepResult

SUMMED = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts", "forward_backward_seconds")
"""Numbers that add up over steps."""
_WORK = ("tree_flops", "linear_flops")


class StepLog:
    """The steps since the last log."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._metrics: Any = {}
        self._numbers: list[dict[str, float]] = []

    def add(self, result: StepResult, numbers: dict[str, float]) -> None:
        """A step is done.

        Args:
            result: of all its calls.
            numbers: what else is known of it. Those in `SUMMED` add up; names ending in `_max` and `_min` are extremes;
                of others the mean is logged.
        """
        self._losses.append(result.loss)
        self._metrics = add_sums(self._metrics, result.metric_sums)
        counts = {name: getattr(result, name) for name in SUMMED if hasattr(result, name)}
        self._numbers.append({**counts, **numbers})

    def read(self) -> dict[str, float]:
        """The numbers of these steps; empty where there was none. Begins anew."""
        if not self._losses:
            return {}
        found = means(self._metrics) | {"loss": sum(self._losses) / len(self._losses)}
        for name in dict.fromkeys(name for numbers in self._numbers for name in numbers):
            values = [numbers[name] for numbers in self._numbers if name in numbers]
            if name in SUMMED or name in _WORK:
                found[name] = sum(values)
            else:
                found[name] = (
                    max(values)
                    if name.endswith("_max")
                    else min(values)
                    if name.endswith("_min")
                    else sum(values) / len(values)
                )
        found["overlap"] = 1 - found["unique_tokens"] / found["flat_tokens"]
        tree, linear = (found.pop(name, 0.0) for name in _WORK)
        if tree:
            found["ideal_speedup"] = linear / tree
        self.__init__()
        return found


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
