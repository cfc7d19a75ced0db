"""The loss protocol, the checks of a user's loss, and the adapter for it.

A loss has four members: `scope`, `needs`, `normaliser(trajectories)` and the call. `as_loss` checks them once. The
losses of `treetrain.losses` implement `PackedLoss`, so that one call evaluates many rows; any other loss is wrapped in
`RowLoss`, which calls it row by row. The engine then works with `PackedLoss` alone.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory
from treetrain.device_arrays import on_device
from treetrain.errors import DataError
from treetrain.tree.merged import MergedPredictions

Metrics = dict[str, tuple[Any, Any]]
"""Name -> (weighted sum, weight), numbers or scalar tensors; those of parts, micro-batches and ranks are added."""


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two parts as those of both."""
    total = dict(a)
    for name, (value, weight) in b.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + value, before[1] + weight)
    return total


def read_metrics(sums: Metrics) -> Metrics:
    """Metrics as floats, in one copy from the device."""
    numbers = _read(number for pair in sums.values() for number in pair)
    return dict(zip(sums, zip(numbers[0::2], numbers[1::2])))


def mean_metrics(sums: Metrics) -> dict[str, float]:
    """Weighted sums to means; a metric without weight is left out."""
    return {name: total / weight for name, (total, weight) in read_metrics(sums).items() if weight != 0}


def _read(values: Iterable[Any]) -> list[float]:
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
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: the tree's, less those that no wanted prediction depends on."""
    recomputed_tokens: int
    """Tokens of the passes without graph: prefills, and whole passes before the first backward."""
    parts: int
    """Forward-backward passes it took."""
    attention: Mapping[str, int] = field(default_factory=dict)
    """Attention calls of its forwards, by the backend that ran."""

    @cached_property
    def loss(self) -> float:
        """Sum over all trajectories divided by the normaliser."""
        return _read([self.loss_tensor])[0]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Means of what the loss reports."""
        return mean_metrics(self.metric_sums)

    def on_host(self) -> "StepResult":
        """The same with plain numbers; waits for the device."""
        return replace(self, loss_tensor=self.loss, metric_sums=read_metrics(self.metric_sums))


def summed(results: Sequence[StepResult], *, over: int = 1) -> StepResult:
    """The results of a step's parts as one, without waiting for the device.

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
Rows = Sequence[Trajectory] | MergedPredictions
"""The rows of a step, or the predictions that rows of a tree of nodes share."""

FACTS = (*(name for name in PER_TOKEN_FACTS if name != "loss_weights"), "pair", "chosen")
NEEDS = ("logprobs", "entropies", "predicted_values", *FACTS, "step")
"""Everything that a loss may need: scores of the model, facts of the rows, and all rows of the step beforehand."""

PROTOCOL = (
    "a loss is called as loss(logprobs, entropies, trajectory) and returns (sum, metrics): logprobs is a tensor "
    "[L - 1], entropies another or None, trajectory the row with its facts, sum a scalar tensor that is not yet "
    "divided by anything, metrics a dict of numbers; loss.normaliser(trajectories) is what the step's sum is divided by"
)


class Loss(Protocol):
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


