"""What a training run is told. Plain data: importing it costs nothing, so that the command line answers at once."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

LossName = Literal["sft", "reinforce", "ppo", "grpo"]
LOSS_OPTIONS = ("clip", "clip_low", "clip_high", "kl", "kl_estimator", "entropy", "reduction")
DEFAULT_WARMUP_FRACTION = 0.03
LARGEST_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: checked when made, stored with its result."""

    data: tuple[str, ...]
    """JSONL files (plain or .gz) of token rows or of conversations."""
    model: str
    """Hub id, local folder, or a built-in random preset: tiny, small."""
    output: str
    """Folder for the trained model, its tokenizer, metrics.jsonl and train_config.json."""
    overwrite: bool = False
    """Replace the model and the metrics that are in the output folder already."""

    format: Literal["auto", "tokens", "chat"] = "auto"
    """What the files hold: token rows (`input_ids`), conversations (`messages`), or what the first row looks like."""
    view: Literal["transcript", "calls"] = "transcript"
    """Conversations as whole transcripts, or every LLM call as its own row."""
    tools: str | None = None
    """JSON file of tool schemas for conversations that bring none."""
    chat_template: str | None = None
    """Instead of the tokenizer's template: chatml (built in, keeps prefixes) or a Jinja file."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's own; a hub id, a folder or a preset."""
    eval_data: tuple[str, ...] = ()
    """Files held out for evaluation, read as the training files are."""
    eval_fraction: float = 0.0
    """Share of the groups (trees where rows have none) that is held out for evaluation, 0 to below 1."""
    eval_every_steps: int = 0
    """Evaluate after every so many steps; 0 evaluates only before the first step and after the last."""

    loss: LossName = "sft"
    """sft: cross-entropy. reinforce, ppo, grpo: policy gradients on recorded advantages, or on rewards per group."""
    reduction: Literal["token", "trajectory"] | None = None
    """Mean over all tokens of a step or over each row's tokens first; the loss's own choice if not given."""
    clip: float | None = None
    """ppo, grpo: how far the probability ratio is followed from 1, 0 to 1."""
    clip_low: float | None = None
    """ppo, grpo: the lower bound by itself, in place of clip."""
    clip_high: float | None = None
    """ppo, grpo: the upper bound by itself, in place of clip."""
    kl: float | None = None
    """Policy losses: coefficient of the KL to the reference policy; the rows then need ref_logprobs."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Policy losses: which estimate of that KL."""
    entropy: float | None = None
    """Policy losses: coefficient of the entropy bonus."""
    advantage_mean: bool = True
    """Advantages from rewards: subtract the mean of the group."""
    advantage_std: bool = True
    """Advantages from rewards: divide by the standard deviation of the group."""
    temperature: float = 1.0
    """Divides the logits; for policy losses the temperature that the rows were sampled with."""

    lr: float = 2e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: down a half cosine to min_lr_ratio x lr, or constant."""
    min_lr_ratio: float = 0.1
    """Where the cosine ends, as a share of lr, 0 to 1."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; in place of warmup_fraction."""
    warmup_fraction: float | None = None
    """Share of all steps that is warm-up; 0.03 where neither is given."""
    weight_decay: float = 0.01
    """AdamW's decay per step, in units of the learning rate; norms and biases are not decayed."""
    beta1: float = 0.9
    """AdamW's average of gradients."""
    beta2: float = 0.999
    """AdamW's average of squared gradients."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them as they are."""

    epochs: int | None = None
    """Passes over the data; 1 where neither epochs nor steps is given."""
    steps: int | None = None
    """Optimiser steps; the data is passed over as often as that takes. In place of epochs."""
    tokens_per_step: int = 32_768
    """Flat tokens that a step is filled up to with whole groups (else whole trees); a larger group is a step alone."""
    seed: int = 0
    """Of the order of the data and of a preset's random weights."""

    execution: Literal["tree", "linear"] = "tree"
    """tree: every shared prefix once. linear: every row by itself, on the same steps, to compare with."""
    budget: int | str | None = None
    """Tokens whose graph is alive at once (4096), or for a tree bytes above model, gradients and optimiser
    state (8GiB). None: a tree takes what the device has free, linear packs of 8192 tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 by autocast over float32 weights."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    device: str = "auto"
    """auto (cuda if there is one), cpu or cuda."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""

    def __post_init__(self) -> None:
        # Lists come from JSON and from callers; a stored config must compare equal to the one that was given.
        for name in ("data", "eval_data"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | Path) else tuple(map(str, value)))
        self._check_files()
        self._check_ranges()
        self._check_budget()
        _only_one(self, "epochs", "steps")
        _only_one(self, "warmup_steps", "warmup_fraction")
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
        for name in ("model", "output"):
            if not str(getattr(self, name)).strip():
                raise ValueError(f"{name} is empty; give a name")

    def _check_ranges(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(map(str, allowed))}")
        for name, (low, high) in _NUMBERS.items():
            _check_number(name, getattr(self, name), low, high)
        for name, low in _COUNTS.items():
            _check_count(name, getattr(self, name), low)
        for name in ("lr", "temperature", "max_grad_norm"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; it must be above 0")
        for name in ("eval_fraction", "beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} is 1; it must be below 1")

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


_CHOICES = {
    "format": ("auto", "tokens", "chat"),
    "view": ("transcript", "calls"),
    "loss": ("sft", "reinforce", "ppo", "grpo"),
    "schedule": ("cosine", "constant"),
    "execution": ("tree", "linear"),
    "dtype": ("float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
}
_NUMBERS = {
    "lr": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "temperature": (0.0, math.inf),
    "max_grad_norm": (0.0, math.inf),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "min_lr_ratio": (0.0, 1.0),
    "warmup_fraction": (0.0, 1.0),
    "eval_fraction": (0.0, 1.0),
}
_COUNTS = {
    "epochs": 1,
    "steps": 1,
    "tokens_per_step": 1,
    "warmup_steps": 0,
    "eval_every_steps": 0,
    "threads": 1,
    "seed": 0,
}
_OPTIONAL = ("max_grad_norm", "warmup_fraction", "epochs", "steps", "warmup_steps", "threads")


def _check_number(name: str, value: Any, low: Any, high: Any) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high:
        return
    upper = "to any finite one" if high == math.inf else f"to {high:g}"
    raise ValueError(f"{name} is {value!r}; allowed are numbers from {low:g} {upper}")


def _check_count(name: str, value: Any, low: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= LARGEST_SEED:
        raise ValueError(f"{name} is {value!r}; allowed are whole numbers from {low}")


def _only_one(config: TrainConfig, one: str, other: str) -> None:
    given = {name: getattr(config, name) for name in (one, other)}
    if None not in given.values():
        raise ValueError(f"{one} {given[one]} and {other} {given[other]} say the same thing in two ways; give one")
