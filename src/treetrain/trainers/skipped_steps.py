"""Steps whose gradient is NaN or infinite: they are skipped and counted, and weights that are not finite are found."""

import logging
import math
from typing import Any

import torch
from torch import nn

from treetrain.engine.extensions.process_group import own_part

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts skipped steps, the same on all ranks; checkpoints keep the counts."""

    def __init__(self) -> None:
        self.total = self.in_a_row = 0

    def count(self, skip: bool) -> None:
        """Count a step."""
        self.total += skip
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


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of a trained weight that is NaN or infinite on this rank; None if all are finite."""
    trained = ((name, own_part(p.detach())) for name, p in model.named_parameters() if p.requires_grad)
    limits = ((name, torch.aminmax(p)) for name, p in trained if p.numel() and p.is_floating_point())
    return next((name for name, (least, most) in limits if not math.isfinite(least + 0 * most)), None)
