"""The base class of losses, and the training facts that they read as flat tensors.

K = trajectories, L_k = tokens of trajectory k, T = predictions in use.
"""

import abc
import dataclasses
import math
import sys
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Self, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.columns import GIVEN
from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import FACTS, Metrics, Rows, Scope, describe, require_facts
from treetrain.errors import DataError
from treetrain.tree.merged import MergedPredictions

Reduction = Literal["token", "trajectory"]
LossSum = tuple[Tensor, Metrics]
"""The unnormalised sum over some predictions, and metrics."""
LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss(abc.ABC):
    """A sum over weighted predictions. A subclass implements `evaluate` and declares what it `needs`.

    w are the loss weights (entry 0 of a row is never trained), x is the loss of one prediction. Reduction "token" is
    sum(w x) / sum(w) over the whole step. Reduction "trajectory" is that ratio for each trajectory that has weight,
    averaged over these trajectories.
    """

    scope: ClassVar[Scope] = "trajectory"
    needs: ClassVar[tuple[str, ...]] = ("logprobs",)
    """Names of the scores ("logprobs", "entropies", "predicted_values") and of the facts of trained rows ("advantages",
    "old_logprobs", ...) that the loss reads; "step" if it must know all rows of a step beforehand (`for_step`)."""
    mergeable: ClassVar[bool] = False
    """Whether rows that share a prediction may be merged into one. The loss and every metric must be sums over
    predictions of shares(reduction) * x, with x affine in the advantage below, at and above 0. Custom losses set it."""
    reads_untrained: ClassVar[bool] = False
    needs_step: ClassVar[bool] = False
    """Whether `for_step` must be called before the loss is given a part of a step and a normaliser."""

    reduction: Reduction
    """Mean over all tokens of the step, or over each trajectory's tokens first."""

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, get_args(Reduction))

    @property
    def sums_tokens(self) -> bool:
        """Whether the loss is sum(w x) / sum(w), and each x depends on one prediction only.

        Otherwise a token cannot count once for all rows that share it (`TokenTree.from_nodes(count="once")`).
        """
        return self.mergeable and self.reduction == "token"

    @property
    def identity(self) -> str:
        """The loss with its options, the same text in every process."""
        return repr(self)

    @abc.abstractmethod
    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: "Facts", values: Tensor | None) -> LossSum:
        """The unnormalised sum over T predictions, and metrics.

        Args:
            logprobs: [T], in nats; 0 where the weight is 0.
            entropies: [T], in nats, or None.
            facts: of the same predictions, in the dtype of logprobs. `facts.shares(self.reduction)` [T] are the
                weights in the sum; `facts.advantages`, `facts.old_logprobs` and so on are [T] too.
            values: [T], predicted by the model; None unless the loss needs "predicted_values".
        """

    def coefficients(self, facts: "Facts") -> Tensor | None:
        """d sum / d logprobs, [T], where it does not depend on the log-probabilities; else None.

        The engine can then run the language-model head once per row, forward and backward together.
        """
        return None

    def total_weight(self, rows: Rows) -> float:
        """The amount that these rows add to the normaliser of a step; 0 if nothing is trained.

        Raises:
            DataError: a negative weight.
        """
        require_nonnegative_weights(rows)
        if isinstance(rows, MergedPredictions):
            return rows.normaliser
        totals = [float(trajectory.weights.sum()) for trajectory in rows]
        return math.fsum(totals) if self.reduction == "token" else float(sum(total > 0 for total in totals))

    def check(self, rows: Rows) -> None:
        """Raise DataError for the first trained row or node that lacks a fact that the loss needs.

        Raises:
            ValueError: the rows are merged, but the loss is not mergeable or has another reduction.
        """
        if isinstance(rows, MergedPredictions):
            self._check_mergeable()
            if rows.reduction != self.reduction:
                raise ValueError(
                    f"{type(self).__name__}: rows merged for reduction {rows.reduction!r}, the loss has "
                    f"{self.reduction!r}; merge them for that"
                )
        require_facts(rows, [name for name in self.needs if name in FACTS])

    def normaliser(self, rows: Rows) -> float:
        """The divisor (> 0) of the sum over all rows of a step, computed before the step with numpy only.

        Raises:
            DataError: nothing to train, a negative weight, or a missing fact; raised before any work is done.
        """
        self.check(rows)
        total = self.total_weight(rows)
        if total > 0:
            return total
        of = "nodes" if isinstance(rows, MergedPredictions) else f"{len(rows)} trajectories"
        raise DataError(
            f"nothing to train: the loss weights of all {of} sum to 0 (entry 0 of a row is never trained); give "
            "loss_weights that are not 0, or rows of two tokens and more"
        )

    def for_step(self, trajectories: Sequence[Trajectory]) -> "Loss":
        """This loss with all that it must know of the whole step, for calls on parts of the step."""
        return self

    def pack(
        self,
        rows: Rows,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        used: NDArray | None = None,
    ) -> "Facts":
        """The facts that `packed` and `coefficients` take; see `Facts.pack`."""
        if isinstance(rows, MergedPredictions):
            self.check(rows)
        return Facts.pack(rows, device=device, dtype=dtype, used=used)

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: "Facts", values: Tensor | None = None
    ) -> LossSum:
        """The unnormalised sum over many trajectories, and metrics (detached, on the device of logprobs).

        Args:
            logprobs: [T], of the predictions that `facts` holds, in nats.
            entropies: [T], of the distributions they were taken from, in nats; None where not needed.
            facts: of the same predictions, in the same order.
            values: [T], predicted by a value head now for the states before the predicted tokens, or None.

        Raises:
            DataError: a trained trajectory lacks a fact that the loss needs.
            ValueError: shapes that disagree, entropies missing, or merged facts and a loss that is not mergeable.
        """
        self._check_shapes(logprobs, entropies, values, len(facts))
        if "predicted_values" not in self.needs:
            values = None
        facts = facts.like(logprobs)
        if isinstance(facts.source, MergedPredictions):
            self._check_mergeable()
        elif not facts.all_weighted:
            # Not a product with 0, which would be NaN where the value at an untrained token is infinite.
            trained = facts.weights != 0
            logprobs = torch.where(trained, logprobs, 0)
            entropies = None if entropies is None else torch.where(trained, entropies, 0)
            values = None if values is None else torch.where(trained, values, 0)
        return self.evaluate(logprobs, entropies, facts, values)

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None) -> LossSum:
        """The unnormalised sum over one trajectory, or over K of them where the scope is "batch". See `packed`.

        Args:
            logprobs: [L - 1], in nats; K such tensors if the scope is "batch".
            entropies: likewise, or None.
            trajectory: one, or K.
            values: likewise, for a loss that needs them.
        """
        if self.scope == "trajectory":
            logprobs, entropies, trajectory = [logprobs], None if entropies is None else [entropies], [trajectory]
            values = None if values is None else [values]
        if len(logprobs) != len(trajectory):
            raise ValueError(
                f"{type(self).__name__}: {len(logprobs)} rows of logprobs for {len(trajectory)} trajectories"
            )
        for number, (row, given) in enumerate(zip(trajectory, logprobs)):
            if given.shape != (max(len(row) - 1, 0),):
                raise ValueError(
                    f"{describe(row, number)} has {len(row)} tokens, so {max(len(row) - 1, 0)} predictions, "
                    f"but logprobs have shape {tuple(given.shape)}; give one for every token but the first"
                )

        def joined(rows: Any) -> Any:
            return None if rows is None else torch.cat(list(rows)) if len(rows) else torch.zeros(0)

        flat = joined(logprobs)
        facts = Facts.pack(trajectory, device=flat.device, dtype=flat.dtype)
        return self.packed(flat, joined(entropies), facts, joined(values))

    def _check_mergeable(self) -> None:
        if not self.mergeable:
            raise ValueError(
                f"{type(self).__name__} does not say that it is mergeable, so it must see every row by itself; pass "
                "the rows, or set mergeable = True if it is affine in the advantage (see Loss.mergeable)"
            )

    def _check_shapes(self, logprobs: Tensor, entropies: Tensor | None, values: Tensor | None, count: int) -> None:
        name = type(self).__name__
        if logprobs.shape != (count,):
            raise ValueError(
                f"{name}: logprobs have shape {tuple(logprobs.shape)}, the facts {count} predictions; pack "
                "the facts with the mask `used` of the predictions that are passed"
            )
        if "entropies" in self.needs and entropies is None:
            raise ValueError(f"{name}: the entropy bonus needs entropies, got None; set entropy=0.0 or pass them")
        if entropies is not None and entropies.shape != logprobs.shape:
            raise ValueError(
                f"{name}: entropies have shape {tuple(entropies.shape)}, logprobs {tuple(logprobs.shape)}; "
                "give one entropy per log-probability"
            )
        if "predicted_values" not in self.needs:
            return
        if values is None:
            raise ValueError(f"{name}: it needs values, got None; pass those of a value head, [L - 1] for each row")
        if values.shape != logprobs.shape:
            several = values.dim() > 1 and values.shape[0] == logprobs.shape[0]
            cure = "use a head of one label (num_labels=1)" if several else "give one value per prediction"
            raise ValueError(
                f"{name}: values have shape {tuple(values.shape)}, predictions {tuple(logprobs.shape)}; {cure}"
            )


