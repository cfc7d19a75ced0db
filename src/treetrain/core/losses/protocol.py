"""Losses: the protocol, the base class of ours, the facts that they read, and the adapter for a loss of the user's.

A loss has four members: `scope`, `needs`, `normaliser(trajectories)` and the call. The engine works with the base
class `Loss` alone, which evaluates the predictions of many rows in one call. `as_loss` checks any other loss once and
wraps it in `UserLoss`, which calls it row by row.

Shape letters: K trajectories, L tokens of one of them, T predictions in use.
"""

import functools
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor, nn

from treetrain.core.errors import DataError
from treetrain.core.losses.facts import (
    Facts,
    Metrics,
    Reduction,
    _read,
    add_metrics,
    describe,
    mean_metrics,
    read_metrics,
    require_facts,
    require_nonnegative_weights,
    split_by_trajectory,
)
from treetrain.core.tree.trajectory import GIVEN, Trajectory


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one `TreeEngine.forward_backward`.

    Reading `loss` or `metrics` waits for the device; until then a GPU may still be running the step.
    """

    loss_tensor: Tensor | float
    """The loss where it was computed: a detached tensor of one number, or a number."""
    metric_sums: Metrics = field(repr=False)
    """Name -> (weighted sum, weight) of what the loss reports, to be added over calls; see `Metrics`."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    computed_tokens: int
    """Tokens that went through the model: tokens of the tree that some wanted prediction depends on."""
    recomputed_tokens: int
    """Tokens of passes without graph: prefills, and whole passes before the first backward."""
    parts: int
    """Number of forward-backward passes."""
    attention: Mapping[str, int] = field(default_factory=dict)
    """Number of attention calls in forwards, by backend."""

    @cached_property
    def loss(self) -> float:
        """The sum over all trajectories divided by the normaliser."""
        return _read([self.loss_tensor])[0]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics that the loss reports."""
        return mean_metrics(self.metric_sums)

    def on_host(self) -> "StepResult":
        """Return the same result with plain numbers; waits for the device."""
        return replace(self, loss_tensor=self.loss, metric_sums=read_metrics(self.metric_sums))


def summed(results: Sequence[StepResult], *, over: int = 1) -> StepResult:
    """Add the results of a step's parts, without waiting for the device.

    Args:
        over: divides the loss.
    """
    if len(results) == 1 and over == 1:
        return results[0]
    counts = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
    return StepResult(
        loss_tensor=sum(result.loss_tensor for result in results) / over,
        metric_sums=functools.reduce(add_metrics, (result.metric_sums for result in results), {}),
        attention=sum((Counter(result.attention) for result in results), Counter()),
        **{name: sum(getattr(result, name) for result in results) for name in counts},
    )


Scope = Literal["trajectory", "batch"]
LossSum = tuple[Tensor, Metrics]
"""The unnormalised sum over some predictions, and metrics."""

FACTS = (*GIVEN, "pair", "chosen", "teacher_topk")
NEEDS = ("logprobs", "entropies", "id_logprobs", "predicted_values", *FACTS)
"""Everything that a loss may need: scores of the model and facts of the rows."""


# ---- the protocol and the base class


class LossProtocol(Protocol):
    """The four members of any loss. `scope` and `needs` may be left out."""

    @property
    def scope(self) -> Scope:
        """Whether the loss is called with one row at a time (the default), or once with lists of all rows."""
        ...

    @property
    def needs(self) -> Sequence[str]:
        """Names from `NEEDS`; ("logprobs",) by default. A loss that lists "predicted_values" is called with `values=`,
        and is given log-probabilities only if it lists "logprobs" or "entropies" too."""
        ...

    def normaliser(self, trajectories: Any, /) -> float:
        """The number above 0 that the sum over all rows of a step is divided by."""
        ...

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, /) -> tuple[Any, Mapping[str, Any] | None]:
        """The unnormalised sum over one row (or all), a scalar tensor, and metrics."""
        ...


def numeric(default: Any, *, high: float = sys.float_info.max, positive: bool = False) -> Any:
    """The field of an option that is a number from 0 (or above 0, if positive) to `high`."""
    return field(default=default, metadata={"high": high, "positive": positive})


def fixed(value: Any) -> Any:
    """The field of an option that a subclass does not offer."""
    return field(default=value, init=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A sum over weighted predictions.

    A subclass implements `evaluate` and declares what it `needs`; its fields are its options, checked by their types
    and ranges (`numeric`).

    w are the loss weights (entry 0 of a row is never trained), x is the loss of one prediction. Reduction "token" is
    sum(w x) / sum(w) over the whole step. Reduction "trajectory" is that ratio for each trajectory that has weight,
    averaged over these trajectories.

    Raises:
        ValueError: an option out of its range.
    """

    scope: ClassVar[Scope] = "trajectory"
    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    """Names of the scores ("logprobs", "entropies", "predicted_values", "id_logprobs": those of the ids of
    `teacher_topk`, which `Facts` has) and of the facts of trained rows ("advantages", ...) that the loss reads."""
    reads_untrained: ClassVar[bool] = False
    """Whether the loss must see predictions and rows without a loss weight."""
    by_prediction: ClassVar[bool] = False
    """Whether each x depends on one prediction only, and the normaliser is the reduction's."""

    reduction: Reduction = "token"
    """Mean over all tokens of the step, or over each trajectory's tokens first."""

    def __post_init__(self) -> None:
        for option in fields(self):
            kind = _type_of(type(self), option)
            value, allowed = getattr(self, option.name), get_args(kind)
            if kind is bool and not isinstance(value, bool):  # a text such as "false" is true
                raise ValueError(f"{option.name} is {value!r}; allowed are True and False")
            if get_origin(kind) is Literal and value not in allowed:
                choices = ", ".join(repr(choice) for choice in allowed)
                raise ValueError(f"{option.name} is {value!r}; allowed are {choices}")
            if "high" in option.metadata and not (value is None and NoneType in allowed):
                _check_number(option.name, value, **option.metadata)

    @property
    def sums_tokens(self) -> bool:
        """Whether the loss is sum(w x) / sum(w), and each x depends on one prediction only.

        Otherwise a token cannot count once for all rows that share it (`count="once"`).
        """
        return self.by_prediction and self.reduction == "token"

    def evaluate(
        self,
        logprobs: Float[Tensor, " T"],
        entropies: Float[Tensor, " T"] | None,
        facts: Facts,
        values: Float[Tensor, " T"] | None,
    ) -> LossSum:
        """The unnormalised sum over some predictions, and metrics.

        Args:
            logprobs: in nats; 0 where the weight is 0.
            entropies: in nats, or None.
            facts: of the same predictions, in the dtype of logprobs. `facts.shares(self.reduction)` are the weights in
                the sum.
            values: predicted by the model; None unless the loss needs "predicted_values".
        """
        raise NotImplementedError

    def coefficients(self, facts: Facts) -> Float[Tensor, " T"] | None:
        """d sum / d logprobs, where it does not depend on the log-probabilities; else None.

        The engine can then run the language-model head once per row, forward and backward together.
        """
        return None

    def total_weight(self, rows: Sequence[Trajectory]) -> float:
        """The amount that these rows add to the normaliser of a step; 0 if nothing is trained.

        Raises:
            DataError: a negative weight.
        """
        require_nonnegative_weights(rows)
        totals = [float(trajectory.weights.sum()) for trajectory in rows]
        return math.fsum(totals) if self.reduction == "token" else float(sum(total > 0 for total in totals))

    def check(self, rows: Sequence[Trajectory]) -> None:
        """Raise DataError for the first trained row that lacks a fact that the loss needs."""
        require_facts(rows, [name for name in self.needs if name in FACTS])

    def normaliser(self, rows: Sequence[Trajectory]) -> float:
        """The divisor (> 0) of the sum over all rows of a step, computed before the step with numpy only.

        Raises:
            DataError: nothing to train, a negative weight, or a missing fact; raised before any work is done.
        """
        self.check(rows)
        total = self.total_weight(rows)  # 0 without an error would make every gradient infinite
        if total > 0:
            return total
        raise DataError(
            f"nothing to train: the loss weights of all {len(rows)} trajectories sum to 0 (entry 0 of a row is never "
            "trained); give loss_weights that are not 0, or rows of two tokens and more"
        )

    def packed(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None = None) -> LossSum:
        """The unnormalised sum over many trajectories, and metrics (detached, on the device of logprobs).

        Args:
            logprobs: [T] of the predictions that `facts` holds, in nats.
            entropies: [T] of the distributions they were taken from, in nats; None where not needed.
            facts: of the same predictions, in the same order.
            values: [T] predicted by a value head now for the states before the predicted tokens, or None.

        Raises:
            DataError: a trained trajectory lacks a fact that the loss needs.
            ValueError: shapes that disagree, or scores that the loss needs and are missing.
        """
        if "predicted_values" not in self.needs:
            values = None
        for need, scores in (("logprobs", logprobs), ("entropies", entropies), ("predicted_values", values)):
            if scores is None and need in self.needs:
                raise ValueError(f"{type(self).__name__} needs {need}, got None; pass [L - 1] of them for each row")
            if scores is not None and scores.shape != (len(facts),):
                raise ValueError(
                    f"{type(self).__name__}: {need} have shape {tuple(scores.shape)}, the facts {len(facts)} "
                    "predictions; give one number for each (of a value head: one label, num_labels=1)"
                )
        if not facts.all_weighted:
            # Not a product with 0, which would be NaN where the value at an untrained token is infinite.
            trained = facts.weights != 0
            logprobs = torch.where(trained, logprobs, 0)
            entropies, values = (None if x is None else torch.where(trained, x, 0) for x in (entropies, values))
        return self.evaluate(logprobs, entropies, facts, values)

    def __call__(
        self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None, id_logprobs: Any = None
    ) -> tuple[Any, Any]:
        """The unnormalised sum over one trajectory, or over K of them where the scope is "batch". See `packed`.

        Args:
            logprobs: [L - 1], in nats; K such tensors if the scope is "batch".
            entropies: likewise, or None.
            trajectory: one, or K.
            values: likewise, for a loss that needs them.
            id_logprobs: those of the ids of `teacher_topk` at these predictions, one after the other, for a loss that
                needs them.
        """
        if self.scope == "trajectory":  # a batch of one row
            logprobs, entropies, values = (None if x is None else [x] for x in (logprobs, entropies, values))
            trajectory = [trajectory]
        for number, (row, given) in enumerate(zip(trajectory, logprobs, strict=True)):
            if given.shape != (max(len(row) - 1, 0),):
                raise ValueError(
                    f"{describe(row, number)} has {len(row)} tokens, so {max(len(row) - 1, 0)} predictions, "
                    f"but logprobs have shape {tuple(given.shape)}; give one for every token but the first"
                )

        def joined(rows: Any) -> Any:
            return None if rows is None else torch.cat(list(rows)) if len(rows) else torch.zeros(0)

        flat = joined(logprobs)
        facts = Facts(trajectory, device=flat.device, dtype=flat.dtype)
        facts.id_logprobs = id_logprobs
        return self.packed(flat, joined(entropies), facts, joined(values))


