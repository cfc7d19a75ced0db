"""What a training run is told. Plain data: importing it costs nothing, so that the command line answers at once."""

import dataclasses
import math
import os
from typing import Any

from treetrain.train.checks import check_setting
from treetrain.train.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ExecutionSettings,
    LossSettings,
    ModelSettings,
    OptimiserSettings,
    OutputSettings,
    StepSettings,
)

LOSS_OPTIONS = ("clip", "clip_low", "clip_high", "kl", "kl_estimator", "entropy", "reduction")
DEFAULT_WARMUP_FRACTION = 0.03
EXCLUSIVE = (("epochs", "steps"), ("warmup_steps", "warmup_fraction"))
"""Pairs of settings that say one thing in two ways."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    CheckpointSettings,
    OutputSettings,
    ExecutionSettings,
    EvaluationSettings,
    OptimiserSettings,
    StepSettings,
    LossSettings,
    ModelSettings,
    DataSettings,
):
    """A training run: checked when made, stored with its result. Its fields are those of its sections."""

    def __post_init__(self) -> None:
        # Lists come from JSON and from callers; a stored config must compare equal to the one that was given.
        for field in dataclasses.fields(TrainConfig):
            value = getattr(self, field.name)
            check_setting(field.name, value)
            object.__setattr__(self, field.name, _plain(field.name, value))
        self._check_files()
        self._check_budget()
        if self.resume == "auto" and self.overwrite:
            raise ValueError(
                "resume is 'auto' and overwrite is true: one goes on with what is in output, one replaces it"
            )
        for one, other in EXCLUSIVE:
            _only_one(self, one, other)
        if self.eval_data and self.eval_fraction:
            raise ValueError(
                f"eval_data {list(self.eval_data)} and eval_fraction {self.eval_fraction} both say what is held out; "
                "give one"
            )
        if self.eval_every_steps and not (self.eval_data or self.eval_fraction):
            raise ValueError(f"eval_every_steps is {self.eval_every_steps}, but nothing is held out: give eval_data")

    def _check_files(self) -> None:
        if not self.data:
            raise ValueError("no data file given; name at least one JSONL file")
        for name in ("model", "output", "resume"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; give a name")

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        from treetrain.plan.budget import Bytes, parse_budget

        if isinstance(parse_budget(self.budget), Bytes) and self.execution == "linear":
            raise ValueError(f"budget is {self.budget!r}, but linear execution packs tokens: give a number of tokens")

    @property
    def loss_options(self) -> dict[str, Any]:
        """The options given for the loss; which of them it has, it says itself when it is made."""
        return {name: getattr(self, name) for name in LOSS_OPTIONS if getattr(self, name) is not None}

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of so many steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        fraction = DEFAULT_WARMUP_FRACTION if self.warmup_fraction is None else self.warmup_fraction
        return math.ceil(fraction * total_steps)

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain JSON data; `TrainConfig(**as_dict())` is the same run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _plain(name: str, value: Any) -> Any:
    """A value as it is stored: paths as strings, several of them as a tuple."""
    if name in ("data", "eval_data"):
        return (os.fspath(value),) if isinstance(value, str | os.PathLike) else tuple(map(os.fspath, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _only_one(config: TrainConfig, one: str, other: str) -> None:
    given = {name: getattr(config, name) for name in (one, other)}
    if None not in given.values():
        raise ValueError(f"{one} {given[one]} and {other} {given[other]} say the same thing in two ways; give one")
