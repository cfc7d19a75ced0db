"""Losses over several trajectories at once: each row as one number."""

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from treetrain.losses.base import Loss
from treetrain.losses.facts import PackedFacts, Reduction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss(Loss):
    """A loss that compares rows. The engine scores all of them before it asks for gradients."""

    scope: ClassVar[Literal["trajectory", "batch"]] = "batch"
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)


def log_likelihoods(logprobs: Tensor, facts: PackedFacts, *, average: bool, reference: bool) -> tuple[Tensor, Tensor]:
    """Every row's log-likelihood, and its score: the same less that under the reference.

    Args:
        logprobs: [T].
        average: divide each row's weighted sum by its weights; a row without weight counts 0.
        reference: whether there is one (`ref_logprobs`).

    Returns:
        [K] each; the first detached.
    """
    weights = facts.shares("trajectory" if average else "token")
    above = logprobs - facts.ref_logprobs if reference else logprobs
    with torch.no_grad():
        likelihood = facts.sum_by_row(weights * logprobs)
    return likelihood, facts.sum_by_row(weights * above)