def _type_of(loss: type[Loss], option: Field[Any]) -> object:
    """The type of an option, which is text in a file with ``from __future__ import annotations``."""
    if not isinstance(option.type, str):
        return option.type
    owner = next(kind for kind in loss.__mro__ if option.name in vars(kind).get("__annotations__", {}))
    alone = type("Option", (), {"__annotations__": {option.name: option.type}, "__module__": owner.__module__})
    try:
        return get_type_hints(alone)[option.name]
    except NameError:  # a name that only type checkers know
        return option.type


def _check_number(name: str, value: object, *, high: float, positive: bool) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if 0 <= number <= high and not (positive and number == 0):
        return
    finite = high == sys.float_info.max
    limits = f"numbers from 0 to {'any finite one' if finite else f'{high:g}'}"
    raise ValueError(f"{name} is {value!r}; allowed are {'finite numbers above 0' if positive else limits}")


def needs_logprobs(loss: Loss) -> bool:
    """Whether log-probabilities must be computed for a loss; not if it reads predicted values alone."""
    return "predicted_values" not in loss.needs or "logprobs" in loss.needs or "entropies" in loss.needs


# ---- a loss of the user's own

PROTOCOL = (
    "a loss is called as loss(logprobs, entropies, trajectory) and returns (sum, metrics): logprobs is a tensor "
    "[L - 1], entropies another or None, trajectory the row with its facts, sum a scalar tensor that is not yet "
    "divided by anything, metrics a dict of numbers; loss.normaliser(trajectories) is what the step's sum is divided by"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UserLoss(Loss):
    """A user's own loss: it is called row by row, or once with lists if its scope is the batch."""

    reads_untrained: ClassVar[bool] = True

    inner: Any

    def __repr__(self) -> str:
        """The same text in every process."""
        named = self.inner if hasattr(self.inner, "__qualname__") else type(self.inner)
        return f"{named.__module__}.{named.__qualname__}"

    @property
    def scope(self) -> Scope:
        return getattr(self.inner, "scope", "trajectory")

    @property
    def needs(self) -> tuple[str, ...]:
        return _stated_needs(self.inner)

    @property
    def sums_tokens(self) -> bool:
        return bool(getattr(self.inner, "sums_tokens", False))

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None) -> tuple[Any, Any]:
        given = {"values": values} if "predicted_values" in self.needs else {}
        return checked_sum(name_of(self), self.inner(logprobs, entropies, trajectory, **given))

    def normaliser(self, rows: Sequence[Trajectory]) -> float:
        return self.inner.normaliser(rows)

    def packed(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None = None) -> LossSum:
        rows = facts.trajectories

        def split(flat: Tensor | None) -> list[Tensor] | list[None]:
            if flat is None:
                return [None] * len(rows)
            # Clones: the loss may write into its arguments.
            return [row.clone() for row in split_by_trajectory(flat, rows, facts.used)]

        by_row = split(logprobs), split(entropies), split(values)
        if self.scope == "batch":
            lists = [None if flat is None else rows for flat, rows in zip((logprobs, entropies, values), by_row)]
            total, metrics = self(lists[0], lists[1], list(rows), values=lists[2])
            return torch.as_tensor(total), _as_sums(metrics)
        total, sums = logprobs.new_zeros(()), {}
        for row, entropy, value, trajectory in zip(*by_row, rows):
            row_sum, metrics = self(row, entropy, trajectory, values=value)
            total, sums = total + row_sum, add_metrics(sums, _as_sums(metrics))
        return total, sums


