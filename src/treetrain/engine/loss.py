"""Losses: the protocol, the base class of ours, the facts that they read, and the adapter for a loss of the user's.

A loss has four members: `scope`, `needs`, `normaliser(trajectories)` and the call. The engine works with the base
class `Loss` alone, which evaluates the predictions of many rows in one call. `as_loss` checks any other loss once and
wraps it in `RowLoss`, which calls it row by row.

Shape letters: K trajectories, L tokens of one of them, T predictions in use.
"""

import functools
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn

from treetrain.data.columns import GIVEN
from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory
from treetrain.device_arrays import on_device
from treetrain.errors import DataError

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]
"""Name -> (weighted sum, weight), numbers or scalar tensors. Metrics of parts, micro-batches and ranks are added."""


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Add the metrics of two parts. Names that end in `_max` or `_min` (weight 1 or 0) keep the extreme instead."""
    total = dict(a)
    for name, (value, weight) in b.items():
        if name in total and name.endswith(("_max", "_min")):
            bound: dict[str, Any] = {"min" if name.endswith("_max") else "max": total[name][0]}
            value, weight = (torch.as_tensor(x, dtype=torch.float64) for x in (value, weight))
            total[name] = value.clamp(**bound), weight.clamp(min=total[name][1])
            continue
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + value, before[1] + weight)
    return total


def read_metrics(sums: Metrics) -> dict[str, tuple[float, float]]:
    """Read metrics as floats, in one copy from the device."""
    numbers = _read(number for pair in sums.values() for number in pair)
    return dict(zip(sums, zip(numbers[0::2], numbers[1::2])))


def mean_metrics(sums: Metrics) -> dict[str, float]:
    """Turn weighted sums into means; a metric without weight is left out."""
    return {name: total / weight for name, (total, weight) in read_metrics(sums).items() if weight != 0}


def _read(values: Iterable[Tensor | float]) -> list[float]:
    values = [x.detach().reshape(()) if isinstance(x, Tensor) else float(x) for x in values]
    tensors = [x for x in values if isinstance(x, Tensor)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), "cpu")
    numbers = iter(torch.stack([x.to(device, torch.float64) for x in tensors]).tolist() if tensors else [])
    return [next(numbers) if isinstance(x, Tensor) else x for x in values]


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
Reduction = Literal["token", "trajectory"]
LossSum = tuple[Tensor, Metrics]
"""The unnormalised sum over some predictions, and metrics."""

FACTS = (*(name for name in PER_TOKEN_FACTS if name != "loss_weights"), "pair", "chosen")
NEEDS = ("logprobs", "entropies", "predicted_values", *FACTS)
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
    """Names of the scores ("logprobs", "entropies", "predicted_values") and of the facts of trained rows ("advantages",
    "old_logprobs", ...) that the loss reads."""
    reads_untrained: ClassVar[bool] = False
    """Whether the loss must see predictions and rows without a loss weight."""
    by_prediction: ClassVar[bool] = False
    """Whether each x depends on one prediction only, and the normaliser is the reduction's."""

    reduction: Reduction = "token"
    """Mean over all tokens of the step, or over each trajectory's tokens first."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, allowed = getattr(self, option.name), get_args(option.type)
            if option.type is bool and not isinstance(value, bool):
                raise ValueError(f"{option.name} is {value!r}; allowed are True and False")
            if get_origin(option.type) is Literal and value not in allowed:
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
        facts: "Facts",
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

    def coefficients(self, facts: "Facts") -> Float[Tensor, " T"] | None:
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
        total = self.total_weight(rows)
        if total > 0:
            return total
        raise DataError(
            f"nothing to train: the loss weights of all {len(rows)} trajectories sum to 0 (entry 0 of a row is never "
            "trained); give loss_weights that are not 0, or rows of two tokens and more"
        )

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: "Facts", values: Tensor | None = None
    ) -> LossSum:
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

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None) -> tuple[Any, Any]:
        """The unnormalised sum over one trajectory, or over K of them where the scope is "batch". See `packed`.

        Args:
            logprobs: [L - 1], in nats; K such tensors if the scope is "batch".
            entropies: likewise, or None.
            trajectory: one, or K.
            values: likewise, for a loss that needs them.
        """
        if self.scope == "trajectory":
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
        return self.packed(flat, joined(entropies), facts, joined(values))


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


# ---- facts of predictions


class Facts:
    """The facts of T predictions that a loss may read: those of K trajectories, max(L_k - 1, 0) of each, concatenated.

    A fact is an attribute of its name: `advantages`, `old_logprobs`, `ref_logprobs`, `rollout_logprobs`,
    `teacher_logprobs` (in nats), `values` and `returns`. It is copied to the device when it is first read, so one that
    no loss reads costs nothing and may be missing; reading one that a trained row lacks raises DataError. A fact is 0
    where the weight is 0, so that a placeholder there cannot cause NaN.

    Args:
        trajectories: empty and one-token rows are fine, they have no predictions.
        device: where the tensors live.
        dtype: of the facts and of the log-probabilities, float32 or float64.
        used: for each prediction, whether the caller passes it to the loss; None means all.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        used: Bool[np.ndarray, " _"] | None = None,
    ):
        self.trajectories, self.device, self.dtype, self.used = trajectories, torch.device(device), dtype, used
        lengths = [max(len(trajectory) - 1, 0) for trajectory in trajectories]
        rows = np.repeat(np.arange(len(lengths)), lengths)
        weights = np.concatenate([np.zeros(0), *(trajectory.weights[1:] for trajectory in trajectories)])
        self._rows, self._weights = (rows, weights) if used is None else (rows[used], weights[used])
        self.all_weighted = bool(self._weights.all())
        """Whether no prediction has weight 0; known without a device synchronisation."""

    def __len__(self) -> int:
        return self._weights.size

    def __getattr__(self, name: str) -> Float[Tensor, " T"]:
        if name not in GIVEN:
            raise AttributeError(f"predictions have no fact {name!r}; there are {', '.join(GIVEN)}")
        require_facts(self.trajectories, (name,))
        given = [(getattr(trajectory, name), len(trajectory)) for trajectory in self.trajectories]
        columns = (np.zeros(max(length - 1, 0)) if fact is None else fact[1:] for fact, length in given)
        flat = np.concatenate([np.zeros(0), *columns])
        flat = flat if self.used is None else flat[self.used]
        fact = on_device(np.where(self._weights == 0, 0.0, flat), self.device, self.dtype)
        setattr(self, name, fact)
        return fact

    @cached_property
    def rows(self) -> Int64[Tensor, " T"]:
        """The trajectory (0..K-1) of each prediction."""
        return on_device(self._rows, self.device)

    @cached_property
    def weights(self) -> Float[Tensor, " T"]:
        return on_device(self._weights, self.device, self.dtype)

    @cached_property
    def _shares_of_rows(self) -> Float[Tensor, " T"]:
        require_nonnegative_weights(self.trajectories)
        totals = np.array([trajectory.weights.sum() for trajectory in self.trajectories], np.float64)
        totals[totals == 0] = 1.0  # such a row has no weight to divide
        return on_device(self._weights / totals[self._rows], self.device, self.dtype)

    def shares(self, reduction: Reduction) -> Float[Tensor, " T"]:
        """The factor of each prediction in the sum: its weight, or its weight over the sum of its row's.

        Raises:
            DataError: reduction "trajectory" and a negative weight.
        """
        return self.weights if reduction == "token" else self._shares_of_rows

    def sum_by_row(self, per_prediction: Float[Tensor, " T"]) -> Float[Tensor, " K"]:
        """The sum over each trajectory, differentiable; 0 for rows without predictions."""
        return per_prediction.new_zeros(len(self.trajectories)).index_add(0, self.rows, per_prediction)


