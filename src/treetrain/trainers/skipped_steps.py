"""Steps whose gradient is NaN or infinite: they are skipped and counted, and what is not finite is found."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.core.engine.model_state import own_part

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts skipped steps, the same on all ranks; checkpoints keep the counts."""

    def __init__(self) -> None:
        self.total = self.in_a_row = 0
        self.last = False
        """Whether the last step was skipped."""

    def count(self, skip: bool) -> None:
        """Count a step."""
        self.total += skip
        self.last = skip
        self.in_a_row = self.in_a_row + 1 if skip else 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with these counts."""
        self.total, self.in_a_row = state["total"], state["in_a_row"]


def skip_next_step(optimizer: Any, why: str) -> None:
    """Let the next call of an optimizer's `step` do nothing, and log why."""
    logger.warning(why)
    before = vars(optimizer).get("step")

    def skipped(*_: object, **__: object) -> None:
        del optimizer.step
        if before is not None:
            optimizer.step = before

    optimizer.step = skipped


def not_finite(model: nn.Module, optimizer: Any = None) -> Iterator[tuple[str, str]]:
    """Yield (what it is, its name) of all that is NaN or infinite on this rank: weights, buffers, optimizer state.

    Args:
        optimizer: the state of these weights is looked at too.
    """
    names = {p: name for name, p in model.named_parameters()}
    for p, name in names.items():
        if not _is_finite(p):
            yield "weights", name
    for name, buffer in model.named_buffers():
        if not _is_finite(buffer):
            yield "buffers", name
    for p, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Tensor) and not _is_finite(value):
                yield "states of the optimizer", f"{key} of {names.get(p, 'a parameter')}"


def _is_finite(tensor: Tensor) -> bool:
    part = own_part(tensor.detach())
    # Weights of one byte are quantised; torch has no minimum of them.
    if part.is_meta or not part.numel() or not part.is_floating_point() or part.dtype.itemsize == 1:
        return True
    least, most = torch.aminmax(part)
    return math.isfinite(least + 0 * most)