def as_loss(loss: object, normaliser: float | None = None) -> Loss:
    """A loss of any kind as a `Loss`.

    Args:
        normaliser: the user's; if None, the loss must have its own.

    Raises:
        TypeError: it cannot be called as a loss; the message says what to do.
    """
    if isinstance(loss, str):
        raise TypeError(f"loss={loss!r} is a name; pass tt.losses.by_name({loss!r}), or the factory's: tt.losses.sft()")
    if isinstance(loss, Tensor):
        raise TypeError(
            f"loss is a tensor of shape {tuple(loss.shape)}; the engine calls the loss itself, part by part: "
            f"{PROTOCOL}. To compute it yourself, take tt.logprobs(model, rows) or engine.score(rows) and call backward"
        )
    name = name_of(loss)
    if inspect.isclass(loss):
        raise TypeError(f"loss is the class {name}; pass an instance of it, {name}()")
    if not callable(loss):
        raise TypeError(f"loss is {loss!r}, which cannot be called; {PROTOCOL}")
    needs = getattr(loss, "needs", ("logprobs",))
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise TypeError(f"loss {name} has needs {needs!r}; give a tuple of names from {', '.join(NEEDS)}")
    unknown = [need for need in needs if need not in NEEDS]
    if unknown:
        raise TypeError(f"loss {name} needs {unknown[0]!r}; a loss may need {', '.join(NEEDS)}")
    if "id_logprobs" in needs and not isinstance(loss, Loss):
        raise TypeError(f"loss {name} needs id_logprobs: take TreeEngine.score(rows, ids=...), or derive it from Loss")
    if not isinstance(loss, Loss):
        _check_arguments(loss, name)
    if getattr(loss, "scope", "trajectory") not in ("trajectory", "batch"):
        raise TypeError(
            f"loss {name} has scope {loss.scope!r}; give 'trajectory', to be called with one row, or 'batch', to be "
            "called once with lists of all rows"
        )
    if isinstance(loss, Loss):
        return loss
    if normaliser is None and not callable(getattr(loss, "normaliser", None)):
        raise TypeError(
            f"loss {name} has no normaliser(trajectories), the number above 0 that the step's sum is divided by; give "
            "it one (loss.normaliser = lambda trajectories: float(len(trajectories))), or pass normaliser= to "
            "forward_backward"
        )
    return UserLoss(inner=loss)


