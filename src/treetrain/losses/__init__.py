"""Losses: pure functions of log-probabilities and facts of rows, called without a tree."""

import inspect
from collections.abc import Callable
from typing import Any

from treetrain.engine.loss import Facts, Loss, Metrics, Reduction, add_metrics, mean_metrics
from treetrain.losses.losses import (
    IMPORTANCE_MODES,
    KL_ESTIMATORS,
    REQUIRED,
    ImportanceMode,
    KLEstimator,
    PolicyLoss,
    dapo,
    distill,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    sft,
    value,
)

LOSSES: dict[str, Callable[..., Loss]] = {
    "sft": sft,
    "reinforce": reinforce,
    "ppo": ppo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "dpo": dpo,
    "distill": distill,
}
"""Losses on a language-model head by their command-line names."""

__all__ = [
    "IMPORTANCE_MODES",
    "KL_ESTIMATORS",
    "LOSSES",
    "Facts",
    "ImportanceMode",
    "KLEstimator",
    "Loss",
    "Metrics",
    "PolicyLoss",
    "Reduction",
    "add_metrics",
    "by_name",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "mean_metrics",
    "ppo",
    "reinforce",
    "sft",
    "value",
]


def by_name(name: str, **options: Any) -> Loss:
    """A loss from its name and its options as keyword arguments.

    Raises:
        ValueError: an unknown name or option, a missing option, or one out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
    known = inspect.signature(LOSSES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; it has {', '.join(known)}")
    missing = [option for option, has in known.items() if has.default is REQUIRED and option not in options]
    if missing:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}, which has no default")
    return LOSSES[name](**options)
