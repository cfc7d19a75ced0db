"""Policy losses: one class, with REINFORCE, PPO, GRPO, DAPO, Dr. GRPO and GSPO as presets.

Notation: l = the log-probability now, old = that under the policy that sampled the row, A = the advantage,
r = exp(l - old).
"""

import dataclasses
import math
from typing import Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from treetrain.engine.loss import Rows
from treetrain.losses.kl import IMPORTANCE_MODES, KL_ESTIMATORS, ImportanceMode, KLEstimator, importance, k3
from treetrain.losses.loss import (
    Facts,
    Loss,
    LossSum,
    Reduction,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    weighted_means,
)
from treetrain.losses.value import clipped_value_loss, value_facts
from treetrain.tree.merged import MergedPredictions

Level = Literal["sequence", "token"]


class PolicyOptions(TypedDict, total=False):
    """Options of every policy loss; see `ppo`."""

    kl: float
    kl_estimator: KLEstimator
    entropy: float
    importance_cap: float | None
    importance_mode: ImportanceMode
    value_coefficient: float
    value_clip: float | None


class RatioOptions(PolicyOptions, total=False):
    """Those of losses with a ratio to the policy that sampled the rows."""

    on_policy: bool


class ClippedOptions(RatioOptions, total=False):
    """Those of losses that clip the ratio of each token."""

    clip: float
    clip_low: float | None
    clip_high: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Loss):
    """A policy term per token, corrected for the sampler's numerics, + kl * KL(policy || reference) - entropy *
    entropy of the policy + value_coefficient * value loss. The options are those of the presets."""

    surrogate: Literal["logprob", "clipped", "clipped sequence"] = "clipped"
    """-A l; -min(r A, clip(r) A); or the latter with the row's ratio, exp(mean of l - old over its tokens)."""
    clip: float = 0.2
    clip_low: float | None = None
    clip_high: float | None = None
    level: Level = "sequence"
    """Whether the gradient flows through the row's ratio, or through each token's own l, scaled by that ratio."""
    length: float | None = None
    """The weight of every trained row in the normaliser, in place of its weights (Dr. GRPO)."""
    kl: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy: float = 0.0
    importance_cap: float | None = None
    importance_mode: ImportanceMode = "token_truncate"
    on_policy: bool = False
    value_coefficient: float = 0.0
    value_clip: float | None = 0.2

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_number("clip", self.clip, 0.0, 1.0)
        for name, most in (("clip_low", 1.0), ("clip_high", math.inf), ("value_clip", math.inf)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, most)
        check_choice("level", self.level, get_args(Level))
        if self.length is not None:
            check_positive("length", self.length)
        for name in ("kl", "entropy", "value_coefficient"):
            check_number(name, getattr(self, name), 0.0)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.importance_cap is not None:
            check_positive("importance_cap", self.importance_cap)
        check_choice("importance_mode", self.importance_mode, IMPORTANCE_MODES)
        check_flag("on_policy", self.on_policy)

    @property
    def clipped(self) -> bool:
        """Whether there is a ratio to an old policy."""
        return self.surrogate != "logprob"

    @property
    def mergeable(self) -> bool:
        # The sign of A alone decides which bound applies. Losses that look at whole rows cannot be merged.
        by_row = self.importance_cap is not None and self.importance_mode.startswith("sequence")
        return self.surrogate != "clipped sequence" and not by_row

    @property
    def sums_tokens(self) -> bool:
        return self.mergeable and self.reduction == "token" and self.length is None

    @property
    def needs(self) -> tuple[str, ...]:
        needs = ["logprobs", "advantages"]
        needs += ["old_logprobs"] if self.clipped and not self.on_policy else []
        needs += [] if self.importance_cap is None else ["rollout_logprobs"]
        needs += [] if self.kl == 0 else ["ref_logprobs"]
        needs += [] if self.entropy == 0 else ["entropies"]
        needs += [] if self.value_coefficient == 0 else ["predicted_values", *value_facts(self.value_clip)]
        return tuple(needs)

    def total_weight(self, rows: Rows) -> float:
        total = Loss.total_weight(self, rows)
        if self.length is None:
            return total
        merged = isinstance(rows, MergedPredictions)
        return self.length * (rows.num_trained if merged else sum(bool(row.weights.any()) for row in rows))

    def sampling_logprobs(self, logprobs: Tensor, facts: Facts) -> Tensor:
        """[T] without gradient: under the policy that sampled the rows, in training's numerics."""
        return facts.old_logprobs if self.clipped and not self.on_policy else logprobs.detach()

    def log_ratio(self, logprobs: Tensor, facts: Facts) -> Tensor:
        """[T]: ln r of every token, or of the row it is in."""
        difference = logprobs - self.sampling_logprobs(logprobs, facts)
        if self.surrogate == "clipped":
            return difference
        mean = self._mean_of_row(difference, facts)
        return mean if self.level == "sequence" else mean.detach() + (difference - difference.detach())

    def _mean_of_row(self, per_prediction: Tensor, facts: Facts) -> Tensor:
        """[T]: the weighted mean over the row that each prediction is in."""
        return facts.sum_by_row(facts.shares("trajectory") * per_prediction)[facts.rows]

    def _policy_term(self, logprobs: Tensor, facts: Facts) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss per token, [T], and numbers to log per token, each [T]."""
        advantages = facts.advantages
        if not self.clipped:
            return -advantages * logprobs, {}
        log_ratio = self.log_ratio(logprobs, facts)
        low = self.clip if self.clip_low is None else self.clip_low
        log_low = math.log1p(-low) if low < 1 else -math.inf
        log_high = math.log1p(self.clip if self.clip_high is None else self.clip_high)
        # The minimum clips r only from above where A >= 0, and only from below where A < 0. Clipping log r
        # instead of r makes the gradient 0, not 0 * infinity, where exp would overflow.
        followed = torch.where(advantages < 0, log_ratio.clamp(min=log_low), log_ratio.clamp(max=log_high))
        loss = -advantages * followed.exp()
        with torch.no_grad():
            below = ((advantages < 0) & (log_ratio < log_low)).to(loss.dtype)
            above = ((advantages > 0) & (log_ratio > log_high)).to(loss.dtype)
            return loss, {
                "ratio": log_ratio.exp(),
                # Sampled from the old policy, so k3 of (old, now) estimates KL(old || now).
                "approx_kl": k3(self.sampling_logprobs(logprobs, facts), logprobs),
                "clip_fraction": below + above,
                "clip_fraction_low": below,
                "clip_fraction_high": above,
            }

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        loss, watched = self._policy_term(logprobs, facts)
        if self.importance_cap is not None:
            old = self.sampling_logprobs(logprobs, facts)
            factor, correction = importance(old, facts, self.importance_cap, self.importance_mode)
            loss, watched = loss * factor, watched | correction
        watched = {"policy_loss": loss, "advantage": facts.advantages} | watched
        if self.kl != 0:
            watched["kl"] = KL_ESTIMATORS[self.kl_estimator](logprobs, facts.ref_logprobs)
            loss = loss + self.kl * watched["kl"]
        if entropies is not None:
            watched["entropy"] = entropies
            loss = loss - self.entropy * entropies if self.entropy != 0 else loss
        shares = facts.shares(self.reduction)
        total, metrics = (shares * loss).sum(), weighted_means(watched, shares)
        if values is None:
            return total, metrics
        of_values, value_metrics = clipped_value_loss(values, facts, clip=self.value_clip, reduction=self.reduction)
        return total + self.value_coefficient * of_values, metrics | value_metrics

    def coefficients(self, facts: Facts) -> Tensor | None:
        # On policy r = 1, so the gradient of the policy term is -A whatever l is.
        constant = (self.on_policy or not self.clipped) and self.importance_cap is None
        kl_is_linear = self.kl == 0 or self.kl_estimator == "k1"
        if not (constant and kl_is_linear and self.entropy == 0 and self.value_coefficient == 0):
            return None
        credit = facts.advantages
        if self.surrogate == "clipped sequence" and self.level == "sequence":
            credit = self._mean_of_row(credit, facts)
        return facts.shares(self.reduction) * (self.kl - credit)


def reinforce(*, reduction: Reduction = "token", **options: Unpack[PolicyOptions]) -> PolicyLoss:
    """The score-function loss -A l (Williams 1992).

    Args:
        reduction: "token" (default) is the policy gradient, a sum over tokens, up to one factor for the
            whole step; "trajectory" divides each trajectory's sum by its length.
        options: kl, kl_estimator, entropy, importance_cap, importance_mode, value_coefficient (advantage actor-critic),
            value_clip: as `ppo`; the policy that sampled is taken to be the present one.

    Metrics: as `ppo`, without those of the ratio.
    """
    return PolicyLoss(surrogate="logprob", reduction=reduction, **options)


def ppo(*, reduction: Reduction = "token", **options: Unpack[ClippedOptions]) -> PolicyLoss:
    """The clipped surrogate -min(r A, clip(r) A) of PPO (arXiv 1707.06347, eq. 7), with a value loss if asked for.

    Args:
        reduction: "token" (default), the mean over time steps of the paper; or "trajectory".
        clip: r is clipped to 1 - clip and 1 + clip; 0 to 1, 0.2 by default.
        clip_low, clip_high: set one bound in place of `clip`.
        on_policy: the model of this step sampled the rows: r = 1 with the gradient of l, and old_logprobs are
            not read. False (default): every trained row needs them.
        kl: coefficient of the KL to the reference policy, 0 (default) or more; above 0 rows need ref_logprobs.
        kl_estimator: "k1", "k2" or "k3" (default; see treetrain.losses.kl). k1 has no useful gradient.
        entropy: coefficient of the entropy bonus, 0 (default) or more.
        importance_cap: above 0, the policy term (not KL or entropy) is multiplied by exp(old - rollout), which
            corrects for a sampler with other numerics, up to this number; rows then need rollout_logprobs. 2 to 5
            is common. None (default): no correction.
        importance_mode: "token_truncate" (default; larger factors become the cap) or "token_mask" (they become 0), for
            each token; "sequence_truncate" or "sequence_mask": one factor per row, from the sum over its tokens.
        value_coefficient: factor of the value loss (see `value`), 0 (default) or more; 0.5 is common. Above 0 the
            model needs a value head, and trained rows need returns (and values, for the clip). The value loss has the
            weights and the normaliser of the policy term.
        value_clip: the clip of the value loss, 0.2 by default.
        options: all arguments from `clip` on.

    Metrics: policy_loss, advantage, ratio, clip_fraction (and _low, _high), approx_kl = KL(old || now);
    kl and entropy where computed; those of `value`. With a correction: importance (the mean factor; importance_square
    that of its square, so 1 / (importance_square / importance^2) is the effective share of the tokens),
    importance_capped (the share above the cap) and rollout_kl = KL(rollout || old).

    Raises:
        ValueError: an argument out of its range.
    """
    return PolicyLoss(reduction=reduction, **options)


def grpo(*, reduction: Reduction = "trajectory", **options: Unpack[ClippedOptions]) -> PolicyLoss:
    """GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): the clipped surrogate on group advantages.

    The caller gives the advantages: rewards normalised within the group, see `treetrain.group_advantages`. The KL is
    part of the loss, not of the reward.

    Args:
        reduction: "trajectory" (default), as in the paper: the mean over an answer's tokens, then over answers; or
            "token".
        options: from `clip` on, and the metrics: as `ppo`.
    """
    return PolicyLoss(reduction=reduction, **options)


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, **options: Unpack[RatioOptions]) -> PolicyLoss:
    """DAPO (arXiv 2503.14476, eq. 8): the clipped surrogate on group advantages, with a higher upper bound.

    It is the mean over all tokens of the step, so long answers count by their length. The rest of the method concerns
    the data: groups whose rewards are all equal are left out or sampled again, and truncated answers get
    loss_weights=0 or a lower reward.

    Args:
        clip_low, clip_high: the ratio is clipped to 1 - clip_low and 1 + clip_high.
        options: from `on_policy` on, and the metrics: as `ppo`.
    """
    return PolicyLoss(reduction="token", clip_low=clip_low, clip_high=clip_high, **options)


def dr_grpo(*, length: float, **options: Unpack[ClippedOptions]) -> PolicyLoss:
    """GRPO done right (arXiv 2503.20783, section 3): no division by an answer's length, nor by a group's deviation.

    The sum over all weighted tokens of the clipped surrogate (and of KL and entropy), divided by the number of trained
    rows times `length`. The advantages should be rewards minus the mean of the group, not divided by its standard
    deviation: `group_advantages(..., divide_by_std=False)`.

    Args:
        length: the most tokens that an answer may have, the same number in every step of a run.
        options: from `clip` on, and the metrics (means over tokens): as `ppo`.
    """
    return PolicyLoss(reduction="token", length=length, **options)


def gspo(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4, level: Level = "sequence", **options: Unpack[RatioOptions]
) -> PolicyLoss:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 to 7): -min(s A, clip(s) A), the mean over rows.

    s = exp(sum of w (l - old) / sum of w) over the row's tokens, w being the loss weights: the likelihood ratio of
    the row, to the power of 1 / length. KL and entropy are means over the row's tokens, then over rows.

    Args:
        clip_low, clip_high: s is clipped to 1 - clip_low and 1 + clip_high. The bounds are much narrower than a
            token's, since s is a mean. The defaults are the paper's (section 5.1).
        level: "sequence", or "token" (GSPO-token, eq. 13 to 17): s has the same value, but each token's gradient is
            weighted by its own advantage. Both are equal if all tokens of a row have the same advantage.
        options: from `on_policy` on, and the metrics (ratio and clip_fraction are those of rows): as `ppo`.
    """
    return PolicyLoss(
        surrogate="clipped sequence",
        reduction="trajectory",
        clip_low=clip_low,
        clip_high=clip_high,
        level=level,
        **options,
    )
