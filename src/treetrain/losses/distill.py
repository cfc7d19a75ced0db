"""Distillation from a teacher that scored the rows' own tokens."""

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from treetrain.losses.base import Loss, Metrics, check_choice, check_positive
from treetrain.losses.facts import Facts, Reduction
from treetrain.losses.importance import IMPORTANCE_MODES, ImportanceMode, importance, per_sequence
from treetrain.losses.kl import k2, k3

DistillEstimator = Literal["policy_gradient", "k2", "k3"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistillLoss(Loss):
    """A divergence of the student from the teacher, estimated on sampled tokens. Made by `distill`."""

    estimator: DistillEstimator
    importance_cap: float | None
    """Largest correction for rows that the present student did not sample; None for no correction."""
    importance_mode: ImportanceMode

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_choice("estimator", self.estimator, get_args(DistillEstimator))
        if self.importance_cap is not None:
            check_positive("importance_cap", self.importance_cap)
        check_choice("importance_mode", self.importance_mode, IMPORTANCE_MODES)

    @property
    def mergeable(self) -> bool:
        return self.importance_cap is None or not per_sequence(self.importance_mode)

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return ("teacher_logprobs",) if self.importance_cap is None else ("teacher_logprobs", "rollout_logprobs")

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        teacher = facts.teacher_logprobs
        loss = _divergence(self.estimator, logprobs, teacher)
        with torch.no_grad():
            watched = {"reverse_kl": logprobs - teacher, "teacher_nll": -teacher, "nll": -logprobs}
        if self.importance_cap is not None:
            factor, seen = importance(logprobs, facts, self.importance_cap, self.importance_mode)
            loss, watched = loss * factor, watched | seen
        shares = facts.shares(self.reduction)
        weight = shares.sum()
        metrics: Metrics = {name: ((shares * x.detach()).sum(), weight) for name, x in watched.items()}
        return (shares * loss).sum(), metrics


def _divergence(estimator: DistillEstimator, logprobs: Tensor, teacher: Tensor) -> Tensor:
    """[T]: the loss of each token, before any correction."""
    if estimator == "k2":
        return k2(logprobs, teacher)
    if estimator == "k3":
        return k3(logprobs, teacher)
    gap = (logprobs - teacher).detach()
    # The value of k1, with the gradient of -advantage * l for advantage = teacher - l.
    return gap + gap * (logprobs - logprobs.detach())


def distill(
    *,
    estimator: DistillEstimator = "k3",
    reduction: Reduction = "token",
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
) -> DistillLoss:
    """On-policy distillation (arXiv 2306.13649, 2306.08543) from the teacher's log-probabilities of the rows' tokens.

    With l the student's log-probability of a token that it sampled, t the teacher's (`teacher_logprobs`): the student
    is drawn to the teacher on its own answers, every token for itself (no credit for what comes later).

    Args:
        estimator: what is averaged, and which divergence its gradient lowers where the rows are the student's own.
            "policy_gradient": value l - t, gradient that of -A l with the advantage A = t - l: KL(student || teacher).
            "k2": (l - t)^2 / 2, the same gradient; its value is never negative.
            "k3" (default): exp(t - l) - 1 - (t - l), never negative, an unbiased value of KL(student || teacher); its
            gradient, 1 - exp(t - l), is that of KL(teacher || student), and is large where the teacher finds a token
            much more likely than the student does.
        reduction: "token" (default), the mean over all tokens of the step; or "trajectory".
        importance_cap, importance_mode: where an older student or another sampler wrote the rows, each token's loss
            is multiplied by exp(l - rollout), bounded; see `ppo`. The rows then need rollout_logprobs.

    Metrics: reverse_kl (mean of l - t), nll and teacher_nll; those of the correction, see `ppo`.

    Raises:
        ValueError: an argument out of its range.
    """
    return DistillLoss(
        estimator=estimator, reduction=reduction, importance_cap=importance_cap, importance_mode=importance_mode
    )