def require_nonnegative_weights(rows: Rows) -> None:
    """Raise DataError for a weight below 0: a mean over signed weights can have any sign and size."""
    negative = rows.negative if isinstance(rows, MergedPredictions) else None
    for number, trajectory in enumerate(() if isinstance(rows, MergedPredictions) else rows):
        weights = trajectory.weights
        if weights.size and weights.min() < 0:
            at = int(weights.argmin())
            negative = f"{describe(trajectory, number)}: loss_weights[{at}] = {weights[at]:g}"
            break
    if negative is not None:
        raise DataError(
            f"{negative}, but a mean needs weights of 0 or more; put signs into advantages and use the reinforce "
            'loss, or give the normaliser of the step yourself (reduction="token" only)'
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Facts:
    """The facts of T predictions that a loss may read, made by `pack`.

    A fact is an attribute of its name, [T]: `advantages`, `old_logprobs`, `ref_logprobs`, `rollout_logprobs`,
    `teacher_logprobs` (in nats), `values` and `returns`. It is copied to the device when it is first read, so one that
    no loss reads costs nothing and may be missing; reading one that a trained row lacks raises DataError. A fact is 0
    where the weight is 0, so that a placeholder there cannot cause NaN.
    """

    source: Rows
    """K trajectories, whose predictions are concatenated: max(L_k - 1, 0) of each, since entry 0 of every per-token
    fact is unused. Or merged predictions, which have no rows."""
    dtype: torch.dtype
    """The dtype of all facts; losses convert to the dtype of the log-probabilities."""
    device: torch.device
    used: NDArray | None = dataclasses.field(repr=False)
    """Which predictions these are; see `pack`."""
    all_weighted: bool
    """Whether no prediction has weight 0; known without a device synchronisation."""
    _weights: NDArray[np.float64] = dataclasses.field(repr=False)
    _rows: NDArray[np.int64] = dataclasses.field(repr=False)
    _cache: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def pack(
        cls,
        source: Rows,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        used: NDArray | None = None,
    ) -> Self:
        """Concatenate the facts of trajectories, or take those of merged predictions.

        Args:
            source: K trajectories; empty and one-token rows are fine, they have no predictions. Or merged predictions.
            device: where the tensors live.
            dtype: of the facts and of the log-probabilities, float32 or float64.
            used: bool [sum of max(L_k - 1, 0)]: which of all predictions the caller passes to the loss, e.g.
                those with a weight. Of merged predictions: int64 [T], their numbers. None means all.

        Raises:
            ValueError: `used` has the wrong length or dtype.
        """
        if isinstance(source, MergedPredictions):
            weights = source.shares if used is None else source.shares[used]
            rows = np.zeros(0, np.int64)
        else:
            lengths = [max(len(trajectory) - 1, 0) for trajectory in source]
            rows = np.repeat(np.arange(len(lengths)), lengths)
            if used is not None and (used.shape != rows.shape or used.dtype != np.bool_):
                raise ValueError(
                    f"used is {used.dtype} {used.shape}, but the {len(lengths)} trajectories have {rows.size} "
                    "predictions; give one bool for each"
                )
            weights = _concatenate([trajectory.weights for trajectory in source])
            rows, weights = (rows, weights) if used is None else (rows[used], weights[used])
        return cls(
            source=source,
            dtype=dtype,
            device=torch.device(device),
            used=used,
            all_weighted=bool(weights.all()),
            _weights=weights,
            _rows=rows,
        )

    def __len__(self) -> int:
        return self._weights.size

    def __getattr__(self, name: str) -> Tensor:
        if name not in GIVEN:
            raise AttributeError(f"predictions have no fact {name!r}; there are {', '.join(GIVEN)}")
        return self._tensor(name)

    def like(self, logprobs: Tensor) -> "Facts":
        """These facts in the dtype and on the device of `logprobs`."""
        if (logprobs.dtype, logprobs.device) == (self.dtype, self.device):
            return self
        return dataclasses.replace(self, device=logprobs.device, dtype=logprobs.dtype, _cache={})

    def of_rows(self, numbers: NDArray[np.int64]) -> tuple[Self, NDArray[np.int64]]:
        """The facts of some trajectories.

        Args:
            numbers: int64, ascending: their numbers.

        Returns:
            Their facts, and int64 [t]: the indices of their predictions among the T.
        """
        wanted = np.zeros(len(self.trajectories), np.bool_)
        wanted[numbers] = True
        lengths = [max(len(trajectory) - 1, 0) for trajectory in self.trajectories]
        used = None if self.used is None else self.used[np.repeat(wanted, lengths)]
        rows = [self.trajectories[number] for number in numbers.tolist()]
        return self.pack(rows, device=self.device, dtype=self.dtype, used=used), np.flatnonzero(wanted[self._rows])

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """The K trajectories; a loss that compares rows is never given merged predictions."""
        assert not isinstance(self.source, MergedPredictions)
        return self.source

    @property
    def rows(self) -> Tensor:
        """int64 [T]: the trajectory (0..K-1) of each prediction."""
        if "rows" not in self._cache:
            self._cache["rows"] = on_device(self._rows, self.device)
        return self._cache["rows"]

    @property
    def weights(self) -> Tensor:
        """[T]: loss weights; of merged predictions, their shares."""
        return self._tensor("weights")

    def shares(self, reduction: Reduction) -> Tensor:
        """[T]: the factor of each prediction in the sum: its weight, or its weight over the sum of its row's.

        Raises:
            DataError: reduction "trajectory" and a negative weight.
            ValueError: rows that were merged for the other reduction.
        """
        if not isinstance(self.source, MergedPredictions):
            return self._tensor("weights" if reduction == "token" else "shares of rows")
        if reduction != self.source.reduction:
            raise ValueError(
                f"rows merged for reduction {self.source.reduction!r}, asked for {reduction!r}; merge again"
            )
        return self.weights

    def sum_by_row(self, per_prediction: Tensor) -> Tensor:
        """Sum [T] over each trajectory: [K], differentiable, 0 for rows without predictions."""
        return per_prediction.new_zeros(len(self.trajectories)).index_add(0, self.rows, per_prediction)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._cache:
            self._cache[name] = on_device(self._array(name), self.device, self.dtype)
        return self._cache[name]

    def _array(self, name: str) -> NDArray[np.float64]:
        """[T]: the weights, the shares of rows, or a fact."""
        if name == "weights":
            return self._weights
        if name == "shares of rows":
            require_nonnegative_weights(self.trajectories)
            totals = np.array([trajectory.weights.sum() for trajectory in self.trajectories], np.float64)
            totals[totals == 0] = 1.0  # such a row has no weight to divide
            return self._weights / totals[self._rows]
        require_facts(self.source, (name,))
        if isinstance(self.source, MergedPredictions):
            values = self.source.facts[name]
            return values if self.used is None else values[self.used]
        given = [(getattr(trajectory, name), len(trajectory)) for trajectory in self.source]
        flat = _concatenate([np.zeros(length) if fact is None else fact for fact, length in given])
        flat = flat if self.used is None else flat[self.used]
        return np.where(self._weights == 0, 0.0, flat)


def _concatenate(facts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(fact[1:] for fact in facts)])


def weighted_means(watched: dict[str, Tensor], shares: Tensor) -> Metrics:
    """Metrics: weighted means of per-prediction numbers, [T]."""
    weight = shares.sum()
    return {name: ((shares * x.detach()).sum(), weight) for name, x in watched.items()}


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(repr(choice) for choice in allowed)}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(name: str, value: object, low: float, high: float = LARGEST) -> None:
    """Raise ValueError unless `value` is a number with low <= value <= high."""
    if not (is_number(value) and low <= cast(float, value) <= high):
        upper = "to any finite one" if high == LARGEST else f"to {high:g}"
        raise ValueError(f"{name} is {value!r}; allowed are numbers from {low:g} {upper}")


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not (is_number(value) and 0 < cast(float, value) <= LARGEST):
        raise ValueError(f"{name} is {value!r}; allowed are finite numbers above 0")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; allowed are True and False")