REMEDIES = {
    "advantages": "give advantages=..., e.g. the rewards of a group normalised within the group",
    "old_logprobs": "give old_logprobs=... (under the policy that sampled the row; the engine computes them "
    "before the first update), or pass on_policy=True to the loss if the model of this very step sampled "
    "the row",
    "ref_logprobs": "give ref_logprobs=... (the engine computes them from the reference model), or set kl=0.0 in a "
    "policy loss",
    "rollout_logprobs": "give rollout_logprobs=... as the sampler recorded them, or set importance_cap=None",
    "teacher_logprobs": "give teacher_logprobs=..., the teacher's log-probabilities of the row's own tokens",
    "values": "give values=..., the value estimates at sampling time",
    "returns": "give returns=..., computed from rewards and values",
    "pair": "give pair=... and chosen=True or False, or loss_weights=0 to keep the row as context",
    "chosen": "give chosen=True or chosen=False",
}


def describe(trajectory: Trajectory, number: int) -> str:
    """Name a trajectory for messages: by its id, or its number in the batch if it has none."""
    return f"trajectory number {number} (from 0)" if trajectory.id is None else f"trajectory {trajectory.id!r}"


def require_facts(rows: Sequence[Trajectory], names: Sequence[str]) -> None:
    """Raise DataError for the first row with something to train that lacks one of the named facts."""
    for number, row in enumerate(rows):
        for name in names:
            if getattr(row, name) is None and row.weights.any():
                raise DataError(f"{describe(row, number)} has no {name}, which the loss needs; {REMEDIES[name]}")


