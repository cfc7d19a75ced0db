"""Facts of predictions, which a loss reads, and metrics, which it reports.

Shape letters: K trajectories, L tokens of one of them, T predictions in use.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from treetrain.core.device_arrays import on_device
from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import GIVEN, Trajectory

Reduction = Literal["token", "trajectory"]
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

    id_logprobs: Float[Tensor, " n"] | None = None
    """The log-probabilities, now, of the ids of the rows' `teacher_topk` at the predictions; None unless needed."""

    def __len__(self) -> int:
        return self._weights.size

    def __getattr__(self, name: str) -> Float[Tensor, " T"]:
        if name not in GIVEN:
            raise AttributeError(f"predictions have no fact {name!r}; there are {', '.join(GIVEN)}")
        require_facts(self.trajectories, (name,))  # only now: a fact that no loss reads may be missing
        given = [(getattr(trajectory, name), len(trajectory)) for trajectory in self.trajectories]
        columns = (np.zeros(max(length - 1, 0)) if fact is None else fact[1:] for fact, length in given)
        flat = np.concatenate([np.zeros(0), *columns])
        flat = flat if self.used is None else flat[self.used]
        fact = on_device(np.where(self._weights == 0, 0.0, flat), self.device, self.dtype)
        setattr(self, name, fact)  # `__getattr__` is not called again
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
    "rollout_logprobs": "give rollout_logprobs=... as the sampler recorded them, or no importance_... options",
    "teacher_logprobs": "give teacher_logprobs=..., the teacher's log-probabilities of the row's own tokens",
    "teacher_topk": "give teacher_topk=(ids, logprobs), the teacher's most likely ids at each trained token",
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


def split_by_trajectory(
    per_prediction: Shaped[Tensor, " T *c"], trajectories: Sequence[Trajectory], used: Bool[np.ndarray, " _"] | None
) -> list[Shaped[Tensor, " _ *c"]]:
    """Split used predictions into one tensor [L - 1] or [L - 1, c] per trajectory, with 0 at unused ones."""
    flat = per_prediction
    if used is not None and not used.all():
        place = on_device(np.flatnonzero(used), flat.device)
        flat = flat.new_zeros((len(used), *flat.shape[1:])).index_copy(0, place, per_prediction)
    return list(flat.split([max(len(t) - 1, 0) for t in trajectories]))


# ---- for those who write losses