@runtime_checkable
class PackedLoss(Loss, Protocol):
    """A loss that evaluates the predictions of many rows in one call, [T] of them."""

    @property
    def reduction(self) -> Literal["token", "trajectory"]: ...
    @property
    def mergeable(self) -> bool:
        """Whether rows that share a prediction may be merged into one."""
        ...

    @property
    def sums_tokens(self) -> bool:
        """Whether the loss is a weighted mean over independent predictions."""
        ...

    @property
    def reads_untrained(self) -> bool:
        """Whether the loss must see predictions and rows without a loss weight."""
        ...

    @property
    def needs_step(self) -> bool:
        """Whether `for_step` must be called before the loss is given a part of a step and a normaliser."""
        ...

    @property
    def identity(self) -> str:
        """Text that is equal on two ranks with the same loss and options."""
        ...

    def check(self, rows: Any, /) -> None:
        """Raise DataError for the first trained row that lacks a fact which the loss needs."""
        ...

    def total_weight(self, rows: Any, /) -> float:
        """The share of these rows in a step's normaliser."""
        ...

    def for_step(self, trajectories: Sequence[Trajectory], /) -> "PackedLoss":
        """The loss, with what it must know of all rows of a step."""
        ...

    def pack(self, rows: Any, /, *, device: torch.device, dtype: torch.dtype, used: NDArray | None) -> Any:
        """The facts of [T] predictions. `used` picks them: a mask for rows, indices for merged predictions."""
        ...

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: Any, values: Tensor | None = None, /
    ) -> tuple[Tensor, Metrics]:
        """The unnormalised sum over the predictions of `facts`, and its metrics."""
        ...

    def coefficients(self, facts: Any, /) -> Tensor | None:
        """[T] d sum / d log-probability if that does not depend on the log-probabilities; else None."""
        ...

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, /, *, values: Any = None) -> tuple[Any, Any]: ...


def split_by_trajectory(
    per_prediction: Tensor, trajectories: Sequence[Trajectory], used: NDArray[np.bool_] | None
) -> list[Tensor]:
    """[T] or [T, c] of the used predictions -> one [L_k - 1] or [L_k - 1, c] per trajectory, 0 at unused ones."""
    flat = per_prediction
    if used is not None and not used.all():
        place = on_device(np.flatnonzero(used), flat.device)
        flat = flat.new_zeros((len(used), *flat.shape[1:])).index_copy(0, place, per_prediction)
    return list(flat.split([max(len(t) - 1, 0) for t in trajectories]))


class _PickedRows(NamedTuple):
    trajectories: Sequence[Trajectory]
    used: NDArray[np.bool_] | None
    """[sum of L_k - 1]: which predictions were computed; None for all."""


class RowLoss:
    """A user's own loss as a `PackedLoss`: it is called row by row, or once with lists if its scope is the batch."""

    reduction: Literal["token", "trajectory"] = "token"
    mergeable = False
    reads_untrained = True
    needs_step = False

    def __init__(self, loss: Any, *, normaliser_given: bool):
        self.inner, self.name = loss, name_of(loss)
        self.scope: Scope = getattr(loss, "scope", "trajectory")
        # A user's normaliser need not be a sum over rows, so it gets the rows of all ranks.
        self.needs = (*_stated_needs(loss), *(() if normaliser_given else ("step",)))
        self.sums_tokens = bool(getattr(loss, "sums_tokens", False))
        named = loss if hasattr(loss, "__qualname__") else type(loss)
        self.identity = f"{named.__module__}.{named.__qualname__}"

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None) -> tuple[Any, Any]:
        given = {"values": values} if "predicted_values" in self.needs else {}
        return checked_sum(self.name, self.inner(logprobs, entropies, trajectory, **given))

    def check(self, rows: Sequence[Trajectory]) -> None:
        require_facts(rows, [name for name in self.needs if name in FACTS])

    def total_weight(self, rows: Sequence[Trajectory]) -> float:
        return self.normaliser(rows)

    def normaliser(self, rows: Sequence[Trajectory]) -> float:
        return self.inner.normaliser(rows)

    def for_step(self, trajectories: Sequence[Trajectory]) -> "RowLoss":
        return self

    def pack(self, rows: Sequence[Trajectory], *, used: NDArray[np.bool_] | None = None, **_: Any) -> _PickedRows:
        return _PickedRows(rows, used)

    def coefficients(self, facts: _PickedRows) -> None:
        return None

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: _PickedRows, values: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        def split(flat: Tensor | None) -> list[Any]:
            if flat is None:
                return [None] * len(facts.trajectories)
            # Clones: the loss may write into its arguments.
            return [row.clone() for row in split_by_trajectory(flat, facts.trajectories, facts.used)]

        by_row = split(logprobs), split(entropies), split(values)
        if self.scope == "batch":
            lists = [None if flat is None else rows for flat, rows in zip((logprobs, entropies, values), by_row)]
            total, metrics = self(lists[0], lists[1], list(facts.trajectories), values=lists[2])
            return torch.as_tensor(total), _as_sums(metrics)
        total, sums = logprobs.new_zeros(()), {}
        for row, entropy, value, trajectory in zip(*by_row, facts.trajectories):
            row_sum, metrics = self(row, entropy, trajectory, values=value)
            total, sums = total + row_sum, add_metrics(sums, _as_sums(metrics))
        return total, sums