def require_nonnegative_weights(rows: Sequence[Trajectory]) -> None:
    """Raise DataError for a weight below 0: a mean over signed weights can have any sign and size."""
    for number, trajectory in enumerate(rows):
        weights = trajectory.weights
        if weights.size and weights.min() < 0:
            at = int(weights.argmin())
            raise DataError(
                f"{describe(trajectory, number)}: loss_weights[{at}] = {weights[at]:g}, but a mean needs weights of 0 "
                "or more; put signs into advantages and use the reinforce loss, or give the normaliser of the step "
                'yourself (reduction="token" only)'
            )


# ---- a loss of the user's own

PROTOCOL = (
    "a loss is called as loss(logprobs, entropies, trajectory) and returns (sum, metrics): logprobs is a tensor "
    "[L - 1], entropies another or None, trajectory the row with its facts, sum a scalar tensor that is not yet "
    "divided by anything, metrics a dict of numbers; loss.normaliser(trajectories) is what the step's sum is divided by"
)


def split_by_trajectory(
    per_prediction: Shaped[Tensor, " T *c"], trajectories: Sequence[Trajectory], used: Bool[np.ndarray, " _"] | None
) -> list[Shaped[Tensor, " _ *c"]]:
    """Split used predictions into one tensor [L - 1] or [L - 1, c] per trajectory, with 0 at unused ones."""
    flat = per_prediction
    if used is not None and not used.all():
        place = on_device(np.flatnonzero(used), flat.device)
        flat = flat.new_zeros((len(used), *flat.shape[1:])).index_copy(0, place, per_prediction)
    return list(flat.split([max(len(t) - 1, 0) for t in trajectories]))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RowLoss(Loss):
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

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: "Facts", values: Tensor | None = None
    ) -> LossSum:
        rows = facts.trajectories

        def split(flat: Tensor | None) -> list[Any]:
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


def as_loss(loss: Any, normaliser: float | None = None) -> Loss:
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
    if isinstance(loss, Loss):
        return loss
    unknown = [need for need in _stated_needs(loss) if need not in NEEDS]
    if unknown:
        raise TypeError(f"loss {name} needs {unknown[0]!r}; a loss may need {', '.join(NEEDS)}")
    _check_arguments(loss, name)
    if getattr(loss, "scope", "trajectory") not in ("trajectory", "batch"):
        raise TypeError(
            f"loss {name} has scope {loss.scope!r}; give 'trajectory', to be called with one row, or 'batch', to be "
            "called once with lists of all rows"
        )
    if normaliser is None and not callable(getattr(loss, "normaliser", None)):
        raise TypeError(
            f"loss {name} has no normaliser(trajectories), the number above 0 that the step's sum is divided by; give "
            "it one (loss.normaliser = lambda trajectories: float(len(trajectories))), or pass normaliser= to "
            "forward_backward"
        )
    return RowLoss(inner=loss)


def _as_sums(metrics: Mapping[str, Any] | None) -> Metrics:
    """Give plain numbers the weight 1. Tensors are cloned, since the loss may write into its metrics later."""

    def fixed(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in (metrics or {}).items()}
    return {name: (fixed(total), fixed(weight)) for name, (total, weight) in pairs.items()}


def name_of(loss: object) -> str:
    """Return the name of a function or class, or of any other object's class."""
    loss = loss.inner if isinstance(loss, RowLoss) else loss
    return getattr(loss, "__name__", type(loss).__name__)


def _stated_needs(loss: object) -> tuple[str, ...]:
    return tuple(getattr(loss, "needs", ("logprobs",)))


def _check_arguments(loss: Callable[..., Any], name: str) -> None:
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


# ---- for those who write losses


def weighted_means(watched: Mapping[str, Float[Tensor, " T"]], shares: Float[Tensor, " T"]) -> Metrics:
    """Make metrics of per-prediction numbers: their weighted means."""
    weight = shares.sum()
    return {name: ((shares * x.detach()).sum(), weight) for name, x in watched.items()}


def extremes(watched: dict[str, Tensor], shares: Tensor) -> Metrics:
    """Make metrics of per-prediction numbers [T]: the largest and the smallest where the share is not 0."""
    found: Metrics = {}
    trained = shares != 0
    weight = trained.any().to(shares.dtype)
    for name, x in watched.items() if len(shares) else ():
        found[f"{name}_max"] = torch.where(trained, x.detach(), -math.inf).max(), weight
        found[f"{name}_min"] = torch.where(trained, x.detach(), math.inf).min(), weight
    return found
