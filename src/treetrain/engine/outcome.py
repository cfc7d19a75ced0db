"""What a step's loss came to, brought from the device when somebody first asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetrain.engine.evaluate import MetricSums, add_sums, means

HostSums = dict[str, tuple[float, float]]
"""Name -> (weighted sum, weight)."""
Numbers = Callable[[], list[float]]
"""Gives numbers, waiting for the device where it must."""


@dataclass(frozen=True, slots=True)
class Found:
    """A step's loss and metrics as plain numbers."""

    loss: float
    metrics: dict[str, float]
    metric_sums: HostSums


class Outcome:
    """A `Found` that is made when it is first asked for, and kept; a step that is run meanwhile changes nothing of it.

    Args:
        find: makes it.
    """

    __slots__ = ("_state",)

    def __init__(self, find: Callable[[], Found]):
        self._state: Found | Callable[[], Found] = find

    @classmethod
    def of(cls, total: Any, sums: MetricSums) -> "Outcome":
        """Of one step's loss and metrics, as they are now: plain numbers, or tensors of one number."""
        names = list(sums)
        numbers = on_host([total, *(number for pair in sums.values() for number in pair)])

        def find() -> Found:
            loss, *rest = numbers()
            found = dict(zip(names, zip(rest[0::2], rest[1::2]), strict=True))
            return Found(loss, means(found), found)

        return cls(find)

    @classmethod
    def together(cls, parts: Sequence["Outcome"], change: Callable[[MetricSums], MetricSums], over: int) -> "Outcome":
        """Of several parts of a step: losses and metric sums added up.

        Args:
            change: of the sums, before means are taken.
            over: divides the loss.
        """

        def find() -> Found:
            found = [part.found for part in parts]
            sums: MetricSums = {}
            for part in found:
                sums = add_sums(sums, part.metric_sums)
            sums = change(sums)
            return Found(sum(part.loss for part in found) / over, means(sums), sums)

        return cls(find)

    @property
    def found(self) -> Found:
        """The numbers. Where they are still to come from a GPU, this waits for the step, not for what came after."""
        state = self._state
        if not isinstance(state, Found):
            state = self._state = state()
        return state


def on_host(values: Sequence[Any]) -> Numbers:
    """Numbers and tensors of one number, as floats, in one copy from each device.

    The copy is taken and set off now. A later change of the tensors does not reach it.
    """
    values = [x.detach() if isinstance(x, Tensor) else x for x in values]
    fixed = [None if isinstance(x, Tensor) and x.device.type != "cpu" else float(x) for x in values]
    there: dict[torch.device, list[int]] = {}
    for place, (x, known) in enumerate(zip(values, fixed)):
        if known is None:
            there.setdefault(x.device, []).append(place)
    copies = [(places, _set_off([values[n] for n in places], device)) for device, places in there.items()]

    def numbers() -> list[float]:
        found = list(fixed)
        for places, copy in copies:
            for place, number in zip(places, copy(), strict=True):
                found[place] = number
        return found  # type: ignore[return-value]

    return numbers


def _set_off(tensors: Sequence[Tensor], device: torch.device) -> Numbers:
    """The values of tensors of one number, on their way to the host."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, x in enumerate(tensors):
        kinds.setdefault(x.dtype, []).append(place)
    # One stack for each dtype, so that the number of kernels does not grow with that of metrics.
    order = [place for places in kinds.values() for place in places]
    stacks = [torch.stack([tensors[n].reshape(()) for n in places]).double() for places in kinds.values()]
    together = torch.cat(stacks)
    if device.type == "cuda":
        host = torch.empty(len(together), dtype=together.dtype, pin_memory=True).copy_(together, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))

    def numbers() -> list[float]:
        if device.type == "cuda":
            arrived.synchronize()
        given = (host if device.type == "cuda" else together).tolist()
        return [number for _, number in sorted(zip(order, given, strict=True))]

    return numbers
