"""What a loss is: a sum over predictions, one normaliser known before the step, and metrics that add up."""

import abc
import dataclasses
import math
import sys
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.losses.facts import (
    REDUCTIONS,
    Facts,
    MergedFacts,
    MergedRows,
    PackedFacts,
    Reduction,
    describe,
    require_facts,
    require_merged_facts,
    require_nonnegative_merged,
    require_nonnegative_weights,
)

LARGEST = sys.float_info.max
Metrics = dict[str, tuple[float | Tensor, float | Tensor]]
"""Name -> (weighted sum, weight): the mean is their quotient, so parts, micro-batches and ranks add up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss(abc.ABC):
    """A sum over weighted predictions; a subclass writes `evaluate`, and what it needs.

    With w the loss weights (entry 0 of a row is never trained), x the loss of one prediction:
    reduction "token" is sum(w x) / sum(w) over the whole step; reduction "trajectory" is the mean over the
    trajectories that have weight of each one's sum(w x) / sum(w).
    """

    scope: ClassVar[Literal["trajectory", "batch"]] = "trajectory"
    mergeable: ClassVar[bool] = False
    """Whether rows that share a prediction may be merged into one: the sum and every metric are sums over predictions
    of shares(reduction) * x, with x affine in the advantage below, at and above 0. A loss of your own must say so."""

    reduction: Reduction
    """Mean over all tokens of the step, or over each trajectory's tokens first."""

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)

    @property
    def sums_tokens(self) -> bool:
        """Whether it is sum(w x) / sum(w) over predictions, each x that of one prediction by itself.

        Only then may a token count once for all rows that share it (`TokenTree.from_nodes(count="once")`).
        """
        return self.mergeable and self.reduction == "token"

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss must be given entropies."""
        return False

    @property
    def needs_logprobs(self) -> bool:
        """Whether it depends on log-probabilities; False where values are all, so that a critic can be trained."""
        return True

    @property
    def needs_values(self) -> bool:
        """Whether the loss must be given values, predicted for the states before the predicted tokens."""
        return False

    @property
    def needs_facts(self) -> tuple[str, ...]:
        """Names of the per-token facts that every trained trajectory must have."""
        return ()

    @abc.abstractmethod
    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        """The unnormalised sum over T predictions, and metrics.

        Args:
            logprobs: [T], in nats; 0 where the weight is 0.
            entropies: [T], in nats, or None.
            facts: of the same predictions, in the dtype of logprobs: `facts.shares(self.reduction)` [T] is what each
                counts in the sum, `facts.advantages`, `facts.old_logprobs` and so on are [T] too.
        """

    def evaluate_valued(
        self, logprobs: Tensor, entropies: Tensor | None, values: Tensor, facts: Facts
    ) -> tuple[Tensor, Metrics]:
        """As `evaluate`, for a loss that needs values, [T]."""
        raise NotImplementedError(f"{type(self).__name__} says that it needs values and does not say what for")

    def coefficients(self, facts: Facts) -> Tensor | None:
        """d sum / d logprobs, [T], where it does not depend on the log-probabilities; else None.

        It lets the engine run the language-model head once per row, forward and backward in one go.
        """
        return None

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """What these trajectories add to the normaliser of a step; 0 where nothing is trained.

        Raises:
            DataError: a negative weight.
        """
        require_nonnegative_weights(trajectories)
        totals = [float(trajectory.weights.sum()) for trajectory in trajectories]
        return math.fsum(totals) if self.reduction == "token" else float(sum(total > 0 for total in totals))

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for the first trained trajectory that lacks a fact which the loss needs."""
        require_facts(trajectories, self.needs_facts)

    def normaliser(self, trajectories: Sequence[Trajectory]) -> float:
        """What the sum over all trajectories of a step is divided by: > 0, known before the step, numpy only.

        Raises:
            DataError: nothing to train, a negative weight, or a missing fact: all before any work is done.
        """
        self.check(trajectories)
        return _some(self.total_weight(trajectories), f"{len(trajectories)} trajectories")

    def needed(self, trajectory: Trajectory) -> list[str]:
        """Names of what a row lacks for this loss; per-token facts only where the row is trained."""
        trained = trajectory.weights.any()
        return [name for name in self.needs_facts if trained and getattr(trajectory, name) is None]

    def takes(self, trajectory: Trajectory) -> bool:
        """Whether a row has all that this loss needs."""
        return not self.needed(trajectory)

    @property
    def needs_step(self) -> bool:
        """Whether `for_step` must be called before the loss is given a part of a step and a normaliser."""
        return False

    def for_step(self, trajectories: Sequence[Trajectory]) -> "Loss":
        """This loss with what must be known of all trajectories of a step, for calls on parts of them."""
        return self

    def merged_normaliser(self, merged: MergedRows) -> float:
        """As `normaliser`, of rows that are merged; errors name nodes."""
        self.check_merged(merged)
        self.check_signs(merged)
        return _some(self.merged_weight(merged), "nodes")

    @staticmethod
    def check_signs(merged: MergedRows) -> None:
        """Raise DataError for a negative weight, which a normaliser cannot be made of."""
        require_nonnegative_merged(merged)

    def merged_weight(self, merged: MergedRows) -> float:
        """As `total_weight`, of rows that are merged."""
        return merged.normaliser

    def check_merged(self, merged: MergedRows) -> None:
        """Raise DataError where the loss needs a fact that a trained node lacks.

        Raises:
            ValueError: this loss is not mergeable, or the rows were merged for another reduction.
        """
        self._check_mergeable()
        if merged.reduction != self.reduction:
            raise ValueError(
                f"{type(self).__name__}: rows merged for reduction {merged.reduction!r}, the loss has "
                f"{self.reduction!r}; merge them for that"
            )
        require_merged_facts(merged, self.needs_facts)

    def _check_mergeable(self) -> None:
        if not self.mergeable:
            raise ValueError(
                f"{type(self).__name__} does not say that it is mergeable, so it must see every row by itself; pass "
                "the rows, or set mergeable = True if it is affine in the advantage (see Loss.mergeable)"
            )

    @staticmethod
    def pack(
        trajectories: Sequence[Trajectory],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        used: NDArray[np.bool_] | None = None,
    ) -> PackedFacts:
        """The facts that `packed` and `coefficients` take; see `PackedFacts.pack`."""
        return PackedFacts.pack(trajectories, device=device, dtype=dtype, used=used)

    def pack_merged(
        self,
        merged: MergedRows,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        index: NDArray[np.int64] | None = None,
    ) -> MergedFacts:
        """The facts that `packed` and `coefficients` take, of merged rows; see `MergedFacts.pack`, `check_merged`."""
        self.check_merged(merged)
        return MergedFacts.pack(merged, device=device, dtype=dtype, index=index)

    def packed(
        self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
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
        _check_shapes(self, logprobs, entropies, len(facts))
        _check_values(self, logprobs, values)
        facts = facts.like(logprobs)
        if isinstance(facts, MergedFacts):
            self._check_mergeable()
        elif isinstance(facts, PackedFacts) and not facts.all_weighted:
            # Not multiplied by 0: an infinite value at an untrained token would make NaN of that.
            trained = facts.weights != 0
            logprobs = torch.where(trained, logprobs, 0)
            entropies = None if entropies is None else torch.where(trained, entropies, 0)
            values = None if values is None else torch.where(trained, values, 0)
        if not self.needs_values:
            return self.evaluate(logprobs, entropies, facts)
        assert values is not None
        return self.evaluate_valued(logprobs, entropies, values, facts)

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any, *, values: Any = None) -> tuple[Tensor, Metrics]:
        """The unnormalised sum over one trajectory, or over K of them where the scope is "batch". See `packed`.

        Args:
            logprobs: [L - 1], in nats; of scope "batch" K such tensors.
            entropies: likewise, or None.
            trajectory: one, or K.
            values: likewise, for a loss that needs them.
        """
        if self.scope == "trajectory":
            logprobs, entropies, trajectory = [logprobs], None if entropies is None else [entropies], [trajectory]
            values = None if values is None else [values]
        _check_rows(self, logprobs, trajectory)
        flat = torch.cat(list(logprobs)) if len(trajectory) else torch.zeros(0)
        spread = None if entropies is None or not len(trajectory) else torch.cat(list(entropies))
        valued = None if values is None else torch.cat(list(values)) if len(trajectory) else flat
        return self.packed(flat, spread, self.pack(trajectory, device=flat.device, dtype=flat.dtype), valued)


