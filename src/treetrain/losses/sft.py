"""Supervised fine-tuning: the cross-entropy of the recorded tokens."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.losses.base import Loss, Metrics
from treetrain.losses.facts import Facts, PackedFacts, Reduction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss(Loss):
    """-log p(token), weighted. Made by `sft`."""

    mergeable: ClassVar[bool] = True

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        shares = facts.shares(self.reduction)
        total = -(shares * logprobs).sum()
        return total, {"nll": (total.detach(), shares.sum())}

    def coefficients(self, facts: Facts) -> Tensor:
        return -facts.shares(self.reduction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSFTLoss(SFTLoss):
    """The same of rows that are `chosen` alone: beside a loss on preferences, which shows rows to be avoided too."""

    mergeable: ClassVar[bool] = False

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """See `Loss.total_weight`; of chosen rows."""
        SFTLoss.total_weight(self, trajectories)
        return SFTLoss.total_weight(self, [row for row in trajectories if row.chosen])

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        shares = -self.coefficients(facts)
        total = -(shares * logprobs).sum()
        return total, {"nll": (total.detach(), shares.sum())}

    def coefficients(self, facts: Facts) -> Tensor:
        assert isinstance(facts, PackedFacts)
        chosen = on_device(np.array([bool(row.chosen) for row in facts.trajectories], bool), facts.device)
        return -torch.where(chosen[facts.rows], facts.shares(self.reduction), 0)


def sft(*, reduction: Reduction = "token") -> SFTLoss:
    """Cross-entropy of the tokens of the rows.

    Args:
        reduction: "token" (default) divides by the sum of all weights of the step; "trajectory" takes the
            mean of each trajectory first, so that long ones count no more than short ones.

    Metrics: nll, in nats per token; its exponential is the perplexity.

    Raises:
        ValueError: an unknown reduction.
    """
    return SFTLoss(reduction=reduction)
