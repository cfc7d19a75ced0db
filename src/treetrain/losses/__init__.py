"""Pure functions of log-probabilities and trajectory facts; they know nothing of trees."""

import inspect
from collections.abc import Callable
from typing import Any

from treetrain.losses.base import Loss, Metrics, add_metrics, mean_metrics
from treetrain.losses.facts import PackedFacts, Reduction
from treetrain.losses.kl import KL_ESTIMATORS, KLEstimator
from treetrain.losses.policy import grpo, ppo, reinforce
from treetrain.losses.preference import dpo, ipo, simpo
from treetrain.losses.sft import sft

LOSSES: dict[str, Callable[..., Loss]] = {
    "sft": sft,
    "reinforce": reinforce,
    "ppo": ppo,
    "grpo": grpo,
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
}
"""Every loss by the name that the command line knows it by."""

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "KLEstimator",
    "Loss",
    "Metrics",
    "PackedFacts",
    "Reduction",
    "add_metrics",
    "by_name",
    "dpo",
    "grpo",
    "ipo",
    "mean_metrics",
    "ppo",
    "reinforce",
    "sft",
    "simpo",
]


def by_name(name: str, **options: Any) -> Loss:
    """A loss from its name and its factory's keyword arguments.

    Raises:
        ValueError: an unknown name or option, with those that exist; an option out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
    known = inspect.signature(LOSSES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return LOSSES[name](**options)
