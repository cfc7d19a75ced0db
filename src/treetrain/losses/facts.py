"""The training facts of many predictions as flat tensors: of trajectories, or of predictions that rows share.

K = trajectories, L_k = tokens of trajectory k, T = predictions, only those in use.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.errors import DataError

Reduction = Literal["token", "trajectory"]
REDUCTIONS: tuple[Reduction, ...] = ("token", "trajectory")

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
}
_NEGATIVE = (
    ", but a mean needs weights of 0 or more; put signs into advantages and use the reinforce loss, or give the "
    'normaliser of the step yourself (reduction="token" only)'
)


def describe(trajectory: Trajectory, number: int) -> str:
    """How messages name a trajectory: its id, or its number in the batch where it has none."""
    return f"trajectory number {number} (from 0)" if trajectory.id is None else f"trajectory {trajectory.id!r}"


def require_facts(trajectories: Sequence[Trajectory], names: Sequence[str]) -> None:
    """Raise DataError for the first trajectory with something to train that lacks one of the named facts."""
    for number, trajectory in enumerate(trajectories):
        missing = [name for name in names if getattr(trajectory, name) is None]
        if missing and trajectory.weights.any():
            row, name = describe(trajectory, number), missing[0]
            raise DataError(f"{row} has no {name}, which the loss needs; {REMEDIES[name]}")


def require_nonnegative_weights(trajectories: Sequence[Trajectory]) -> None:
    """Raise DataError for a weight below 0: a mean over signed weights can have any sign and size."""
    for number, trajectory in enumerate(trajectories):
        weights = trajectory.weights
        if weights.size and weights.min() < 0:
            at = int(weights.argmin())
            raise DataError(f"{describe(trajectory, number)}: loss_weights[{at}] = {weights[at]:g}{_NEGATIVE}")


class MergedRows(Protocol):
    """T predictions that several rows share, as plain arrays; `TokenTree.merged` makes them.

    Each stands for all rows that share a prediction and everything that the loss reads of it except the advantage:
    with the sum of their shares, and the mean of their advantages, which are all below, all at or all above 0.
    """

    @property
    def reduction(self) -> Reduction:
        """How the shares were counted."""
        ...

    @property
    def shares(self) -> NDArray[np.float64]:
        """[T]: what each prediction counts in the sum; never 0."""
        ...

    @property
    def normaliser(self) -> float:
        """What these add to the normaliser of a step."""
        ...

    @property
    def num_trained(self) -> int:
        """Rows that have something to train."""
        ...

    @property
    def lacking(self) -> Mapping[str, str]:
        """Name of a fact -> who is trained without it. The facts ([T]) are attributes by their names."""
        ...

    @property
    def negative(self) -> str | None:
        """Where a loss weight is below 0, with its value."""
        ...


def require_merged_facts(merged: MergedRows, names: Sequence[str]) -> None:
    """As `require_facts`."""
    for name in names:
        if name in merged.lacking:
            raise DataError(f"{merged.lacking[name]} has no {name}, which the loss needs; {REMEDIES[name]}")


def require_nonnegative_merged(merged: MergedRows) -> None:
    """As `require_nonnegative_weights`."""
    if merged.negative is not None:
        raise DataError(merged.negative + _NEGATIVE)


class Facts(abc.ABC):
    """What a loss may read of T predictions: `PackedFacts` of rows, or `MergedFacts`."""

    __slots__ = ()
    dtype: torch.dtype
    device: torch.device

    @abc.abstractmethod
    def __len__(self) -> int:
        """T."""

    @abc.abstractmethod
    def like(self, logprobs: Tensor) -> Self:
        """These facts in the dtype and on the device of `logprobs`."""

    @abc.abstractmethod
    def shares(self, reduction: Reduction) -> Tensor:
        """[T]: what each prediction counts in the sum."""

    @abc.abstractmethod
    def _fact(self, name: str) -> Tensor: ...

    @property
    def advantages(self) -> Tensor:
        """[T]. Raises DataError, as all facts below, if a trajectory that is trained has none."""
        return self._fact("advantages")

    @property
    def old_logprobs(self) -> Tensor:
        """[T], in nats: under the policy that sampled the rows."""
        return self._fact("old_logprobs")

    @property
    def ref_logprobs(self) -> Tensor:
        """[T], in nats: under the reference policy."""
        return self._fact("ref_logprobs")

    @property
    def rollout_logprobs(self) -> Tensor:
        """[T], in nats: as the sampler itself recorded them."""
        return self._fact("rollout_logprobs")

    @property
    def teacher_logprobs(self) -> Tensor:
        """[T], in nats: under the teacher."""
        return self._fact("teacher_logprobs")

    @property
    def values(self) -> Tensor:
        """[T]: value estimates at sampling time."""
        return self._fact("values")

    @property
    def returns(self) -> Tensor:
        """[T]."""
        return self._fact("returns")

    def _tensor(self, array: NDArray[np.float64]) -> Tensor:
        return on_device(array, self.device, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedFacts(Facts):
    """The facts of K trajectories, concatenated over their predictions; made by `pack`.

    Row k has max(L_k - 1, 0) predictions: entry 0 of every per-token fact is dropped. Facts go to
    the device when they are first asked for, so one that no loss reads costs nothing and may be missing. At
    predictions of weight 0 every fact reads 0, so that a placeholder there can never turn into NaN.
    """

    trajectories: Sequence[Trajectory]
    lengths: Tensor
    """int64 [K]: predictions of each row, whether used or not."""
    rows: Tensor
    """int64 [T]: the trajectory (0..K-1) of each prediction."""
    weights: Tensor
    """[T]: loss weights."""
    dtype: torch.dtype
    """Of all facts; the losses convert to the dtype of the log-probabilities."""
    device: torch.device
    all_weighted: bool
    """No prediction has weight 0. Known without asking the device."""
    _used: NDArray[np.bool_] | None = dataclasses.field(repr=False)
    _weights: NDArray[np.float64] = dataclasses.field(repr=False)
    _rows: NDArray[np.int64] = dataclasses.field(repr=False)
    _cache: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def pack(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        used: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Concatenate trajectories.

        Args:
            trajectories: K of them; empty and one-token rows are fine, they have no predictions.
            device: where the tensors live.
            dtype: of the facts: the dtype of the log-probabilities, float32 or float64.
            used: bool [sum of max(L_k - 1, 0)]: which of all predictions the caller passes to the loss, e.g.
                those with a weight; None means all. T is then their number.

        Raises:
            ValueError: `used` has another length than there are predictions.
        """
        lengths = np.array([max(len(trajectory) - 1, 0) for trajectory in trajectories], np.int64)
        rows = np.repeat(np.arange(lengths.size), lengths)
        if used is not None and (used.shape != rows.shape or used.dtype != np.bool_):
            raise ValueError(
                f"used is {used.dtype} {used.shape}, but the {lengths.size} trajectories have {rows.size} "
                "predictions; give one bool for each"
            )
        weights = _concatenate([trajectory.weights for trajectory in trajectories])
        rows, weights = (rows, weights) if used is None else (rows[used], weights[used])
        device = torch.device(device)
        return cls(
            trajectories=trajectories,
            lengths=on_device(lengths, device),
            rows=on_device(rows, device),
            weights=on_device(weights, device, dtype),
            dtype=dtype,
            device=device,
            all_weighted=bool(weights.all()),
            _used=used,
            _weights=weights,
            _rows=rows,
        )

    def __len__(self) -> int:
        """T, the number of (used) predictions."""
        return self._rows.size

    def like(self, logprobs: Tensor) -> Self:
        """These facts in the dtype and on the device of `logprobs`."""
        if (logprobs.dtype, logprobs.device) == (self.dtype, self.device):
            return self
        return self.pack(self.trajectories, device=logprobs.device, dtype=logprobs.dtype, used=self._used)

    def shares(self, reduction: Reduction) -> Tensor:
        """[T]: what each prediction counts in the sum: its weight, or its part of its row's weights.

        Raises:
            DataError: reduction "trajectory" and a negative weight.
        """
        if reduction == "token":
            return self.weights
        if "shares" not in self._cache:
            require_nonnegative_weights(self.trajectories)
            totals = np.array([trajectory.weights.sum() for trajectory in self.trajectories], np.float64)
            totals[totals == 0] = 1.0  # such a row has no weight to divide
            self._cache["shares"] = self._tensor(self._weights / totals[self._rows])
        return self._cache["shares"]

    def of_rows(self, numbers: NDArray[np.int64]) -> tuple[Self, NDArray[np.int64]]:
        """The facts of some trajectories.

        Args:
            numbers: int64, ascending: which of them.

        Returns:
            Their facts, and int64 [t]: the places of their predictions among the T.
        """
        wanted = np.zeros(len(self.trajectories), np.bool_)
        wanted[numbers] = True
        lengths = [max(len(trajectory) - 1, 0) for trajectory in self.trajectories]
        used = None if self._used is None else self._used[np.repeat(wanted, lengths)]
        rows = [self.trajectories[number] for number in numbers.tolist()]
        return self.pack(rows, device=self.device, dtype=self.dtype, used=used), np.flatnonzero(wanted[self._rows])

    def sum_by_row(self, per_prediction: Tensor) -> Tensor:
        """Sum [T] over each trajectory: [K], differentiable, 0 for rows without predictions."""
        return per_prediction.new_zeros(len(self.trajectories)).index_add(0, self.rows, per_prediction)

    def _fact(self, name: str) -> Tensor:
        if name not in self._cache:
            require_facts(self.trajectories, (name,))
            given = [(getattr(trajectory, name), len(trajectory)) for trajectory in self.trajectories]
            flat = _concatenate([np.zeros(length) if fact is None else fact for fact, length in given])
            flat = flat if self._used is None else flat[self._used]
            self._cache[name] = self._tensor(np.where(self._weights == 0, 0.0, flat))
        return self._cache[name]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MergedFacts(Facts):
    """The facts of merged predictions, for a loss that is `mergeable`: no rows, and no weights besides the shares."""

    merged: MergedRows
    dtype: torch.dtype
    device: torch.device
    _index: NDArray[np.int64] | None = dataclasses.field(repr=False)
    _cache: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def pack(
        cls,
        merged: MergedRows,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        index: NDArray[np.int64] | None = None,
    ) -> Self:
        """Facts of merged predictions.

        Args:
            merged: T of them.
            device: where the tensors live.
            dtype: of the facts: the dtype of the log-probabilities, float32 or float64.
            index: int64 [t], which predictions the caller passes to the loss, in which order; None means all.
        """
        return cls(merged=merged, dtype=dtype, device=torch.device(device), _index=index)

    def __len__(self) -> int:
        """T, or as many as were picked."""
        return len(self.merged.shares if self._index is None else self._index)

    def like(self, logprobs: Tensor) -> Self:
        if (logprobs.dtype, logprobs.device) == (self.dtype, self.device):
            return self
        return self.pack(self.merged, device=logprobs.device, dtype=logprobs.dtype, index=self._index)

    def shares(self, reduction: Reduction) -> Tensor:
        """[T]: what the rows of each prediction count in the sum, together.

        Raises:
            ValueError: another reduction than that of the merged rows.
        """
        if reduction != self.merged.reduction:
            raise ValueError(
                f"rows merged for reduction {self.merged.reduction!r}, asked for {reduction!r}; merge again"
            )
        return self._picked("shares", self.merged.shares)

    def _fact(self, name: str) -> Tensor:
        require_merged_facts(self.merged, (name,))
        return self._picked(name, getattr(self.merged, name))

    def _picked(self, name: str, array: NDArray[np.float64]) -> Tensor:
        if name not in self._cache:
            self._cache[name] = self._tensor(array if self._index is None else array[self._index])
        return self._cache[name]


def _concatenate(facts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(fact[1:] for fact in facts)])
