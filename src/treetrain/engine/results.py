"""The result of a step: a loss and metrics that stay on the device until they are read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, tuple[Any, Any]]
"""Name -> (weighted sum, weight), numbers or scalar tensors; those of parts, micro-batches and ranks are added."""


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two parts as those of both."""
    total = dict(a)
    for name, (value, weight) in b.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + value, before[1] + weight)
    return total


def read_metrics(sums: Metrics) -> Metrics:
    """Metrics as floats, in one copy from the device."""
    numbers = _read(number for pair in sums.values() for number in pair)
    return dict(zip(sums, zip(numbers[0::2], numbers[1::2])))


def mean_metrics(sums: Metrics) -> dict[str, float]:
    """Weighted sums to means; a metric without weight is left out."""
    return {name: total / weight for name, (total, weight) in read_metrics(sums).items() if weight != 0}


def _read(values: Iterable[Any]) -> list[float]:
    values = [x.detach().reshape(()) if isinstance(x, Tensor) else float(x) for x in values]
    tensors = [x for x in values if isinstance(x, Tensor)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), "cpu")
    numbers = iter(torch.stack([x.to(device, torch.float64) for x in tensors]).tolist() if tensors else [])
    return [next(numbers) if isinstance(x, Tensor) else x for x in values]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one `TreeEngine.forward_backward`.

    Reading `loss` or `metrics` waits for the device; until then a GPU may still be running the step.
    """

    loss_tensor: Tensor | float
    """The loss where it was computed: a detached tensor of one number, or a number."""
    metric_sums: Metrics = field(repr=False)
    """Name -> (weighted sum, weight) of what the loss reports, to be added over calls; see `Metrics`."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: the tree's, less those that no wanted prediction depends on."""
    recomputed_tokens: int
    """Tokens of the passes without graph: prefills, and whole passes before the first backward."""
    parts: int
    """Forward-backward passes it took."""

    @cached_property
    def loss(self) -> float:
        """Sum over all trajectories divided by the normaliser."""
        return _read([self.loss_tensor])[0]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Means of what the loss reports."""
        return mean_metrics(self.metric_sums)

    def on_host(self) -> "StepResult":
        """The same with plain numbers; waits for the device."""
        return replace(self, loss_tensor=self.loss, metric_sums=read_metrics(self.metric_sums))


def summed(results: Sequence[StepResult], *, over: int = 1) -> StepResult:
    """The results of a step's parts as one, without waiting for the device.

    Args:
        over: divides the loss.
    """
    if len(results) == 1 and over == 1:
        return results[0]
    sums: Metrics = {}
    for result in results:
        sums = add_metrics(sums, result.metric_sums)
    return StepResult(
        loss_tensor=sum(result.loss_tensor for result in results) / over,
        metric_sums=sums,
        flat_tokens=sum(result.flat_tokens for result in results),
        unique_tokens=sum(result.unique_tokens for result in results),
        computed_tokens=sum(result.computed_tokens for result in results),
        recomputed_tokens=sum(result.recomputed_tokens for result in results),
        parts=sum(result.parts for result in results),
    )
