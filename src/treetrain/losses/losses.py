"""The losses: cross-entropy, policy losses, values, distillation and direct preference optimisation.

Notation: l = the log-probability now, old = that under the policy that sampled the row, A = the advantage,
r = exp(l - old); v = the value predicted for the state before a token, R = its return, both in the unit of the rewards.
All policy losses are one class, with REINFORCE, PPO, GRPO, DAPO, Dr. GRPO and GSPO as presets.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, Literal, TypedDict, Unpack, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import (
    Facts,
    Loss,
    LossSum,
    Metrics,
    Reduction,
    Rows,
    Scope,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    describe,
    extremes,
    require_nonnegative_weights,
    weighted_means,
)
from treetrain.errors import DataError
from treetrain.tree.nodes import MergedPredictions

KLEstimator = Literal["k1", "k2", "k3"]
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = get_args(ImportanceMode)
DistillEstimator = Literal["policy_gradient", "k2", "k3"]
Level = Literal["sequence", "token"]

# ---- cross-entropy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss(Loss):
    """-log p(token), weighted. Made by `sft`."""

    mergeable = True

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        shares = -self.coefficients(facts)
        total = -(shares * logprobs).sum()
        return total, {"nll": (total.detach(), shares.sum())}

    def coefficients(self, facts: Facts) -> Float[Tensor, "T"]:
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


# ---- divergences from sampled tokens alone, and the correction for the sampler's numerics


def k1(logprobs: Float[Tensor, "T"], ref_logprobs: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """l - ref: unbiased, can be negative, high variance.

    As a loss its gradient is that of l alone, with mean 0 on tokens sampled from the policy: it measures
    the KL but does not reduce it. Train with k2 or k3.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, "T"], ref_logprobs: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """(l - ref)^2 / 2: biased, never negative; its gradient estimates that of KL(policy || reference) without bias."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Float[Tensor, "T"], ref_logprobs: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """exp(ref - l) - 1 - (ref - l): unbiased, never negative, low variance.

    GRPO uses it (arXiv 2402.03300, eq. 4).
    """
    # Near 0 the terms cancel: expm1 keeps the digits that exp(.) - 1 would lose.
    return torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL(policy || reference) per token, for tokens sampled from the policy.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""


def sampler_log_ratio(old: Float[Tensor, "T"], facts: Facts, mode: ImportanceMode) -> Float[Tensor, "T"]:
    """old - rollout of each token, or (sequence modes) its sum over the row's trained tokens."""
    log_ratio = old - facts.rollout_logprobs
    if mode.startswith("token"):
        return log_ratio
    # Both are 0 at untrained predictions, so only trained ones count.
    return facts.sum_by_row(log_ratio)[facts.rows]


@torch.no_grad()
def importance(
    old: Float[Tensor, "T"], facts: Facts, cap: float, mode: ImportanceMode
) -> tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]:
    """Truncated importance sampling for rows that were sampled with other numerics than training's.

    The policy term is multiplied by exp(d), bounded, with d = old - rollout: the log-probability of a token in
    training's numerics minus the one that the sampler recorded.

    Args:
        old: log-probabilities in training's numerics of the policy that sampled the rows.
        facts: with rollout_logprobs.
        cap: the largest exp(d), above 0.
        mode: "token": exp(d) of each token. "sequence": exp(sum of d over the row's trained tokens) for all of them.
            A factor above the cap becomes the cap (truncate) or 0 (mask).

    Returns:
        Factors without gradient; numbers to log, by name.
    """
    old = old.detach()
    log_ratio = sampler_log_ratio(old, facts, mode)
    beyond = log_ratio > math.log(cap)
    factor = log_ratio.clamp(max=math.log(cap)).exp()
    if mode.endswith("mask"):
        factor = factor.masked_fill(beyond, 0.0)
    return factor, {
        "importance": factor,
        "importance_square": factor.square(),
        "importance_capped": beyond.to(factor.dtype),
        "rollout_kl": k3(facts.rollout_logprobs, old),  # sampled from the rollout policy: KL(rollout || old)
    }


# ---- values


def clipped_value_loss(
    predicted: Float[Tensor, "T"], facts: Facts, *, clip: float | None, reduction: Reduction
) -> tuple[Tensor, Metrics]:
    """The sum and the metrics of `value`."""
    returns, shares = facts.returns, facts.shares(reduction)
    error = (predicted - returns).square()
    held = torch.zeros_like(error, dtype=torch.bool)
    if clip is not None:
        change = predicted - facts.values
        clipped = (facts.values + change.clamp(-clip, clip) - returns).square()
        # Where nothing is clipped both are equal but for rounding, which must not count.
        held = (change.abs() > clip) & (clipped > error)
        error = torch.where(held, clipped.detach(), error)
    watched = {
        "value_loss": 0.5 * error,
        "value": predicted,
        "value_clip_fraction": held.to(predicted.dtype),
        "value_error": (returns - predicted.detach()).square(),
        "return": returns,
        "return_square": returns.square(),
    }
    return 0.5 * (shares * error).sum(), weighted_means(watched, shares)


def value_facts(clip: float | None) -> tuple[str, ...]:
    """The facts that a value loss reads."""
    return ("returns",) if clip is None else ("returns", "values")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped value loss alone. Made by `value`."""

    mergeable = True  # it does not read the advantage

    clip: float | None
    """How far a value may move from the old one; None for the plain square."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        if self.clip is not None:
            check_number("clip", self.clip, 0.0, math.inf)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("predicted_values", *value_facts(self.clip))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        assert values is not None
        return clipped_value_loss(values, facts, clip=self.clip, reduction=self.reduction)


