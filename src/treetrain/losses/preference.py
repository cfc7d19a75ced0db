"""Losses on preference pairs: DPO, IPO, SimPO.

Of a pair: c = the score of the chosen row, r = that of the rejected one. A score sums over the row's tokens
w (l - ref), w being the loss weights, l the log-probability now and ref that under the reference policy.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.losses.base import LARGEST, Metrics, check_flag, check_number, check_positive
from treetrain.losses.batch import BatchLoss, log_likelihoods
from treetrain.losses.facts import Facts, PackedFacts, require_nonnegative_weights
from treetrain.losses.pairs import find_pairs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss(BatchLoss):
    """A function of c - r, averaged over the pairs."""

    average: ClassVar[bool]
    """Whether a score is the mean over its row's tokens instead of the sum."""

    beta: float
    """How steep the loss is in c - r."""

    def __post_init__(self) -> None:
        BatchLoss.__post_init__(self)
        check_positive("beta", self.beta)

    @property
    def has_reference(self) -> bool:
        """Whether scores are relative to the reference policy."""
        return True

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return ("ref_logprobs",) if self.has_reference else ()

    @abc.abstractmethod
    def pair_losses(self, difference: Tensor) -> Tensor:
        """[P] losses of c - r, [P]."""

    def needed(self, trajectory: Trajectory) -> list[str]:
        """See `Loss.needed`."""
        lacks = [name for name in ("pair", "chosen") if getattr(trajectory, name) is None]
        return lacks + BatchLoss.needed(self, trajectory)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for a missing fact, or rows that are not pairs; see `find_pairs`."""
        find_pairs(trajectories)
        BatchLoss.check(self, trajectories)

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """The number of pairs with something to train. Raises DataError for a negative weight."""
        require_nonnegative_weights(trajectories)
        return float(len(find_pairs(trajectories).chosen))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        assert isinstance(facts, PackedFacts)
        pairs = find_pairs(facts.trajectories)
        chosen, rejected = (on_device(rows, logprobs.device) for rows in pairs)
        likelihood, score = log_likelihoods(logprobs, facts, average=self.average, reference=self.has_reference)
        losses = self.pair_losses(score[chosen] - score[rejected])
        with torch.no_grad():
            rewards = self.beta * score[chosen], self.beta * score[rejected]
            watched = {
                "accuracy": (rewards[0] > rewards[1]).to(losses.dtype),
                "margin": rewards[0] - rewards[1],
                "chosen_reward": rewards[0],
                "rejected_reward": rewards[1],
                "chosen_logps": likelihood[chosen],
                "rejected_logps": likelihood[rejected],
            }
            count = losses.new_full((), float(len(pairs.chosen)))
            metrics: Metrics = {name: (x.sum(), count) for name, x in watched.items()}
        return losses.sum(), metrics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss(PairLoss):
    """-(1 - s) log sigmoid(beta (c - r)) - s log sigmoid(-beta (c - r)). Made by `dpo`."""

    average: ClassVar[bool] = False

    label_smoothing: float
    """s: how often the labels of a pair are taken to be the wrong way round."""
    reference_free: bool
    """The reference is uniform: ref = 0."""

    def __post_init__(self) -> None:
        PairLoss.__post_init__(self)
        check_number("label_smoothing", self.label_smoothing, 0.0, 0.5)
        check_flag("reference_free", self.reference_free)

    @property
    def has_reference(self) -> bool:
        return not self.reference_free

    def pair_losses(self, difference: Tensor) -> Tensor:
        losses = -F.logsigmoid(self.beta * difference)
        if self.label_smoothing == 0:
            return losses
        flipped = -F.logsigmoid(-self.beta * difference)
        return (1 - self.label_smoothing) * losses + self.label_smoothing * flipped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IPOLoss(PairLoss):
    """(c - r - 1 / (2 beta))^2, scores being means over tokens. Made by `ipo`."""

    average: ClassVar[bool] = True

    def pair_losses(self, difference: Tensor) -> Tensor:
        return (difference - 1 / (2 * self.beta)).square()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimPOLoss(PairLoss):
    """-log sigmoid(beta (c - r) - margin), scores being mean log-probabilities. Made by `simpo`."""

    average: ClassVar[bool] = True

    margin: float
    """What beta (c - r) should exceed."""

    def __post_init__(self) -> None:
        PairLoss.__post_init__(self)
        check_number("margin", self.margin, 0.0, LARGEST)

    @property
    def has_reference(self) -> bool:
        return False

    def pair_losses(self, difference: Tensor) -> Tensor:
        return -F.logsigmoid(self.beta * difference - self.margin)


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> DPOLoss:
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
    return DPOLoss(beta=beta, label_smoothing=label_smoothing, reference_free=reference_free)


def ipo(*, beta: float = 0.1) -> IPOLoss:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17): (c - r - 1 / (2 beta))^2, the mean over pairs.

    c and r are means over the tokens (weighted by w) of l - ref: the paper writes sequence likelihoods; divided by
    the length they do not grow with it, which is how the method is run in practice. Needs ref_logprobs.

    Args:
        beta: above 0; the paper's tau. The margin that pairs are pulled to is 1 / (2 beta) nats per token.

    Metrics: as `dpo`; chosen_logps and rejected_logps are means over tokens.

    Raises:
        ValueError: an argument out of its range.
    """
    return IPOLoss(beta=beta)


def simpo(*, beta: float = 2.0, margin: float = 1.0) -> SimPOLoss:
    """Simple preference optimisation (arXiv 2405.14734, eq. 6): -log sigmoid(beta (c - r) - margin).

    c and r are mean log-probabilities of a row's tokens, weighted by w; there is no reference policy. The mean over
    pairs.

    Args:
        beta: above 0.
        margin: the paper's gamma, 0 or more: what beta (c - r) should exceed.

    Metrics: as `dpo`; chosen_logps and rejected_logps are means over tokens, `margin` is beta (c - r).

    Raises:
        ValueError: an argument out of its range.
    """
    return SimPOLoss(beta=beta, margin=margin)
