"""AdamW with its two groups of parameters, and the learning rate over the steps of a run."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from treetrain.train.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: matrices are decayed; norms and biases, which are vectors, are not.

    Tied parameters are in one group once.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters.

    Raises:
        ValueError: the model has none.
    """
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; nothing can be trained")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def lr_factor(step: int, *, total: int, warmup: int, schedule: str, min_ratio: float) -> float:
    """Learning rate of step `step` (from 0) as a share of its peak.

    The warm-up rises linearly and reaches 1 at its last step; the cosine reaches `min_ratio` at the last step of all.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    rest = total - warmup - 1
    progress = min((step - warmup) / rest, 1.0) if rest > 0 else 0.0
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int) -> LambdaLR:
    """The configured warm-up and schedule over `total_steps` steps."""
    warmup = config.warmup(total_steps)

    def factor(step: int) -> float:
        return lr_factor(
            step, total=total_steps, warmup=warmup, schedule=config.schedule, min_ratio=config.min_lr_ratio
        )

    return LambdaLR(optimizer, factor)
