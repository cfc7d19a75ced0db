"""What a training run is told. Plain data: importing it costs nothing, so that the command line answers at once."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, Self

from treetrain.train.checks import check_setting
from treetrain.train.settings import (
    AdapterSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ExecutionSettings,
    LossSettings,
    ModelSettings,
    OptimiserSettings,
    OutputSettings,
    ParallelSettings,
    StepSettings,
    UpdateSettings,
)

LOSS_OPTIONS = (
    "reduction",
    "clip",
    "clip_low",
    "clip_high",
    "length",
    "kl",
    "kl_estimator",
    "entropy",
    "importance_cap",
    "importance_mode",
    "beta",
    "margin",
    "label_smoothing",
    "reference_free",
    "desirable_weight",
    "undesirable_weight",
    "reference_point",
    "level",
    "estimator",
)
"""Settings that are keyword arguments of the loss's factory, which knows those that it has."""
_NO_VALUE_HEAD = (
    "a run trains the language-model head alone; for a policy with a critic use TreeEngine(model, value_head=...) and "
    "losses.ppo(value_coefficient=...) in a loop of your own"
)
NO_SETTINGS = {
    "on_policy": "a run finds out by itself; old_logprobs says which old log-probabilities are used",
    "value_coefficient": _NO_VALUE_HEAD,
    "value_clip": _NO_VALUE_HEAD,
}
"""The other options of losses, and why no run can be given them."""
DEFAULT_WARMUP_FRACTION, DEFAULT_DECAY_FRACTION = 0.03, 0.2
EXCLUSIVE = (("epochs", "steps"), ("warmup_steps", "warmup_fraction"), ("decay_steps", "decay_fraction"))
"""Pairs of settings that say one thing in two ways."""
ONLY_WITH: dict[str, tuple[str, Callable[["TrainConfig"], bool]]] = {
    "decay_steps": ("schedule wsd", lambda c: c.schedule == "wsd"),
    "decay_fraction": ("schedule wsd", lambda c: c.schedule == "wsd"),
    "momentum": ("optimizer sgd or muon", lambda c: c.optimizer in ("sgd", "muon")),
    "beta1": ("optimizer adamw, adamw8bit or muon", lambda c: c.optimizer not in ("sgd", "adafactor")),
    "beta2": ("optimizer adamw, adamw8bit or muon", lambda c: c.optimizer not in ("sgd", "adafactor")),
    "min_lr_ratio": ("a schedule that falls: cosine, linear or wsd", lambda c: c.schedule != "constant"),
    "importance_mode": ("importance_cap", lambda c: c.importance_cap is not None),
    "best_metric": ("early_stop_patience or keep_best", lambda c: c.follows_best),
    "lora_alpha": ("a lora_rank above 0", lambda c: c.lora_rank > 0),
    "lora_targets": ("a lora_rank above 0", lambda c: c.lora_rank > 0),
    "lora_rslora": ("a lora_rank above 0", lambda c: c.lora_rank > 0),
    "lora_dora": ("a lora_rank above 0", lambda c: c.lora_rank > 0),
    "early_stop_min_delta": ("early_stop_patience or keep_best", lambda c: c.follows_best),
    "eval_every_steps": ("something held out: eval_data or eval_fraction", lambda c: c.holds_out),
    "early_stop_patience": ("eval_every_steps: nothing would be compared", lambda c: c.eval_every_steps > 0),
    "target_kl": ("updates_per_batch or minibatches above 1", lambda c: c.several_updates),
    "advantage_leave_one_out": ("advantage_mean", lambda c: c.advantage_mean),
    "reduce": ("parallel fsdp", lambda c: c.parallel == "fsdp"),
    "replicas": ("parallel fsdp", lambda c: c.parallel == "fsdp"),
    "cpu_offload": ("parallel fsdp", lambda c: c.parallel == "fsdp"),
    "meta_init": ("parallel fsdp", lambda c: c.parallel == "fsdp"),
    "keep_best": ("something held out: eval_data or eval_fraction", lambda c: c.holds_out),
}
"""Settings that would do nothing unless something else is set; saying nothing about that would hide a mistake."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    CheckpointSettings,
    OutputSettings,
    ParallelSettings,
    ExecutionSettings,
    EvaluationSettings,
    OptimiserSettings,
    UpdateSettings,
    StepSettings,
    LossSettings,
    AdapterSettings,
    ModelSettings,
    DataSettings,
):
    """A training run: checked when made, stored with its result. Its fields are those of its sections."""

    def __new__(cls, **settings: Any) -> Self:
        """Says more of an option that a loss has and a run does not than that it is unexpected."""
        for name in settings:
            refuse_no_setting(name)
        return super().__new__(cls)

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
        for field in dataclasses.fields(TrainConfig):
            needed, holds = ONLY_WITH.get(field.name, ("", None))
            value = getattr(self, field.name)
            if holds is not None and value != field.default and not holds(self):
                raise ValueError(f"{field.name} is {value!r}, which needs {needed}")
        if self.loss == "kto" and self.tokens_per_call and not isinstance(self.reference_point, int | float):
            raise ValueError(
                f"tokens_per_call is {self.tokens_per_call}, but kto compares with a mean over the rows of a "
                "whole step; give a number as reference_point, or bound memory by budget"
            )
        if not self.lora_targets:
            raise ValueError("lora_targets is empty; name modules, or all-linear")

    def _check_files(self) -> None:
        if not self.data:
            raise ValueError("no data file given; name at least one JSONL file")
        for name in ("model", "output", "resume", "reference_model"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
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

    @property
    def several_updates(self) -> bool:
        """Whether a batch has more than one optimiser step."""
        return self.updates_per_batch > 1 or self.minibatches > 1

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval_data or self.eval_fraction)

    @property
    def follows_best(self) -> bool:
        """Whether evaluations are compared with one another."""
        return self.keep_best or self.early_stop_patience > 0

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of so many steps."""
        return _steps(self.warmup_steps, self.warmup_fraction, DEFAULT_WARMUP_FRACTION, total_steps)

    def decay(self, total_steps: int) -> int:
        """Steps of decay of the wsd schedule in a run of so many steps."""
        return _steps(self.decay_steps, self.decay_fraction, DEFAULT_DECAY_FRACTION, total_steps)

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain JSON data; `TrainConfig(**as_dict())` is the same run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def refuse_no_setting(name: str) -> None:
    """Raise ValueError for an option of a loss that is no setting of a run; see `NO_SETTINGS`."""
    if name in NO_SETTINGS:
        raise ValueError(f"{name} is an option of a loss, but no setting of a run: {NO_SETTINGS[name]}")


def _steps(steps: int | None, fraction: float | None, usual: float, total: int) -> int:
    if steps is not None:
        return steps
    return math.ceil((usual if fraction is None else fraction) * total)


def _plain(name: str, value: Any) -> Any:
    """A value as it is stored: paths as strings, several of them as a tuple."""
    if name in ("data", "eval_data", "lora_targets"):
        return (os.fspath(value),) if isinstance(value, str | os.PathLike) else tuple(map(os.fspath, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _only_one(config: TrainConfig, one: str, other: str) -> None:
    given = {name: getattr(config, name) for name in (one, other)}
    if None not in given.values():
        raise ValueError(f"{one} {given[one]} and {other} {given[other]} say the same thing in two ways; give one")
