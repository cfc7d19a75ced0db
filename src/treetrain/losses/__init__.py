"""Losses: pure functions of log-probabilities and facts of rows, called without a tree."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from treetrain.engine.loss import Facts, Loss, Metrics, Reduction, add_metrics, mean_metrics
from treetrain.losses.losses import (
    IMPORTANCE_MODES,
    KL_ESTIMATORS,
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
from treetrain.losses.mix import Mixture, mix

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
"""Losses on a language-model head by their command-line names; `mix` combines them."""

__all__ = [
    "IMPORTANCE_MODES",
    "KL_ESTIMATORS",
    "LOSSES",
    "Facts",
    "ImportanceMode",
    "KLEstimator",
    "Loss",
    "Metrics",
    "Mixture",
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
    "mix",
    "ppo",
    "reinforce",
    "sft",
    "value",
]


def by_name(name: str, **options: Any) -> Loss:
    """A loss from its name and its factory's keyword arguments.

    Raises:
        ValueError: an unknown name or option, a missing option, or one out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
    known = options_of(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; it has {', '.join(known)}")
    missing = [option for option, default in known.items() if default is REQUIRED and option not in options]
    if missing:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}, which has no default")
    return LOSSES[name](**options)


REQUIRED = inspect.Parameter.empty


def options_of(name: str) -> dict[str, Any]:
    """The options of a loss with their defaults; `REQUIRED` stands for no default."""
    options: dict[str, Any] = {}
    defaults = {field.name: field.default for field in dataclasses.fields(PolicyLoss)}
    for parameter in inspect.signature(LOSSES[name]).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            (shared,) = get_args(parameter.annotation)  # Unpack[a TypedDict]
            options |= {option: defaults[option] for option in get_type_hints(shared)}
        else:
            options[parameter.name] = parameter.default
    return options
