"""Losses without advantages: the cross-entropy of the recorded tokens, and distillation from a teacher."""

import dataclasses
from typing import Literal, get_args

from torch import Tensor

from treetrain.losses.kl import IMPORTANCE_MODES, ImportanceMode, importance, k2, k3
from treetrain.losses.loss import Facts, Loss, LossSum, Reduction, check_choice, check_positive, weighted_means

DistillEstimator = Literal["policy_gradient", "k2", "k3"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss(Loss):
    """-log p(token), weighted. Made by `sft`."""

    mergeable = True

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        shares = -self.coefficients(facts)
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
        return self.importance_cap is None or self.importance_mode.startswith("token")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("logprobs", "teacher_logprobs", *(() if self.importance_cap is None else ("rollout_logprobs",)))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        teacher = facts.teacher_logprobs
        gap = (logprobs - teacher).detach()
        if self.estimator == "policy_gradient":
            # The value of k1, with the gradient of -advantage * l for advantage = teacher - l.
            loss = gap + gap * (logprobs - logprobs.detach())
        else:
            loss = (k2 if self.estimator == "k2" else k3)(logprobs, teacher)
        watched = {"reverse_kl": gap, "teacher_nll": -teacher, "nll": -logprobs}
        if self.importance_cap is not None:
            factor, correction = importance(logprobs, facts, self.importance_cap, self.importance_mode)
            loss, watched = loss * factor, watched | correction
        shares = facts.shares(self.reduction)
        return (shares * loss).sum(), weighted_means(watched, shares)


def distill(
    *,
    estimator: DistillEstimator = "k3",
    reduction: Reduction = "token",
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
) -> DistillLoss:
    """On-policy distillation (arXiv 2306.13649, 2306.08543) from the teacher's log-probabilities of the rows' tokens.

    l is the student's log-probability of a sampled token, t the teacher's (`teacher_logprobs`). The student moves
    towards the teacher on its own answers, each token independently (no credit for later tokens).

    Args:
        estimator: the averaged value, and the divergence that its gradient lowers if the student sampled the rows.
            "policy_gradient": value l - t, with the gradient of -A l, advantage A = t - l: KL(student || teacher).
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
