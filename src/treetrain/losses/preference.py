"""Losses that compare rows: DPO, IPO and SimPO on pairs, KTO on rows that are desirable or not.

The score of a row is the sum of w (l - ref) over its tokens: w = the loss weight, l = the log-probability now, ref =
that under the reference policy. In a pair, c = the score of the chosen row, r = that of the rejected one.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import Metrics, Scope, describe
from treetrain.errors import DataError
from treetrain.losses.loss import (
    Facts,
    Loss,
    LossSum,
    Reduction,
    check_flag,
    check_number,
    check_positive,
    is_number,
    require_nonnegative_weights,
)

Int64s = NDArray[np.int64]
Reference = Literal["rows", "mismatched"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowComparison(Loss):
    """A loss that compares rows. The engine scores all of them before it computes gradients."""

    scope: ClassVar[Scope] = "batch"
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)

    beta: float
    """How strongly the policy is held to the reference, or how steep the loss is."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_positive("beta", self.beta)


def row_scores(logprobs: Tensor, facts: Facts, *, average: bool, reference: bool) -> tuple[Tensor, Tensor]:
    """The log-likelihood of every row, and its score: that minus the one under the reference.

    Args:
        logprobs: [T].
        average: divide each row's weighted sum by the sum of its weights; a row without weight counts 0.
        reference: whether there is one (`ref_logprobs`).

    Returns:
        [K] each; the first detached.
    """
    weights = facts.shares("trajectory" if average else "token")
    above = logprobs - facts.ref_logprobs if reference else logprobs
    return facts.sum_by_row(weights * logprobs.detach()), facts.sum_by_row(weights * above)


class Pairs(NamedTuple):
    """P pairs, in the order of each pair's first row."""

    chosen: Int64s
    """int64 [P]: number of each pair's chosen row."""
    rejected: Int64s
    """int64 [P]"""


def find_pairs(trajectories: Sequence[Trajectory]) -> Pairs:
    """The pairs with something to train in at least one of their rows.

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
    return Pairs(
        np.array([chosen[0] for chosen, _ in counted], np.int64),
        np.array([rejected[0] for _, rejected in counted], np.int64),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss(RowComparison):
    """A function of c - r, averaged over the pairs. Made by `dpo`, `ipo` and `simpo`."""

    shape: Literal["logistic", "squared"]
    """-log sigmoid(beta (c - r) - margin), or (c - r - 1 / (2 beta))^2."""
    average: bool
    """Whether a score is the mean over its row's tokens instead of the sum."""
    reference_free: bool = False
    """The reference is uniform: ref = 0."""
    label_smoothing: float = 0.0
    """The assumed rate of pairs with swapped labels."""
    margin: float = 0.0
    """The value that beta (c - r) should exceed."""

    def __post_init__(self) -> None:
        RowComparison.__post_init__(self)
        check_number("label_smoothing", self.label_smoothing, 0.0, 0.5)
        check_flag("reference_free", self.reference_free)
        check_number("margin", self.margin, 0.0)

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
        return float(len(find_pairs(trajectories).chosen))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        pairs = find_pairs(facts.trajectories)
        chosen, rejected = (on_device(rows, logprobs.device) for rows in pairs)
        likelihood, score = row_scores(logprobs, facts, average=self.average, reference=not self.reference_free)
        losses = self._pair_losses(score[chosen] - score[rejected])
        rewards = self.beta * score.detach()
        watched = {
            "accuracy": (rewards[chosen] > rewards[rejected]).to(losses.dtype),
            "margin": rewards[chosen] - rewards[rejected],
            "chosen_reward": rewards[chosen],
            "rejected_reward": rewards[rejected],
            "chosen_logps": likelihood[chosen],
            "rejected_logps": likelihood[rejected],
        }
        return losses.sum(), {name: _sum_and_count(x) for name, x in watched.items()}

    def _pair_losses(self, difference: Tensor) -> Tensor:
        """[P] losses of c - r, [P]."""
        if self.shape == "squared":
            return (difference - 1 / (2 * self.beta)).square()
        margin = self.beta * difference - self.margin
        losses = -F.logsigmoid(margin)
        if self.label_smoothing == 0:
            return losses
        return (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margin)


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> PairLoss:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta (c - r)), the mean over pairs.

    c and r are sums over the tokens of the chosen and the rejected row of w (l - ref). Rows of one `pair`, one
    with `chosen` True and one with False, must be in one call. A row without loss weights scores 0; a pair of
    such rows is not counted.

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
    return PairLoss(
        shape="logistic", average=False, beta=beta, label_smoothing=label_smoothing, reference_free=reference_free
    )