def value(*, clip: float | None = 0.2, reduction: Reduction = "token") -> ValueLoss:
    """A critic's loss: PPO's clipped value loss, max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2.

    v is the value predicted now, old that when the rows were sampled (`values`), R the return (`returns`). The larger
    of both errors keeps v near its old value and never rewards a step away from the return. Implementations of PPO
    (arXiv 1707.06347) add it to the policy loss, see `ppo`; the paper itself has the plain square.

    For a model for token classification with one label, or a value head on a causal LM (`TreeEngine(model,
    value_head=...)`). A row's entry t is about the state before its token t: v is predicted from the hidden state of
    token t - 1.

    Args:
        clip: c, 0 or more; None for (v - R)^2 / 2, without `values`.
        reduction: "token" (default), the mean over all tokens; "trajectory", over each row's tokens first.

    Metrics: value_loss, value, value_clip_fraction (tokens whose gradient is 0), and the two sums that explained
    variance is made of: value_error (mean of (R - v)^2) and return_square (mean of R^2, with `return` its mean).

    Raises:
        ValueError: an argument out of its range.
    """
    return ValueLoss(clip=clip, reduction=reduction)


# ---- policy losses


class PolicyOptions(TypedDict, total=False):
    """Options of every policy loss; see `ppo`."""

    kl: float
    kl_estimator: KLEstimator
    entropy: float
    log_entropy: bool
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
    log_entropy: bool = False
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
        check_flag("log_entropy", self.log_entropy)

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
        needs += ["entropies"] if self.entropy != 0 or self.log_entropy else []
        needs += [] if self.value_coefficient == 0 else ["predicted_values", *value_facts(self.value_clip)]
        return tuple(needs)

    def total_weight(self, rows: Rows) -> float:
        total = Loss.total_weight(self, rows)
        if self.length is None:
            return total
        merged = isinstance(rows, MergedPredictions)
        return self.length * (rows.num_trained if merged else sum(bool(row.weights.any()) for row in rows))

    def sampling_logprobs(self, logprobs: Float[Tensor, "T"], facts: Facts) -> Float[Tensor, "T"]:
        """Without gradient: under the policy that sampled the rows, in training's numerics."""
        return facts.old_logprobs if self.clipped and not self.on_policy else logprobs.detach()

    def log_ratio(self, logprobs: Float[Tensor, "T"], facts: Facts) -> Float[Tensor, "T"]:
        """ln r of every token, or of the row it is in."""
        difference = logprobs - self.sampling_logprobs(logprobs, facts)
        if self.surrogate == "clipped":
            return difference
        mean = self._mean_of_row(difference, facts)
        return mean if self.level == "sequence" else mean.detach() + (difference - difference.detach())

    def _mean_of_row(self, per_prediction: Float[Tensor, "T"], facts: Facts) -> Float[Tensor, "T"]:
        """The weighted mean over the row that each prediction is in."""
        return facts.sum_by_row(facts.shares("trajectory") * per_prediction)[facts.rows]

    def _policy_term(
        self, logprobs: Float[Tensor, "T"], facts: Facts
    ) -> tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]:
        """The policy loss per token, and numbers to log per token."""
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
        ratios = {"ratio": watched["ratio"]} if self.clipped and not self.on_policy else {}
        if self.importance_cap is not None:
            old = self.sampling_logprobs(logprobs, facts)
            ratios["importance"] = sampler_log_ratio(old, facts, self.importance_mode).exp()
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
        total, metrics = (shares * loss).sum(), weighted_means(watched, shares) | extremes(ratios, shares)
        if values is None:
            return total, metrics
        of_values, value_metrics = clipped_value_loss(values, facts, clip=self.value_clip, reduction=self.reduction)
        return total + self.value_coefficient * of_values, metrics | value_metrics

    def coefficients(self, facts: Facts) -> Float[Tensor, "T"] | None:
        # On policy r = 1, so the gradient of the policy term is -A whatever l is.
        constant = (self.on_policy or not self.clipped) and self.importance_cap is None
        kl_is_linear = self.kl == 0 or self.kl_estimator == "k1"
        if not (constant and kl_is_linear and self.value_coefficient == 0) or "entropies" in self.needs:
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
        kl_estimator: "k1", "k2" or "k3" (default; see `KL_ESTIMATORS`). k1 has no useful gradient.
        entropy: coefficient of the entropy bonus, 0 (default) or more.
        log_entropy: log the entropy without a bonus too, which makes the head compute more; False by default.
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

    Metrics: policy_loss, advantage, ratio (and _max, _min), clip_fraction (and _low, _high), approx_kl =
    KL(old || now); kl and entropy where computed; those of `value`. With a correction: importance (the mean factor;
    importance_square that of its square, so 1 / (importance_square / importance^2) is the effective share of the
    tokens; _max and _min before the cap), importance_capped (the share above it), rollout_kl = KL(rollout || old).

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


# ---- distillation


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


# ---- direct preference optimisation


def find_pairs(trajectories: Sequence[Trajectory]) -> tuple[Int64[np.ndarray, "P"], Int64[np.ndarray, "P"]]:
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