def as_loss(loss: Any, normaliser: float | None = None) -> PackedLoss:
    """A user's loss as a `PackedLoss`.

    Args:
        loss: the user's loss.
        normaliser: the user's normaliser; if None, the loss must have its own.

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
    if isinstance(loss, PackedLoss):
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
    return RowLoss(loss, normaliser_given=normaliser is not None)


def needs_logprobs(loss: PackedLoss) -> bool:
    """Whether log-probabilities must be computed for a loss; not if it reads predicted values alone."""
    return "predicted_values" not in loss.needs or "logprobs" in loss.needs or "entropies" in loss.needs


REMEDIES = {
    "advantages": "give advantages=..., e.g. the rewards of a group normalised within the group",
    "old_logprobs": "give old_logprobs=... (under the policy that sampled the row; the engine computes them "
    "before the first update), or pass on_policy=True to the loss if the model of this very step sampled "
    "the row",
    "ref_logprobs": "give ref_logprobs=... (the engine computes them from the reference model), or set kl=0.0 in a "
    "policy loss, reference_free=True in dpo",
    "rollout_logprobs": "give rollout_logprobs=... as the sampler recorded them, or set importance_cap=None",
    "teacher_logprobs": "give teacher_logprobs=..., the teacher's log-probabilities of the row's own tokens",
    "values": "give values=..., the value estimates at sampling time",
    "returns": "give returns=..., computed from rewards and values",
    "pair": "give pair=... and chosen=True or False, or loss_weights=0 to keep the row as context",
    "chosen": "give chosen=True or chosen=False",
}


def describe(trajectory: Trajectory, number: int) -> str:
    """How messages name a trajectory: its id, or its number in the batch if it has none."""
    return f"trajectory number {number} (from 0)" if trajectory.id is None else f"trajectory {trajectory.id!r}"


def require_facts(rows: Rows, names: Sequence[str]) -> None:
    """Raise DataError for the first row (or node) with something to train that lacks one of the named facts."""
    if isinstance(rows, MergedPredictions):
        lacking = [(rows.lacking[name], name) for name in names if name in rows.lacking]
    else:
        lacking = (
            (describe(row, number), name)
            for number, row in enumerate(rows)
            for name in names
            if getattr(row, name) is None and row.weights.any()
        )
    for place, name in lacking:
        raise DataError(f"{place} has no {name}, which the loss needs; {REMEDIES[name]}")


def _as_sums(metrics: Mapping[str, Any] | None) -> Metrics:
    """Metrics as sums and weights; a plain number has weight 1. Clones: the loss may write into its metrics later."""

    def fixed(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in (metrics or {}).items()}
    return {name: (fixed(total), fixed(weight)) for name, (total, weight) in pairs.items()}


def name_of(loss: Any) -> str:
    """The name of a function or class, or of the class of any other object."""
    return loss.name if isinstance(loss, RowLoss) else getattr(loss, "__name__", type(loss).__name__)


def _stated_needs(loss: Any) -> tuple[str, ...]:
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


def checked_sum(name: str, returned: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """The (sum, metrics) that a loss returned.

    Raises:
        TypeError: it is not such a pair, its sum is not a scalar, or its metrics are not a dict of numbers.
    """

    def wrong(value: Any, what: str) -> TypeError:
        if isinstance(value, Tensor):
            described = f"a tensor of shape {tuple(value.shape)}"
        elif isinstance(value, tuple | list):
            described = f"a {type(value).__name__} of {len(value)}"
        else:
            described = "None" if value is None else f"a {type(value).__name__}"
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
