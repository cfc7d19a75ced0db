"""The learning rate over the steps of a run: a warm-up, then one of four shapes."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from treetrain.train.config import TrainConfig


def lr_factor(step: int, *, total: int, warmup: int, schedule: str, min_ratio: float, decay: int = 0) -> float:
    """Learning rate of step `step` (from 0) as a share of its peak.

    The warm-up rises linearly and reaches 1 at its last step; what falls reaches `min_ratio` at the last step of all.

    Args:
        step: from 0 to total - 1.
        total: steps of the run.
        warmup: steps of warm-up.
        schedule: "constant"; "cosine" (half a cosine) and "linear" fall from the warm-up on; "wsd" stays at 1 and falls
            linearly over the last `decay` steps.
        min_ratio: the share of the last step.
        decay: steps of the fall of "wsd".
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    start = max(total - 1 - decay, warmup) if schedule == "wsd" else warmup
    if step <= start or total - 1 <= start:
        return 1.0
    progress = min((step - start) / (total - 1 - start), 1.0)
    rest = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * rest


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int) -> LambdaLR:
    """The configured warm-up and schedule over `total_steps` steps."""
    warmup, decay = config.warmup(total_steps), config.decay(total_steps)

    def factor(step: int) -> float:
        return lr_factor(
            step,
            total=total_steps,
            warmup=warmup,
            schedule=config.schedule,
            min_ratio=config.min_lr_ratio,
            decay=decay,
        )

    return LambdaLR(optimizer, factor)
