"""Policy-gradient losses on recorded rollouts: REINFORCE, PPO-clip, GRPO, DAPO; KL to a reference, entropy bonus.

l = log-probability of the token now, old = when the row was sampled, A = its advantage, r = exp(l - old).
"""

import abc
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from treetrain.losses.base import LARGEST, Loss, Metrics, check_choice, check_flag, check_number, check_positive
from treetrain.losses.critic import ActorCriticLoss, actor_critic
from treetrain.losses.facts import Facts, Reduction
from treetrain.losses.importance import IMPORTANCE_MODES, ImportanceMode, importance, per_sequence
from treetrain.losses.kl import KL_ESTIMATORS, KLEstimator, k3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Loss):
    """A policy term per token, corrected for the sampler's numerics, + kl * KL(policy || reference) - entropy *
    entropy of the policy."""

    kl: float
    """Coefficient of the KL to the reference policy; above 0 it needs ref_logprobs."""
    kl_estimator: KLEstimator
    """One of KL_ESTIMATORS."""
    entropy: float
    """Coefficient of the entropy bonus; above 0 it needs entropies."""
    importance_cap: float | None = None
    """Largest correction for the sampler's numerics (see treetrain.losses.importance); None for no correction."""
    importance_mode: ImportanceMode = "token_truncate"
    """One of IMPORTANCE_MODES."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        check_number("kl", self.kl, 0.0, LARGEST)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_number("entropy", self.entropy, 0.0, LARGEST)
        if self.importance_cap is not None:
            check_positive("importance_cap", self.importance_cap)
        check_choice("importance_mode", self.importance_mode, IMPORTANCE_MODES)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy != 0

    @property
    def needs_facts(self) -> tuple[str, ...]:
        rollout = () if self.importance_cap is None else ("rollout_logprobs",)
        reference = () if self.kl == 0 else ("ref_logprobs",)
        return ("advantages", *self.policy_facts, *rollout, *reference)

    @property
    def policy_facts(self) -> tuple[str, ...]:
        """What the policy term needs besides advantages."""
        return ()

    @property
    def reads_whole_rows(self) -> bool:
        """Whether the correction looks at whole rows, so that they cannot be merged."""
        return self.importance_cap is not None and per_sequence(self.importance_mode)

    @property
    @abc.abstractmethod
    def policy_gradient_is_constant(self) -> bool:
        """Whether d policy term / d l is minus `credit` whatever l is."""

    def credit(self, facts: Facts) -> Tensor:
        """[T]: what a token's log-probability is credited with where the gradient is constant."""
        return facts.advantages

    @abc.abstractmethod
    def sampling_logprobs(self, logprobs: Tensor, facts: Facts) -> Tensor:
        """[T] without gradient: under the policy that sampled the rows, in training's numerics."""

    @abc.abstractmethod
    def policy_term(self, logprobs: Tensor, facts: Facts) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's loss per token, [T], and what to watch per token, each [T]."""

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        loss, watched = self.policy_term(logprobs, facts)
        if self.importance_cap is not None:
            old = self.sampling_logprobs(logprobs, facts)
            factor, seen = importance(old, facts, self.importance_cap, self.importance_mode)
            loss, watched = loss * factor, watched | seen
        watched = {"policy_loss": loss, "advantage": facts.advantages} | watched
        if self.kl != 0:
            watched["kl"] = KL_ESTIMATORS[self.kl_estimator](logprobs, facts.ref_logprobs)
            loss = loss + self.kl * watched["kl"]
        if entropies is not None:
            watched["entropy"] = entropies
            loss = loss - self.entropy * entropies if self.entropy != 0 else loss
        shares = facts.shares(self.reduction)
        weight = shares.sum()
        metrics: Metrics = {name: ((shares * x.detach()).sum(), weight) for name, x in watched.items()}
        return (shares * loss).sum(), metrics

    def coefficients(self, facts: Facts) -> Tensor | None:
        kl_is_linear = self.kl == 0 or self.kl_estimator == "k1"
        constant = self.policy_gradient_is_constant and self.importance_cap is None
        if not (constant and kl_is_linear and self.entropy == 0):
            return None
        return facts.shares(self.reduction) * (self.kl - self.credit(facts))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """-A l. Made by `reinforce`."""

    @property
    def mergeable(self) -> bool:
        return not self.reads_whole_rows

    @property
    def policy_gradient_is_constant(self) -> bool:
        return True

    def sampling_logprobs(self, logprobs: Tensor, facts: Facts) -> Tensor:
        return logprobs.detach()  # the rows are the policy's own

    def policy_term(self, logprobs: Tensor, facts: Facts) -> tuple[Tensor, dict[str, Tensor]]:
        return -facts.advantages * logprobs, {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Made by `ppo`, `grpo` and `dapo`."""

    clip_low: float
    """r is not followed below 1 - clip_low; 1 never clips."""
    clip_high: float
    """r is not followed above 1 + clip_high; infinity never clips."""
    on_policy: bool
    """r is taken against the present log-probabilities (so it is 1), whatever old_logprobs say."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        check_number("clip_low", self.clip_low, 0.0, 1.0)
        check_number("clip_high", self.clip_high, 0.0, math.inf)
        check_flag("on_policy", self.on_policy)

    @property
    def mergeable(self) -> bool:
        return not self.reads_whole_rows  # the bound that holds depends on the sign of A, not on its size

    @property
    def policy_facts(self) -> tuple[str, ...]:
        return () if self.on_policy else ("old_logprobs",)

    @property
    def policy_gradient_is_constant(self) -> bool:
        return self.on_policy

    def sampling_logprobs(self, logprobs: Tensor, facts: Facts) -> Tensor:
        return logprobs.detach() if self.on_policy else facts.old_logprobs

    def log_ratio(self, differences: Tensor, facts: Facts) -> Tensor:
        """[T]: ln r, from l - old."""
        return differences

    def policy_term(self, logprobs: Tensor, facts: Facts) -> tuple[Tensor, dict[str, Tensor]]:
        old_logprobs = self.sampling_logprobs(logprobs, facts)
        advantages = facts.advantages
        log_ratio = self.log_ratio(logprobs - old_logprobs, facts)
        log_low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        log_high = math.log1p(self.clip_high)
        # The smaller of the two products clips only above where A >= 0, only below where A < 0. Clipping
        # log r and not r keeps the gradient 0, and not 0 * infinity, where exp would overflow.
        followed = torch.where(advantages < 0, log_ratio.clamp(min=log_low), log_ratio.clamp(max=log_high))
        loss = -advantages * followed.exp()
        with torch.no_grad():
            low = ((advantages < 0) & (log_ratio < log_low)).to(loss.dtype)
            high = ((advantages > 0) & (log_ratio > log_high)).to(loss.dtype)
            watched = {
                "ratio": log_ratio.exp(),
                # Sampled from the old policy, so k3 of (old, now) estimates KL(old || now).
                "approx_kl": k3(old_logprobs, logprobs),
                "clip_fraction": low + high,
                "clip_fraction_low": low,
                "clip_fraction_high": high,
            }
        return loss, watched


def reinforce(
    *,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    reduction: Reduction = "token",
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
) -> ReinforceLoss:
    """The score-function loss -A l (Williams 1992), plus kl * KL(policy || reference) - entropy * entropy.

    Args:
        kl: coefficient of the KL, >= 0; above 0 the rows need ref_logprobs.
        kl_estimator: "k1", "k2" or "k3" (treetrain.losses.kl). k1 has no useful gradient.
        entropy: coefficient of the entropy bonus, >= 0.
        reduction: "token" (default) is the policy gradient, a sum over tokens, up to one factor for the
            whole step; "trajectory" divides each trajectory's sum by its length.
        importance_cap, importance_mode: as `ppo`; the policy that sampled is taken to be the present one.

    Metrics: policy_loss, advantage; kl and entropy where computed; those of the correction, see `ppo`.

    Raises:
        ValueError: an argument out of its range.
    """
    return ReinforceLoss(
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        reduction=reduction,
        importance_cap=importance_cap,
        importance_mode=importance_mode,
    )


def ppo(
    *,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    reduction: Reduction = "token",
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
    on_policy: bool = False,
    value_coefficient: float = 0.0,
    value_clip: float | None = 0.2,
) -> "ClippedLoss | ActorCriticLoss":
    """The clipped surrogate -min(r A, clip(r) A) of PPO (arXiv 1707.06347, eq. 7), with a value loss if asked for.

    Args:
        clip: r is followed from 1 - clip to 1 + clip, 0 to 1.
        clip_low, clip_high: either bound by itself in place of `clip`.
        kl: coefficient of the KL to the reference policy, >= 0; above 0 the rows need ref_logprobs.
        kl_estimator: "k1", "k2" or "k3" (treetrain.losses.kl). k1 has no useful gradient.
        entropy: coefficient of the entropy bonus, >= 0.
        reduction: "token" (default), the mean over time steps of the paper; or "trajectory".
        importance_cap: above 0, the policy term (not KL or entropy) is multiplied by exp(old - rollout), which
            corrects for a sampler of other numerics, up to this number; the rows then need rollout_logprobs. 2 to 5
            is common. None: no correction.
        importance_mode: "token_truncate" (larger factors become the cap) or "token_mask" (they become 0), for each
            token; "sequence_truncate" or "sequence_mask", one factor for all of a row, of the sum over its tokens.
        on_policy: the rows were sampled by the model of this very step: r = 1, its gradient that of l, and
            old_logprobs are not read. Otherwise every trained row must have them.
        value_coefficient: above 0 (0.5 is common), this times the value loss of `value` is added: it is an
            `actor_critic`, the model must have a value head, and trained rows returns (and values, for the clip).
        value_clip: of the value loss.

    Metrics: policy_loss, advantage, ratio, clip_fraction (and _low, _high), approx_kl = KL(old || now);
    kl and entropy where computed. With a correction: importance (the mean factor; importance_square that of its
    square, so 1 / (importance_square / importance^2) is the effective share of the tokens), importance_capped (the
    share above the cap) and rollout_kl = KL(rollout || old).

    Raises:
        ValueError: an argument out of its range.
    """
    policy = _clipped(
        clip=clip,
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        reduction=reduction,
        importance_cap=importance_cap,
        importance_mode=importance_mode,
        on_policy=on_policy,
    )
    check_number("value_coefficient", value_coefficient, 0.0, LARGEST)
    if value_coefficient == 0:
        return policy
    return actor_critic(policy, value_coefficient=value_coefficient, value_clip=value_clip)


def grpo(
    *,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    reduction: Reduction = "trajectory",
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
    on_policy: bool = False,
) -> ClippedLoss:
    """GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): the clipped surrogate on group advantages.

    The advantages are the caller's: rewards normalised within the group, see `treetrain.group_advantages`. The KL is
    part of the loss, not of the reward.

    Args:
        reduction: "trajectory" (default), as in the paper: the mean over an answer's tokens, then over answers; or
            "token".
        clip, clip_low, clip_high, kl, kl_estimator, entropy, importance_cap, importance_mode, on_policy: as `ppo`.

    Metrics: as `ppo`.

    Raises:
        ValueError: an argument out of its range.
    """
    return _clipped(
        clip=clip,
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        reduction=reduction,
        importance_cap=importance_cap,
        importance_mode=importance_mode,
        on_policy=on_policy,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
    on_policy: bool = False,
) -> ClippedLoss:
    """DAPO (arXiv 2503.14476, eq. 8): the clipped surrogate on group advantages, its upper bound further out.

    The mean over all tokens of the step, so that long answers count by their length. The rest of the method is in the
    data: groups whose rewards are all equal are left out or sampled again, answers that ran out of tokens get
    loss_weights=0 or a lower reward.

    Args:
        clip_low: the ratio is followed from 1 - clip_low, 0 to 1.
        clip_high: to 1 + clip_high.
        kl, kl_estimator, entropy, importance_cap, importance_mode, on_policy: as `ppo`.

    Metrics: as `ppo`.

    Raises:
        ValueError: an argument out of its range.
    """
    return _clipped(
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        reduction="token",
        importance_cap=importance_cap,
        importance_mode=importance_mode,
        on_policy=on_policy,
    )


def _clipped(
    *, clip: float = 0.2, clip_low: float | None = None, clip_high: float | None = None, **options: Any
) -> ClippedLoss:
    low, high = clip_bounds(clip, clip_low, clip_high)
    return ClippedLoss(clip_low=low, clip_high=high, **options)


def clip_bounds(clip: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Both bounds, where each may be given by itself. Raises ValueError for a `clip` in use outside 0 to 1."""
    if low is None or high is None:
        check_number("clip", clip, 0.0, 1.0)
    return clip if low is None else low, clip if high is None else high
