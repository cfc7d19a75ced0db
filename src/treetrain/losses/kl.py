"""Divergence estimates from sampled tokens alone, and the correction for the sampler's numerics."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from treetrain.losses.loss import Facts

KLEstimator = Literal["k1", "k2", "k3"]
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """l - ref: unbiased, can be negative, high variance.

    As a loss its gradient is that of l alone, with mean 0 on tokens sampled from the policy: it measures
    the KL but does not reduce it. Train with k2 or k3.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(l - ref)^2 / 2: biased, never negative; its gradient estimates that of KL(policy || reference) without bias."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - l) - 1 - (ref - l): unbiased, never negative, low variance.

    GRPO uses it (arXiv 2402.03300, eq. 4).
    """
    # Near 0 the terms cancel: expm1 keeps the digits that exp(.) - 1 would lose.
    return torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL(policy || reference) per token, [T] and [T] -> [T], for tokens sampled from the policy.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""


def sampler_log_ratio(old: Tensor, facts: Facts, mode: ImportanceMode) -> Tensor:
    """[T]: old - rollout of each token, or (sequence modes) its sum over the row's trained tokens."""
    log_ratio = old - facts.rollout_logprobs
    if mode.startswith("token"):
        return log_ratio
    # Both are 0 at untrained predictions, so only trained ones count.
    return facts.sum_by_row(log_ratio)[facts.rows]


@torch.no_grad()
def importance(old: Tensor, facts: Facts, cap: float, mode: ImportanceMode) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling for rows that were sampled with other numerics than training's.

    The policy term is multiplied by exp(d), bounded, with d = old - rollout: the log-probability of a token in
    training's numerics minus the one that the sampler recorded.

    Args:
        old: [T], log-probabilities in training's numerics of the policy that sampled the rows.
        facts: with rollout_logprobs.
        cap: the largest exp(d), above 0.
        mode: "token": exp(d) of each token. "sequence": exp(sum of d over the row's trained tokens) for all of them.
            A factor above the cap becomes the cap (truncate) or 0 (mask).

    Returns:
        [T] factors without gradient; [T] numbers to log, by name.
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
