"""Losses on rows: cross-entropy, policy losses, values, distillation, preference optimisation.

Notation: l = the log-probability now, old = the one under the policy that sampled the row, A = the advantage,
r = exp(l - old); v = the predicted value of the state before a token, R = its return, both on the scale of the rewards.
Each loss is a frozen dataclass whose fields are its options. All policy losses are one class, with REINFORCE, PPO,
GRPO, DAPO, Dr. GRPO and GSPO as presets.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from treetrain.core.device_arrays import on_device
from treetrain.core.errors import DataError, nearest
from treetrain.core.losses.facts import (
    Facts,
    Metrics,
    Reduction,
    add_metrics,
    describe,
    mean_metrics,
    require_nonnegative_weights,
)
from treetrain.core.losses.protocol import Loss, LossSum, Scope, fixed, numeric
from treetrain.core.tree.token_ids import IdSets
from treetrain.core.tree.trajectory import Trajectory

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "Facts",
    "Loss",
    "Metrics",
    "PolicyLoss",
    "Reduction",
    "add_metrics",
    "by_name",
    "dapo",
    "distill",
    "distill_topk",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "mean_metrics",
    "ppo",
    "reinforce",
    "sft",
    "value",
]

MOST_MASS = 1.01
"""The probabilities of a teacher's ids may sum to this: 16-bit logits are rounded."""
Surrogate = Literal["logprob", "clipped", "clipped sequence"]

# ---- divergences from sampled tokens alone