def _some(total: float, of: str) -> float:
    if total > 0:
        return total
    raise DataError(
        f"nothing to train: the loss weights of all {of} sum to 0 (entry 0 of a row is never trained); give "
        "loss_weights that are not 0, or rows of two tokens and more"
    )


def _check_rows(loss: Loss, logprobs: Sequence[Tensor], trajectories: Sequence[Trajectory]) -> None:
    if len(logprobs) != len(trajectories):
        raise ValueError(
            f"{type(loss).__name__}: {len(logprobs)} rows of logprobs for {len(trajectories)} trajectories"
        )
    for number, (row, given) in enumerate(zip(trajectories, logprobs)):
        predictions = max(len(row) - 1, 0)
        if given.shape != (predictions,):
            raise ValueError(
                f"{describe(row, number)} has {len(row)} tokens, so {predictions} predictions, "
                f"but logprobs have shape {tuple(given.shape)}; give one for every token but the first"
            )


def _check_shapes(loss: Loss, logprobs: Tensor, entropies: Tensor | None, count: int) -> None:
    name = type(loss).__name__
    if logprobs.shape != (count,):
        raise ValueError(
            f"{name}: logprobs have shape {tuple(logprobs.shape)}, the facts {count} predictions; pack "
            "the facts with the mask `used` of the predictions that are passed"
        )
    if loss.needs_entropy and entropies is None:
        raise ValueError(f"{name}: the entropy bonus needs entropies, got None; set entropy=0.0 or pass them")
    if entropies is not None and entropies.shape != logprobs.shape:
        raise ValueError(
            f"{name}: entropies have shape {tuple(entropies.shape)}, logprobs {tuple(logprobs.shape)}; "
            "give one entropy per log-probability"
        )