def ipo(*, beta: float = 0.1) -> PairLoss:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17): (c - r - 1 / (2 beta))^2, the mean over pairs.

    c and r are means over the tokens (weighted by w) of l - ref. The paper has sums, which grow with the
    length; means are common in practice. Needs ref_logprobs.

    Args:
        beta: above 0; the paper's tau. The target margin of a pair is 1 / (2 beta) nats per token.

    Metrics: as `dpo`; chosen_logps and rejected_logps are means over tokens.

    Raises:
        ValueError: an argument out of its range.
    """
    return PairLoss(shape="squared", average=True, beta=beta)


def simpo(*, beta: float = 2.0, margin: float = 1.0) -> PairLoss:
    """Simple preference optimisation (arXiv 2405.14734, eq. 6): -log sigmoid(beta (c - r) - margin).

    c and r are mean log-probabilities of a row's tokens, weighted by w; there is no reference policy. The loss is
    the mean over pairs.

    Args:
        beta: above 0.
        margin: the paper's gamma, 0 or more: what beta (c - r) should exceed.

    Metrics: as `dpo`; chosen_logps and rejected_logps are means over tokens, `margin` is beta (c - r).

    Raises:
        ValueError: an argument out of its range.
    """
    return PairLoss(shape="logistic", average=True, reference_free=True, beta=beta, margin=margin)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KTOLoss(RowComparison):
    """weight * (1 - sigmoid(beta (score - z))), with z - score for undesirable rows. Made by `kto`."""

    desirable_weight: float
    undesirable_weight: float
    reference_point: Reference | float
    """Where z comes from: see `kto`."""
    step_rows: int | None = None
    """Number of trained rows in the step; None before `for_step`."""

    def __post_init__(self) -> None:
        RowComparison.__post_init__(self)
        check_number("desirable_weight", self.desirable_weight, 0.0)
        check_number("undesirable_weight", self.undesirable_weight, 0.0)
        point = self.reference_point
        if point not in get_args(Reference) and not (is_number(point) and 0 <= cast(float, point) < math.inf):
            raise ValueError(
                f"reference_point is {point!r}; allowed are 'rows', 'mismatched' and finite numbers from 0 on"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        labels = () if self.reference_point == "mismatched" else ("chosen",)
        return ("logprobs", *labels, "ref_logprobs", *(("step",) if self.compares_with_the_step else ()))

    @property
    def compares_with_the_step(self) -> bool:
        """Whether z is a mean over rows of the whole step, so that the step must be in one call."""
        return isinstance(self.reference_point, str)

    @property
    def needs_step(self) -> bool:
        return self.step_rows is None and self.compares_with_the_step

    def for_step(self, trajectories: Sequence[Trajectory]) -> "KTOLoss":
        """This loss for a step of these rows, which must all be in one call: z is a mean over them."""
        return dataclasses.replace(self, step_rows=sum(map(len, self._kinds(trajectories))))

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for a missing fact or label.

        Raises:
            ValueError: these are only a part of the step that `for_step` was given.
        """
        rows = sum(map(len, self._kinds(trajectories)))
        Loss.check(self, trajectories)
        if self.compares_with_the_step and self.step_rows is not None and rows != self.step_rows:
            raise ValueError(
                f"KTO's reference point is a mean over {self.step_rows} rows of the step, this call has {rows} of "
                "them: give the whole step in one call (a budget bounds its memory), or a number as reference_point"
            )

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """The number of trained rows with a label. Raises DataError for a negative weight."""
        require_nonnegative_weights(trajectories)
        desirable, undesirable, _ = self._kinds(trajectories)
        return float(len(desirable) + len(undesirable))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        kinds = self._kinds(facts.trajectories)
        desirable, undesirable, mismatched = (on_device(rows, logprobs.device) for rows in kinds)
        likelihood, score = row_scores(logprobs, facts, average=False, reference=True)
        z = score.new_full((), 0.0 if self.compares_with_the_step else cast(float, self.reference_point))
        if self.compares_with_the_step:
            rows = mismatched if self.reference_point == "mismatched" else torch.cat([desirable, undesirable])
            z = score.detach()[rows].sum().div(max(len(rows), 1)).clamp(min=0)
        gain, loss = self.beta * (score[desirable] - z), self.beta * (z - score[undesirable])
        # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where x is large.
        total = (
            self.desirable_weight * torch.sigmoid(-gain).sum() + self.undesirable_weight * torch.sigmoid(-loss).sum()
        )
        sides = torch.cat([gain, loss]).detach()
        metrics: Metrics = {"kl": (z, torch.ones_like(z)), "accuracy": _sum_and_count((sides > 0).to(sides.dtype))}
        for name, rows in (("chosen", desirable), ("rejected", undesirable)):
            metrics[f"{name}_reward"] = _sum_and_count(self.beta * score.detach()[rows])
            metrics[f"{name}_logps"] = _sum_and_count(likelihood[rows])
        return total, metrics

    def _kinds(self, trajectories: Sequence[Trajectory]) -> tuple[Int64s, ...]:
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
    another one. Such rows cost a forward each, and data sets do not contain them. So there are three choices:

    Args:
        beta: above 0; how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: of rows with `chosen` True and False, 0 or more. The paper
            recommends a ratio of 1 to 4/3 between the two products of weight and number of rows.
        reference_point: "rows" (default): z is the mean score of the step's own labelled rows. It needs no
            other rows, but rises as the policy learns these rows, unlike the paper's.
            "mismatched": z is the mean score of the rows without `chosen`, which must have ref_logprobs and are not
            trained otherwise. Give each prompt with another prompt's answer to get the paper's z (and TRL's, which
            takes the answer of the row before); in a tree they cost the answer only.
            A number: z itself, 0 or more, e.g. measured beforehand; 0 compares with the reference policy alone.
            A step may be split over several calls only with a number.

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


def _sum_and_count(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.sum(), values.new_full((), float(len(values)))
