"""Supervised fine-tuning: the cross-entropy of the recorded tokens."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from treetrain.losses.base import Loss, Metrics
from treetrain.losses.facts import Facts, Reduction


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