def _check_values(loss: Loss, logprobs: Tensor, values: Tensor | None) -> None:
    name = type(loss).__name__
    if loss.needs_values and values is None:
        raise ValueError(f"{name}: it needs values, got None; pass those of a value head, [L - 1] for each row")
    if loss.needs_values and values is not None and values.shape != logprobs.shape:
        several = values.dim() > 1 and values.shape[0] == logprobs.shape[0]
        cure = "use a head of one label (num_labels=1)" if several else "give one value per prediction"
        raise ValueError(
            f"{name}: values have shape {tuple(values.shape)}, predictions {tuple(logprobs.shape)}; {cure}"
        )


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(repr(choice) for choice in allowed)}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise ValueError unless `value` is a number with low <= value <= high."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high):
        upper = "to any finite one" if high == LARGEST else f"to {high:g}"
        raise ValueError(f"{name} is {value!r}; allowed are numbers from {low:g} {upper}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= LARGEST):
        raise ValueError(f"{name} is {value!r}; allowed are finite numbers above 0")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; allowed are True and False")


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Weighted sums to means, in one device-to-host copy; a metric without weight is left out."""
    if not metrics:
        return {}
    numbers = [torch.as_tensor(number, dtype=torch.float64) for pair in metrics.values() for number in pair]
    device = next((number.device for number in numbers if number.device.type != "cpu"), torch.device("cpu"))
    flat = torch.stack([number.detach().to(device) for number in numbers]).tolist()
    pairs = zip(metrics, flat[0::2], flat[1::2], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight != 0}


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two parts as those of both; a name may be in one of them only."""
    total = dict(a)
    for name, (value, weight) in b.items():
        value_before, weight_before = total.get(name, (0.0, 0.0))
        total[name] = (value_before + value, weight_before + weight)
    return total
