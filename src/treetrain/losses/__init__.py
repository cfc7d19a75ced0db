"""Pure functions of log-probabilities and trajectory facts; they know nothing of trees."""

import inspect
from collections.abc import Callable
from typing import Any

from treetrain.losses.base import Loss, Metrics, add_metrics, mean_metrics
from treetrain.losses.critic import actor_critic, value
from treetrain.losses.distill import distill
from treetrain.losses.dr_grpo import dr_grpo
from treetrain.losses.facts import PackedFacts, Reduction
from treetrain.losses.gspo import gspo
from treetrain.losses.importance import IMPORTANCE_MODES, ImportanceMode
from treetrain.losses.kl import KL_ESTIMATORS, KLEstimator
from treetrain.losses.kto import kto
from treetrain.losses.mix import Mixture, mix
from treetrain.losses.policy import dapo, grpo, ppo, reinforce
from treetrain.losses.preference import dpo, ipo, simpo
from treetrain.losses.sft import sft
from treetrain.losses.value import value_loss

LOSSES: dict[str, Callable[..., Loss]] = {
    "sft": sft,
    "reinforce": reinforce,
    "ppo": ppo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "kto": kto,
    "distill": distill,
}
"""Every loss of a language-model head, by the name that the command line knows it by; `mix` combines them."""

__all__ = [
    "IMPORTANCE_MODES",
    "KL_ESTIMATORS",
    "LOSSES",
    "ImportanceMode",
    "KLEstimator",
    "Loss",
    "Metrics",
    "Mixture",
    "PackedFacts",
    "Reduction",
    "actor_critic",
    "add_metrics",
    "by_name",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "ipo",
    "kto",
    "mean_metrics",
    "mix",
    "ppo",
    "reinforce",
    "sft",
    "simpo",
    "value",
    "value_loss",
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
    required = [option for option in known if known[option].default is inspect.Parameter.empty]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}, which has no default")
    return LOSSES[name](**options)