def _as_sums(metrics: Mapping[str, object] | None) -> Metrics:
    """Give plain numbers the weight 1. Tensors are cloned, since the loss may write into its metrics later."""

    def fixed(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in (metrics or {}).items()}
    return {name: (fixed(total), fixed(weight)) for name, (total, weight) in pairs.items()}


def name_of(loss: object) -> str:
    """Return the name of a function or class, or of any other object's class."""
    loss = loss.inner if isinstance(loss, UserLoss) else loss
    return getattr(loss, "__name__", type(loss).__name__)


def _stated_needs(loss: object) -> tuple[str, ...]:
    return tuple(getattr(loss, "needs", ("logprobs",)))


def _check_arguments(loss: Callable[..., object], name: str) -> None:
    """Raise TypeError if the signature of a loss does not accept the engine's arguments."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return  # written in C: it has no signature
    values = {"values": None} if "predicted_values" in _stated_needs(loss) else {}
    try:
        signature.bind(None, None, None, **values)
    except TypeError as error:
        keyword = ", and with values=... as it needs predicted values" if values else ""
        raise TypeError(
            f"loss {name}{signature} does not take (logprobs, entropies, trajectory){keyword} ({error}); {PROTOCOL}. "
            f"If {name} makes a loss, call it and pass what it returns"
        ) from None


def checked_sum(name: str, returned: object) -> tuple[Any, Mapping[str, Any] | None]:
    """The (sum, metrics) that a loss returned.

    Raises:
        TypeError: it is not such a pair, its sum is not a scalar, or its metrics are not a dict of numbers.
    """

    def wrong(value: object, what: str) -> TypeError:
        kind = "None" if value is None else f"a {type(value).__name__}"
        described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind
        return TypeError(f"loss {name} returned {described}{what}; {PROTOCOL}")

    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise wrong(returned, ", no pair (sum, metrics)")
    total, metrics = returned
    if isinstance(total, Tensor):
        if total.dim():
            raise wrong(total, " as its sum, no scalar; add it up: (weights * per_token).sum()")
    elif isinstance(total, bool) or not isinstance(total, int | float) or total:
        raise wrong(total, " as its sum, which has no gradient; return a scalar tensor")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise wrong(metrics, " as its metrics; give a dict of numbers or of pairs (weighted sum, weight), or {}")
    for key, value in (metrics or {}).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, Tensor) and number.numel() != 1 for number in numbers):
            raise wrong(value, f" as the metric {key!r}; give its mean, a number")
    return total, metrics
