"""Direct preference optimisation: pairs of a chosen and a rejected row."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import (
    Facts,
    Loss,
    LossSum,
    Reduction,
    Scope,
    check_flag,
    check_number,
    check_positive,
    describe,
    require_nonnegative_weights,
)
from treetrain.errors import DataError

Int64s = NDArray[np.int64]


def find_pairs(trajectories: Sequence[Trajectory]) -> tuple[Int64s, Int64s]:
    """Numbers of the chosen and of the rejected row of every pair that trains something.

    Rows with nothing to train need no pair.

    Raises:
        DataError: a trained row without a pair; a pair that is not one chosen and one rejected row.
    """
    members: dict[Hashable, tuple[list[int], list[int]]] = {}
    trained: set[Hashable] = set()
    for number, row in enumerate(trajectories):
        has_weight = bool(row.weights.any())
        if row.pair is None:
            if has_weight:
                raise DataError(
                    f"{describe(row, number)} is trained but has no pair; give pair=... and chosen=True or False, or "
                    "loss_weights=0 to keep it as context"
                )
            continue
        if row.chosen is None:
            raise DataError(
                f"{describe(row, number)} of pair {row.pair!r} does not say whether it is chosen; give chosen=True "
                "or chosen=False"
            )
        members.setdefault(row.pair, ([], []))[0 if row.chosen else 1].append(number)
        if has_weight:
            trained.add(row.pair)
    for pair, kinds in members.items():
        if [len(rows) for rows in kinds] != [1, 1]:
            names = [
                f"{kind} {', '.join(describe(trajectories[number], number) for number in rows) or 'none'}"
                for kind, rows in zip(("chosen", "rejected"), kinds)
            ]
            raise DataError(
                f"pair {pair!r} has {len(kinds[0])} chosen and {len(kinds[1])} rejected rows ({'; '.join(names)}); a "
                "pair is one of each: give other pairs other names, and all rows of a pair in one call"
            )
    counted = [rows for pair, rows in members.items() if pair in trained]
    chosen, rejected = ([rows[kind][0] for rows in counted] for kind in (0, 1))
    return np.array(chosen, np.int64), np.array(rejected, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss(Loss):
    """-log sigmoid(beta (c - r)), the mean over pairs. Made by `dpo`. The engine scores all rows before the first
    gradient."""

    scope: ClassVar[Scope] = "batch"
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)

    beta: float
    label_smoothing: float
    reference_free: bool

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_positive("beta", self.beta)
        check_number("label_smoothing", self.label_smoothing, 0.0, 0.5)
        check_flag("reference_free", self.reference_free)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("logprobs", "pair", "chosen", *(() if self.reference_free else ("ref_logprobs",)))

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for a missing fact, or rows that are not pairs; see `find_pairs`."""
        find_pairs(trajectories)
        Loss.check(self, trajectories)

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """The number of pairs with something to train. Raises DataError for a negative weight."""
        require_nonnegative_weights(trajectories)
        return float(len(find_pairs(trajectories)[0]))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        chosen, rejected = (on_device(rows, logprobs.device) for rows in find_pairs(facts.trajectories))
        above = logprobs if self.reference_free else logprobs - facts.ref_logprobs
        score = facts.sum_by_row(facts.weights * above)
        likelihood = facts.sum_by_row(facts.weights * logprobs.detach())
        margin = self.beta * (score[chosen] - score[rejected])
        losses = -F.logsigmoid(margin)
        if self.label_smoothing:
            losses = (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margin)
        rewards = self.beta * score.detach()
        watched = {
            "accuracy": (rewards[chosen] > rewards[rejected]).to(losses.dtype),
            "margin": rewards[chosen] - rewards[rejected],
            "chosen_reward": rewards[chosen],
            "rejected_reward": rewards[rejected],
            "chosen_logps": likelihood[chosen],
            "rejected_logps": likelihood[rejected],
        }
        return losses.sum(), {name: (x.sum(), x.new_full((), float(len(x)))) for name, x in watched.items()}


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> DPOLoss:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta (c - r)), the mean over pairs.

    c and r are sums over the tokens of the chosen and the rejected row of w (l - ref): w the loss weight, l the
    log-probability now, ref that under the reference policy. Rows of one `pair`, one with `chosen` True and one with
    False, must be in one call. A row without loss weights scores 0; a pair of such rows is not counted.

    Args:
        beta: above 0; how strongly the policy is held to the reference.
        label_smoothing: 0 to 0.5, the assumed rate of swapped labels (conservative DPO: the loss of the pair and of
            the swapped pair, weighted 1 - label_smoothing and label_smoothing).
        reference_free: ref = 0; otherwise every trained row needs ref_logprobs.

    Metrics: accuracy (chosen reward above the rejected), margin, chosen_reward and rejected_reward (beta times the
    score), chosen_logps and rejected_logps (sums of w l), all means over pairs.

    Raises:
        ValueError: an argument out of its range.
    """
    return DPOLoss(beta=beta, label_smoothing=label_smoothing, reference_free=reference_free)
