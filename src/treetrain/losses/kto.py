"""KTO: rows that are desirable or not, without pairs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.errors import DataError
from treetrain.losses.base import LARGEST, Metrics, check_number, check_positive
from treetrain.losses.batch import BatchLoss, log_likelihoods
from treetrain.losses.facts import Facts, PackedFacts, describe, require_nonnegative_weights

Reference = Literal["rows", "mismatched"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KTOLoss(BatchLoss):
    """weight * (1 - sigmoid(beta (score - z))) of desirable rows, (z - score) of others. Made by `kto`."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    reference_point: Reference | float
    """Where z comes from: see `kto`."""
    step_rows: int | None = None
    """How many rows the step has that z is made of; None where the loss was not told (`for_step`)."""

    def __post_init__(self) -> None:
        BatchLoss.__post_init__(self)
        check_positive("beta", self.beta)
        check_number("desirable_weight", self.desirable_weight, 0.0, LARGEST)
        check_number("undesirable_weight", self.undesirable_weight, 0.0, LARGEST)
        point = self.reference_point
        known = point in get_args(Reference) if isinstance(point, str) else _is_nonnegative(point)
        if not known:
            raise ValueError(
                f"reference_point is {point!r}; allowed are 'rows', 'mismatched' and finite numbers from 0 on"
            )

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def needed(self, trajectory: Trajectory) -> list[str]:
        """See `Loss.needed`."""
        lacks = ["chosen"] if trajectory.chosen is None and self.reference_point != "mismatched" else []
        return lacks + BatchLoss.needed(self, trajectory)

    @property
    def needs_step(self) -> bool:
        return self.step_rows is None and isinstance(self.reference_point, str)

    def for_step(self, trajectories: Sequence[Trajectory]) -> "KTOLoss":
        """This loss for a step of these rows, which must all be in one call: z is a mean over them."""
        return dataclasses.replace(self, step_rows=self._count(trajectories))

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for a missing fact or label.

        Raises:
            ValueError: a part of the step that `for_step` was told of.
        """
        BatchLoss.check(self, trajectories)
        found = self._count(trajectories)
        if isinstance(self.reference_point, str) and self.step_rows is not None and found != self.step_rows:
            raise ValueError(
                f"KTO's reference point is a mean over {self.step_rows} rows of the step, this call has {found} of "
                "them: give the whole step in one call (a budget bounds its memory), or a number as reference_point"
            )

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """Trained rows with a label. Raises DataError for a negative weight."""
        require_nonnegative_weights(trajectories)
        desirable, undesirable, _ = self._kinds(trajectories)
        return float(len(desirable) + len(undesirable))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        assert isinstance(facts, PackedFacts)
        kinds = self._kinds(facts.trajectories)
        desirable, undesirable, mismatched = (on_device(rows, logprobs.device) for rows in kinds)
        likelihood, score = log_likelihoods(logprobs, facts, average=False, reference=True)
        z = self._reference(score.detach(), torch.cat([desirable, undesirable]), mismatched)
        gain, loss = self.beta * (score[desirable] - z), self.beta * (z - score[undesirable])
        # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where x is large.
        total = (
            self.desirable_weight * torch.sigmoid(-gain).sum() + self.undesirable_weight * torch.sigmoid(-loss).sum()
        )
        with torch.no_grad():
            sides = torch.cat([gain, loss])
            metrics: Metrics = {"kl": (z, torch.ones_like(z)), "accuracy": _mean_of((sides > 0).to(sides.dtype))}
            for name, rows in (("chosen", desirable), ("rejected", undesirable)):
                metrics[f"{name}_reward"] = _mean_of(self.beta * score[rows])
                metrics[f"{name}_logps"] = _mean_of(likelihood[rows])
        return total, metrics

    def _reference(self, score: Tensor, labelled: Tensor, mismatched: Tensor) -> Tensor:
        """z, a scalar without gradient, 0 or more."""
        if not isinstance(self.reference_point, str):
            return score.new_full((), float(self.reference_point))
        rows = labelled if self.reference_point == "rows" else mismatched
        return score[rows].sum().div(max(len(rows), 1)).clamp(min=0)

    def _count(self, trajectories: Sequence[Trajectory]) -> int:
        return sum(map(len, self._kinds(trajectories)))

    def _kinds(self, trajectories: Sequence[Trajectory]) -> tuple[NDArray[np.int64], ...]:
        """Numbers of the trained rows that are desirable, undesirable, and mismatched."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for number, row in enumerate(trajectories):
            if not row.weights.any():
                continue
            if row.chosen is None and self.reference_point != "mismatched":
                raise DataError(
                    f"{describe(row, number)} does not say whether it is desirable; give chosen=True or chosen=False "
                    '(kto(reference_point="mismatched") takes rows without for its reference point)'
                )
            kinds[2 if row.chosen is None else int(not row.chosen)].append(number)
        if self.reference_point == "mismatched" and (kinds[0] or kinds[1]) and not kinds[2]:
            raise DataError(
                'no row for KTO\'s reference point: with reference_point="mismatched" a step needs trained rows '
                "without `chosen`, prompts with answers to other prompts"
            )
        return tuple(np.array(rows, np.int64) for rows in kinds)


def _mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.sum(), values.new_full((), float(len(values)))


def _is_nonnegative(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= cast(float, value) < math.inf


def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference_point: Reference | float = "rows",
) -> KTOLoss:
    """Kahneman-Tversky optimisation (arXiv 2402.01306, eq. 7), the mean over labelled rows.

    1 - sigmoid(beta (score - z)) for rows with `chosen` True, 1 - sigmoid(beta (z - score)) for rows with False, each
    times its weight. A score sums w (l - ref) over a row's tokens, w being the loss weights. `pair` is not read. z, the
    reference point, is the same for all rows of a step, has no gradient and is never below 0.

    The paper's z is KL(policy || reference), estimated by the scores of *mismatched* rows: a prompt with the answer to
    another one. Such rows cost a forward each, and are not in the data by themselves. So there are three choices:

    Args:
        beta: above 0; how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: of rows with `chosen` True and False, 0 or more. The paper wants the
            number of rows times the weight to be within a ratio of 1 to 4/3 of each other.
        reference_point: "rows" (default): z is the mean score of the step's own labelled rows. It needs nothing
            besides, but rises with what the policy learns of them, where the paper's does not.
            "mismatched": z is the mean score of the rows without `chosen`, which must have ref_logprobs and are not
            trained otherwise. Give each prompt with another prompt's answer to get the paper's z (and TRL's, which
            takes the answer of the row before); in a tree they cost the answer only.
            A number: z itself, 0 or more, e.g. measured beforehand; 0 compares with the reference policy alone.
            Only with a number may a step be spread over several calls.

    Metrics: kl (z), accuracy (rows on the right side of z), chosen_reward and rejected_reward (beta times the score),
    chosen_logps and rejected_logps (sums of w l).

    Raises:
        ValueError: an argument out of its range.
    """
    return KTOLoss(
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        reference_point=reference_point,
    )
