"""One setting at a time: a value of the right kind, within its bounds. The same for flags, files and callers."""

import dataclasses
import math
import os
import types
import typing
from typing import Any, Literal, TypeGuard

from treetrain.train.settings import SECTIONS

LARGEST_COUNT = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Of a number. `above` and `below` exclude the bound itself."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False
    """Infinity is a value like any other."""

    def hold(self, value: float) -> bool:
        """Whether the value lies within."""
        if not (math.isfinite(value) or (self.infinite and value == math.inf)):
            return False
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)

    def refusal(self, name: str, value: float) -> str:
        """What is wrong with a value that does not."""
        if self.above and value == self.low:
            return f"{name} is {value!r}; it must be above {self.low:g}"
        if self.below and value == self.high:
            return f"{name} is {value!r}; it must be below {self.high:g}"
        return f"{name} is {value!r}; allowed are {self}"

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"from {self.low:g}"
        if self.high == math.inf:
            return f"numbers {low}{' (infinity too)' if self.infinite else ' to any finite one'}"
        return f"numbers {low} {f'to below {self.high:g}' if self.below else f'to {self.high:g}'}"


POSITIVE, SHARE = Bounds(above=True), Bounds(high=1)
NUMBERS = {
    "lr": POSITIVE,
    "weight_decay": Bounds(),
    "temperature": POSITIVE,
    "max_grad_norm": POSITIVE,
    "beta1": Bounds(high=1, below=True),
    "beta2": Bounds(high=1, below=True),
    "min_lr_ratio": SHARE,
    "warmup_fraction": SHARE,
    "eval_fraction": Bounds(high=1, below=True),
    "clip": SHARE,
    "clip_low": SHARE,
    "clip_high": Bounds(infinite=True),
    "kl": Bounds(),
    "entropy": Bounds(),
    "importance_cap": POSITIVE,
    "beta": POSITIVE,
    "margin": Bounds(),
    "label_smoothing": Bounds(high=0.5),
    "desirable_weight": Bounds(),
    "reference_point": Bounds(),
    "sft_weight": POSITIVE,
    "undesirable_weight": Bounds(),
    "decay_fraction": SHARE,
    "momentum": Bounds(high=1, below=True),
    "ema_decay": Bounds(high=1, below=True),
    "advantage_clip": POSITIVE,
    "target_kl": POSITIVE,
    "early_stop_min_delta": Bounds(),
    "lora_alpha": POSITIVE,
    "checkpoint_every_minutes": Bounds(),
}
COUNTS = {
    "epochs": 1,
    "steps": 1,
    "tokens_per_step": 1,
    "warmup_steps": 0,
    "eval_every_steps": 0,
    "tokens_per_call": 1,
    "updates_per_batch": 1,
    "minibatches": 1,
    "decay_steps": 0,
    "length": 1,
    "early_stop_patience": 0,
    "lora_rank": 0,
    "checkpoint_every_steps": 0,
    "keep_checkpoints": 1,
    "threads": 1,
    "replicas": 1,
    "seed": 0,
}
"""The smallest value of a whole number."""
CHOICES = {"device": ("auto", "cpu", "cuda")}
"""Of what is a plain string for the type checker."""

HINTS: dict[str, Any] = {
    name: hint for section in SECTIONS.values() for name, hint in typing.get_type_hints(section).items()
}
"""The annotation of every setting."""


def allows_none(name: str) -> bool:
    """Whether a setting may be None."""
    return type(None) in typing.get_args(HINTS[name])


def check_setting(name: str, value: Any) -> None:
    """Raise ValueError, with the name, the value and what is allowed, unless the setting can have that value."""
    if value is None and allows_none(name):
        return
    _check_given(name, value)


def _check_given(name: str, value: Any) -> None:
    hint = HINTS[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    choices = next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal), CHOICES.get(name))
    if choices is not None:
        number = f" and {NUMBERS[name]}" if float in kinds else ""
        if not (value in choices or (float in kinds and _is_number(value) and NUMBERS[name].hold(value))):
            raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(str, choices))}{number}")
    elif name == "budget":
        _check_budget(value)
    elif kinds == [bool]:
        _require(isinstance(value, bool), name, value, "true and false")
    elif kinds == [int]:
        low = COUNTS[name]
        whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST_COUNT
        _require(whole, name, value, f"whole numbers from {low}")
    elif kinds == [float]:
        bounds = NUMBERS[name]
        _require(_is_number(value), name, value, str(bounds))
        if not bounds.hold(value):
            raise ValueError(bounds.refusal(name, value))
    elif kinds == [str]:
        _require(isinstance(value, str | os.PathLike), name, value, "strings")
    else:  # tuple[str, ...]
        one = isinstance(value, str | os.PathLike)
        some = isinstance(value, list | tuple) and all(isinstance(entry, str | os.PathLike) for entry in value)
        _require(one or some, name, value, "a string or a list of strings")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed are {allowed}")


def _check_budget(value: Any) -> None:
    from treetrain.plan.budget import parse_budget

    parse_budget(value)