def k1(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Estimate the KL by l - ref: unbiased, can be negative, high variance.

    Its gradient is the gradient of l, whose mean is 0 on tokens sampled from the policy. So it measures the KL, but as
    a loss it does not reduce it. Train with k2 or k3.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Estimate the KL by (l - ref)^2 / 2: biased, never negative, low variance.

    Its gradient is an unbiased estimate of the gradient of KL(policy || ref).
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Estimate the KL by exp(ref - l) - 1 - (ref - l): unbiased, never negative, low variance.

    GRPO uses it (arXiv 2402.03300, eq. 4).
    """
    # Near 0 the terms cancel: expm1 keeps the digits that exp(.) - 1 would lose.
    return torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL(policy || reference) per token, for tokens sampled from the policy.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

# ---- cross-entropy, distillation, values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SFTLoss(Loss):
    """Cross-entropy of the tokens of the rows: -l.

    Metrics: nll, in nats per token; its exponential is the perplexity.
    """

    by_prediction = True

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        shares = facts.shares(self.reduction)
        return -(shares * logprobs).sum(), weighted_means({"nll": -logprobs}, shares)

    def coefficients(self, facts: Facts) -> Float[Tensor, " T"]:
        return -facts.shares(self.reduction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistillLoss(Loss):
    """On-policy distillation (arXiv 2306.13649, 2306.08543) from the teacher's log-probabilities of the rows' tokens.

    l is the student's log-probability of a sampled token, t the teacher's (`teacher_logprobs`). The student moves
    towards the teacher on its own answers, each token independently (no credit for later tokens).

    Metrics: reverse_kl (mean of l - t), nll and teacher_nll.
    """

    needs = ("logprobs", "teacher_logprobs")
    by_prediction = True

    estimator: Literal["k2", "k3"] = "k3"
    """The loss of a token, never negative. On rows that the student sampled the gradients are:
    "k2": (l - t)^2 / 2 has the gradient of KL(student || teacher), which is also that of -A l with A = t - l.
    "k3": exp(t - l) - 1 - (t - l), an unbiased estimate of KL(student || teacher), has the gradient 1 - exp(t - l) of
    KL(teacher || student). It is large where the teacher gives a token a much higher probability."""

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        teacher, shares = facts.teacher_logprobs, facts.shares(self.reduction)
        loss = KL_ESTIMATORS[self.estimator](logprobs, teacher)
        watched = {"reverse_kl": logprobs - teacher, "teacher_nll": -teacher, "nll": -logprobs}
        return (shares * loss).sum(), weighted_means(watched, shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopKDistillLoss(Loss):
    """Distillation from the ids that a teacher finds most likely, with all other ids as one (`teacher_topk`).

    p are the teacher's probabilities of a token's ids and of the rest, q the student's, over the whole vocabulary. The
    rest is 1 minus those of the ids, but never below the rounding of 1 (1e-7 in float32), where it has no gradient. On
    answers of the student this is on-policy distillation, with a gradient for every id, not for the sampled one alone.

    Metrics: divergence (the loss), nll, and the masses of the teacher's ids: teacher_mass, student_mass.
    """

    needs = ("logprobs", "id_logprobs", "teacher_topk")
    by_prediction = True

    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """The loss of a token. "forward": KL(p || q), the sum of p (log p - log q), makes the student cover the teacher.
    "reverse": KL(q || p) keeps it to what the teacher finds likely. "jensen_shannon": the mean of KL(p || m) and
    KL(q || m), m = (p + q) / 2."""

    def check(self, rows: Sequence[Trajectory]) -> None:
        """Raise DataError for a trained token without ids of a teacher, or probabilities that sum to more than 1."""
        Loss.check(self, rows)
        for number, row in enumerate(rows):
            sets, weights = row.teacher_topk, row.weights
            if sets is None or not weights.any():
                continue
            assert sets.logprobs is not None
            if (without := (weights != 0) & (sets.counts == 0)).any():
                at = int(without.argmax())
                raise DataError(
                    f"{describe(row, number)}: teacher_topk[{at}] has no ids, but token {row.ids[at]} there is trained "
                    f"with weight {weights[at]:g}; give the teacher's ids, or loss_weights of 0"
                )
            mass = np.bincount(sets.places, np.exp(sets.logprobs), len(sets))
            if mass.max(initial=0) > MOST_MASS:
                at = int(mass.argmax())
                raise DataError(
                    f"{describe(row, number)}: the probabilities of teacher_topk[{at}] sum to {mass[at]:.6g}, more "
                    "than 1; give log-probabilities over the whole vocabulary, not logits"
                )

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        lengths = [len(row) for row in facts.trajectories]
        places = np.delete(np.arange(sum(lengths)), np.cumsum([0, *lengths])[:-1][np.array(lengths, int) > 0])
        sets = IdSets.joined([row.teacher_topk for row in facts.trajectories], lengths)
        sets = sets.select(places if facts.used is None else places[facts.used])
        now, shares = facts.id_logprobs, facts.shares(self.reduction)
        if now is None or len(now) != len(sets.ids):
            given = None if now is None else len(now)
            raise ValueError(f"id_logprobs are {given} for {len(sets.ids)} ids of teacher_topk; give one for each")
        assert sets.logprobs is not None
        of, eps = on_device(sets.places, now.device), torch.finfo(now.dtype).eps

        def with_rest(log_p: Tensor) -> tuple[Tensor, Tensor]:
            """Log-probabilities of the ids and, after them, of each prediction's rest; and the ids' masses."""
            mass = log_p.new_zeros(len(logprobs)).index_add(0, of, log_p.exp())
            return torch.cat([log_p, (-mass.clamp(max=1 - eps)).log1p()]), mass

        # In float64: the rest is a difference of nearly equal numbers.
        teacher, teacher_mass = with_rest(on_device(sets.logprobs, now.device, torch.float64))
        student, student_mass = with_rest(now.double())
        if self.divergence == "jensen_shannon":
            mean = torch.logaddexp(teacher, student) - math.log(2)
            terms = 0.5 * (teacher.exp() * (teacher - mean) + student.exp() * (student - mean))
        else:
            p, q = (teacher, student) if self.divergence == "forward" else (student, teacher)
            terms = p.exp() * (p - q)
        loss = (terms[len(of) :].index_add(0, of, terms[: len(of)])).to(logprobs.dtype)
        watched = {"divergence": loss, "nll": -logprobs, "teacher_mass": teacher_mass, "student_mass": student_mass}
        return (shares * loss).sum(), weighted_means({k: x.to(loss.dtype) for k, x in watched.items()}, shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """A critic's loss: PPO's clipped value loss, max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2.

    v is the value predicted now, old the one predicted at sampling (`values`), R the return (`returns`). The maximum of
    the two errors keeps v near its old value and never rewards a step away from the return. Implementations of PPO
    (arXiv 1707.06347) add it to the policy loss, see `PolicyLoss`; the paper itself has the plain square.

    It needs a token-classification model with one label, or a value head on a causal LM (`TreeEngine(model,
    value_head=...)`). A row's entry t belongs to the state before its token t: v is predicted from the hidden state of
    token t - 1.

    Metrics: value_loss, value, value_clip_fraction (tokens whose gradient is 0), and means for computing the explained
    variance: value_error (of (R - v)^2), return (of R) and return_square (of R^2).
    """

    by_prediction = True

    clip: float | None = numeric(0.2, high=math.inf)
    """c. None makes the loss (v - R)^2 / 2, which needs no `values`."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("predicted_values", "returns", *(() if self.clip is None else ("values",)))

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        assert values is not None
        returns, shares = facts.returns, facts.shares(self.reduction)
        error = (values - returns).square()
        held = torch.zeros_like(error, dtype=torch.bool)
        if self.clip is not None:
            change = values - facts.values
            clipped = (facts.values + change.clamp(-self.clip, self.clip) - returns).square()
            # Where nothing is clipped the errors differ only by rounding, which must not count.
            held = (change.abs() > self.clip) & (clipped > error)
            error = torch.where(held, clipped.detach(), error)
        watched = {
            "value_loss": 0.5 * error,
            "value": values,
            "value_clip_fraction": held.to(values.dtype),
            "value_error": (returns - values.detach()).square(),
            "return": returns,
            "return_square": returns.square(),
        }
        return 0.5 * (shares * error).sum(), weighted_means(watched, shares)


sft, distill, distill_topk, value = SFTLoss, DistillLoss, TopKDistillLoss, ValueLoss

# ---- policy losses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Loss):
    """All policy losses in one class. `ppo`, `grpo` and the others are presets that offer only the options they use.

    The loss of a token is a policy term, corrected for the sampler's numerics, + kl * KL(policy || reference) - entropy
    * entropy of the policy + value_coefficient * value loss.

    Metrics: policy_loss, advantage; with clipping ratio (and _max, _min), clip_fraction (and _low, _high), approx_kl =
    KL(old || now); kl and entropy where computed; the metrics of `ValueLoss`. Over rows with rollout_logprobs:
    rollout_kl = KL(rollout || old). With a correction: importance (the factor within the limits, with _max and _min),
    importance_square (the mean of its square: importance^2 / importance_square is the effective share of the tokens),
    importance_capped and importance_floored (the shares above the cap and below the floor). With off_policy_kl:
    off_policy (the share of the tokens that it leaves out).
    """

    surrogate: Surrogate = "clipped"
    """-A l; -min(r A, clip(r) A); or the same with the row's ratio, exp(mean of l - old over its tokens)."""
    clip: float = numeric(0.2, high=1.0)
    """The ratio is clipped to 1 - clip and 1 + clip."""
    clip_low: float | None = numeric(None, high=1.0)
    """Sets the lower bound in place of `clip`."""
    clip_high: float | None = numeric(None, high=math.inf)
    """Sets the upper bound in place of `clip`."""
    on_policy: bool = False
    """Whether the present model sampled the rows: r = 1 with the gradient of l, and old_logprobs are not read.
    Otherwise every trained row needs them."""
    length: float | None = numeric(None, positive=True)
    """The weight of every trained row in the normaliser, in place of its weights (Dr. GRPO)."""
    kl: float = numeric(0.0)
    """Coefficient of the KL to the reference policy; above 0 rows need ref_logprobs."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimator in `KL_ESTIMATORS`. k1 has no useful gradient."""
    entropy: float = numeric(0.0)
    log_entropy: bool = False
    """Whether to log the entropy even without a bonus; the head then computes more."""
    importance_cap: float | None = numeric(None, positive=True)
    """If given, the policy term (not KL or entropy) is multiplied by exp(old - rollout), which corrects for a sampler
    with other numerics, up to this number; rows then need rollout_logprobs. 2 to 5 is common."""
    importance_floor: float | None = numeric(None, positive=True)
    """The smallest such factor, at most the cap; without a cap larger ones stay as they are."""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Truncation turns factors beyond cap and floor into these, masking into 0. "token_" modes have one factor per
    token, "sequence_" modes one per row, from the sum over its trained tokens."""
    off_policy_kl: float | None = numeric(None, positive=True)
    """If given, the policy term leaves out rows that have become unlikely: those of a negative advantage whose tokens'
    mean of rollout - l is above this (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Rows then need rollout_logprobs.
    The normaliser still counts them."""
    value_coefficient: float = numeric(0.0)
    """Factor of the value loss (see `ValueLoss`); 0.5 is common. Above 0 the model needs a value head, and trained rows
    need returns (and values, for the clip). The value loss has the weights and the normaliser of the policy term."""
    value_clip: float | None = numeric(0.2, high=math.inf)

    @property
    def clipped(self) -> bool:
        """Whether there is a ratio to an old policy."""
        return self.surrogate != "logprob"

    @property
    def corrected(self) -> bool:
        """Whether the policy term is multiplied by the ratio of old policy and sampler."""
        return self.importance_cap is not None or self.importance_floor is not None

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        floor, cap = self.importance_floor, self.importance_cap
        if floor is not None and cap is not None and floor > cap:
            raise ValueError(
                f"importance_floor is {floor} and importance_cap {cap}; the floor must not be above the cap"
            )

    @property
    def by_prediction(self) -> bool:
        by_row = self.corrected and self.importance_mode.startswith("sequence")
        return (
            not by_row and self.off_policy_kl is None and self.surrogate != "clipped sequence" and self.length is None
        )

    @property
    def needs(self) -> tuple[str, ...]:
        needs = ["logprobs", "advantages"]
        needs += ["old_logprobs"] if self.clipped and not self.on_policy else []
        needs += ["rollout_logprobs"] if self.corrected or self.off_policy_kl is not None else []
        needs += [] if self.kl == 0 else ["ref_logprobs"]
        needs += ["entropies"] if self.entropy != 0 or self.log_entropy else []
        needs += [] if self.value_coefficient == 0 else self._values.needs
        return tuple(needs)

    @property
    def _values(self) -> ValueLoss:
        return ValueLoss(clip=self.value_clip, reduction=self.reduction)

    def total_weight(self, rows: Sequence[Trajectory]) -> float:
        total = Loss.total_weight(self, rows)
        return total if self.length is None else self.length * sum(bool(row.weights.any()) for row in rows)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        advantages, shares = facts.advantages, facts.shares(self.reduction)
        old = facts.old_logprobs if self.clipped and not self.on_policy else logprobs.detach()
        watched: dict[str, Tensor] = {}
        ratios: dict[str, Tensor] = {}
        if not self.clipped:
            loss = -advantages * logprobs
        else:
            log_ratio = logprobs - old
            if self.surrogate == "clipped sequence":
                log_ratio = _mean_of_row(log_ratio, facts)
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
                watched = {
                    "ratio": log_ratio.exp(),
                    # Sampled from the old policy, so k3 of (old, now) estimates KL(old || now).
                    "approx_kl": k3(old, logprobs),
                    "clip_fraction": below + above,
                    "clip_fraction_low": below,
                    "clip_fraction_high": above,
                }
            if not self.on_policy:
                ratios["ratio"] = watched["ratio"]
        if self.corrected:
            ratios["importance"], correction = self._correction(old, facts)
            loss, watched = loss * ratios["importance"], watched | correction
        if self.off_policy_kl is not None:
            with torch.no_grad():
                apart = facts.sum_by_row(facts.rollout_logprobs - logprobs) / _tokens_of_row(facts)
                stale = (advantages < 0) & (apart[facts.rows] > self.off_policy_kl)
            loss, watched = loss.masked_fill(stale, 0.0), watched | {"off_policy": stale.to(loss.dtype)}
        watched |= {"policy_loss": loss, "advantage": advantages}
        if self.kl != 0:
            watched["kl"] = KL_ESTIMATORS[self.kl_estimator](logprobs, facts.ref_logprobs)
            loss = loss + self.kl * watched["kl"]
        if entropies is not None:
            watched["entropy"] = entropies
            loss = loss - self.entropy * entropies if self.entropy != 0 else loss
        total, metrics = (shares * loss).sum(), weighted_means(watched, shares) | extremes(ratios, shares)
        metrics |= _rollout_kl(old, facts, shares)
        if values is None:
            return total, metrics
        of_values, value_metrics = self._values.evaluate(logprobs, entropies, facts, values)
        return total + self.value_coefficient * of_values, metrics | value_metrics

    @torch.no_grad()
    def _correction(self, old: Tensor, facts: Facts) -> tuple[Tensor, dict[str, Tensor]]:
        """Truncated or masked importance sampling for rows that were sampled with other numerics than training's.

        Returns:
            The bounded factor of each token's policy term, exp(old - rollout) of the token or the row; numbers to log.
        """
        log_ratio = old - facts.rollout_logprobs
        if self.importance_mode.startswith("sequence"):
            # Both are 0 at untrained predictions, so only trained ones count.
            log_ratio = facts.sum_by_row(log_ratio)[facts.rows]
        high = math.inf if self.importance_cap is None else math.log(self.importance_cap)
        low = -math.inf if self.importance_floor is None else math.log(self.importance_floor)
        above, below = log_ratio > high, log_ratio < low
        factor = log_ratio.clamp(low, high).exp()
        if self.importance_mode.endswith("mask"):
            factor = factor.masked_fill(above | below, 0.0)
        watched = {
            "importance": factor,
            "importance_square": factor.square(),
            "importance_capped": above.to(factor.dtype),
            "importance_floored": below.to(factor.dtype),
        }
        return factor, watched

    def coefficients(self, facts: Facts) -> Float[Tensor, " T"] | None:
        # On policy r = 1, so the gradient of the policy term is -A for any l.
        constant = (self.on_policy or not self.clipped) and not self.corrected and self.off_policy_kl is None
        kl_is_linear = self.kl == 0 or self.kl_estimator == "k1"
        if not (constant and kl_is_linear and self.value_coefficient == 0) or "entropies" in self.needs:
            return None
        credit = facts.advantages
        if self.surrogate == "clipped sequence":
            credit = _mean_of_row(credit, facts)
        return facts.shares(self.reduction) * (self.kl - credit)


@torch.no_grad()
def _rollout_kl(old: Tensor, facts: Facts, shares: Tensor) -> Metrics:
    """Estimate KL(rollout || old) on the tokens that have rollout_logprobs, which the rollout policy sampled."""
    given = [row.rollout_logprobs for row in facts.trajectories]
    if all(row is None for row in given):
        return {}
    lengths = [max(len(row) - 1, 0) for row in facts.trajectories]
    flat = np.concatenate([np.full(n, math.nan) if row is None else row[1:] for row, n in zip(given, lengths)])
    rollout = on_device(flat if facts.used is None else flat[facts.used], old.device, old.dtype)
    known = (shares != 0) & ~rollout.isnan()
    return weighted_means({"rollout_kl": k3(torch.where(known, rollout, old), old)}, torch.where(known, shares, 0))


def _tokens_of_row(facts: Facts) -> Float[Tensor, " K"]:
    """The number of trained tokens of each row, at least 1."""
    return facts.sum_by_row((facts.weights != 0).to(facts.dtype)).clamp(min=1)


def _mean_of_row(per_prediction: Float[Tensor, " T"], facts: Facts) -> Float[Tensor, " T"]:
    """Take the weighted mean over each prediction's row."""
    return facts.sum_by_row(facts.shares("trajectory") * per_prediction)[facts.rows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """The score-function loss -A l (Williams 1992). It assumes that the present policy sampled the rows.

    Reduction "token" is the policy gradient, a sum over tokens, up to one factor for the whole step; "trajectory"
    divides each trajectory's sum by its length. With value_coefficient it is advantage actor-critic.
    """

    surrogate: Surrogate = fixed("logprob")
    clip: float = fixed(0.2)
    clip_low: float | None = fixed(None)
    clip_high: float | None = fixed(None)
    on_policy: bool = fixed(False)
    length: float | None = fixed(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PPOLoss(PolicyLoss):
    """The clipped surrogate -min(r A, clip(r) A) of PPO (arXiv 1707.06347, eq. 7), the mean over time steps."""

    surrogate: Surrogate = fixed("clipped")
    length: float | None = fixed(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GRPOLoss(PolicyLoss):
    """GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): the clipped surrogate on group advantages.

    The caller gives the advantages: rewards normalised within the group, see `treetrain.group_advantages`. The KL is
    part of the loss, not of the reward. It is the mean over an answer's tokens, then over answers, as in the paper.
    """

    reduction: Reduction = "trajectory"
    surrogate: Surrogate = fixed("clipped")
    length: float | None = fixed(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DAPOLoss(PolicyLoss):
    """DAPO (arXiv 2503.14476, eq. 8): the clipped surrogate on group advantages, with a higher upper bound.

    It is the mean over all tokens of the step, so long answers count by their length. The rest of the method concerns
    the data: groups whose rewards are all equal are left out or sampled again, and truncated answers get
    loss_weights=0 or a lower reward.
    """

    reduction: Reduction = fixed("token")
    surrogate: Surrogate = fixed("clipped")
    clip: float = fixed(0.2)
    clip_low: float | None = numeric(0.2, high=1.0)
    clip_high: float | None = numeric(0.28, high=math.inf)
    length: float | None = fixed(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPOLoss(PolicyLoss):
    """GRPO done right (arXiv 2503.20783, section 3): no division by an answer's length, nor by a group's deviation.

    The loss is the sum over all weighted tokens of the clipped surrogate (and of KL and entropy), divided by the number
    of trained rows times `length`. `length` is the most tokens that an answer may have, constant during a run.
    Advantages should be rewards minus the group's mean, not divided by its standard deviation: `group_advantages(...,
    divide_by_std=False)`. Metrics are means over tokens.
    """

    reduction: Reduction = fixed("token")
    surrogate: Surrogate = fixed("clipped")
    length: float | None = numeric(dataclasses.MISSING, positive=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 to 7): -min(s A, clip(s) A), the mean over rows.

    s = exp(sum of w (l - old) / sum of w) over the row's tokens, w being the loss weights: the likelihood ratio of
    the row, to the power of 1 / length. KL and entropy are means over the row's tokens, then over rows. The bounds are
    much narrower than a token's, since s is a mean; the defaults are the paper's (section 5.1). The metrics ratio and
    clip_fraction are about rows.
    """

    reduction: Reduction = fixed("trajectory")
    surrogate: Surrogate = fixed("clipped sequence")
    clip: float = fixed(0.2)
    clip_low: float | None = numeric(3e-4, high=1.0)
    clip_high: float | None = numeric(4e-4, high=math.inf)
    length: float | None = fixed(None)


reinforce, ppo, grpo = ReinforceLoss, PPOLoss, GRPOLoss
dapo, dr_grpo, gspo = DAPOLoss, DrGRPOLoss, GSPOLoss

# ---- direct preference optimisation


def find_pairs(trajectories: Sequence[Trajectory]) -> tuple[Int64[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
    """Numbers of the chosen and of the rejected row of every pair that trains something.

    Rows with nothing to train need no pair.

    Raises:
        DataError: a trained row without a pair; a pair that is not one chosen and one rejected row.
    """
    members: dict[Hashable, tuple[list[int], list[int]]] = {}
    for number, row in enumerate(trajectories):
        if row.pair is None and row.weights.any():
            raise DataError(
                f"{describe(row, number)} is trained but has no pair; give pair=... and chosen=True or False, or "
                "loss_weights=0 to keep it as context"
            )
        if row.pair is not None and row.chosen is None:
            raise DataError(
                f"{describe(row, number)} of pair {row.pair!r} does not say whether it is chosen; give chosen=True "
                "or chosen=False"
            )
        if row.pair is not None:
            members.setdefault(row.pair, ([], []))[0 if row.chosen else 1].append(number)
    for pair, kinds in members.items():
        if [len(rows) for rows in kinds] != [1, 1]:
            names = [
                f"{kind} {', '.join(describe(trajectories[k], k) for k in rows) or 'none'}"
                for kind, rows in zip(("chosen", "rejected"), kinds)
            ]
            raise DataError(
                f"pair {pair!r} has {len(kinds[0])} chosen and {len(kinds[1])} rejected rows ({'; '.join(names)}); a "
                "pair is one of each: give other pairs other names, and all rows of a pair in one call"
            )
    pairs = [(chosen[0], rejected[0]) for chosen, rejected in members.values()]
    trained = [pair for pair in pairs if any(trajectories[row].weights.any() for row in pair)]
    chosen, rejected = np.array(trained, np.int64).reshape(-1, 2).T
    return chosen, rejected


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss(Loss):
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta (c - r)), the mean over pairs.

    c and r are sums over the tokens of the chosen and the rejected row of w (l - ref): w the loss weight, ref the
    log-probability under the reference policy. Rows of one `pair`, one with `chosen` True and one with False, must be
    in one call. A row without loss weights scores 0; a pair of such rows is not counted. The engine scores all rows
    before the first gradient.

    Metrics: accuracy (chosen reward above the rejected), margin, chosen_reward and rejected_reward (beta times the
    score), chosen_logps and rejected_logps (sums of w l), all means over pairs.
    """

    scope: ClassVar[Scope] = "batch"
    needs = ("logprobs", "pair", "chosen", "ref_logprobs")
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)

    beta: float = numeric(0.1, positive=True)
    """Strength of the pull towards the reference."""

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
        score = facts.sum_by_row(facts.weights * (logprobs - facts.ref_logprobs))
        likelihood = facts.sum_by_row(facts.weights * logprobs.detach())
        losses = -F.logsigmoid(self.beta * (score[chosen] - score[rejected]))
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


dpo = DPOLoss

LOSSES: dict[str, Callable[..., Loss]] = {
    "sft": sft,
    "reinforce": reinforce,
    "ppo": ppo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "dpo": dpo,
    "distill": distill,
    "distill_topk": distill_topk,
}
"""Losses on a language-model head by their command-line names."""


def by_name(name: str, **options: object) -> Loss:
    """Make a loss from its name and its options.

    Raises:
        ValueError: an unknown name or option, a missing option, or one out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; {nearest(name, LOSSES)}")
    known = inspect.signature(LOSSES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; {nearest(unknown[0], known)}")
    missing = [option for option, has in known.items() if has.default is has.empty and option not in options]
    if missing:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}, which has no default")
    return LOSSES[name](**options)


def weighted_means(watched: Mapping[str, Float[Tensor, " T"]], shares: Float[Tensor, " T"]) -> Metrics:
    """Make metrics of per-prediction numbers: their weighted means."""
    weight = shares.sum()
    return {name: ((shares * x.detach()).sum(), weight) for name, x in watched.items()}


def extremes(watched: dict[str, Tensor], shares: Tensor) -> Metrics:
    """Make metrics of per-prediction numbers [T]: the largest and the smallest where the share is not 0."""
    found: Metrics = {}
    trained = shares != 0
    weight = trained.any().to(shares.dtype)
    for name, x in watched.items() if len(shares) else ():
        found[f"{name}_max"] = torch.where(trained, x.detach(), -math.inf).max(), weight
        found[f"{name}_min"] = torch.where(trained, x.detach(), math.inf).min(), weight
    return found
