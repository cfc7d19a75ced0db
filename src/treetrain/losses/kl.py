"""Estimators of the divergence from a reference policy, from the sampled tokens alone."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """l - ref: unbiased, can be negative, high variance.

    As a loss its gradient is that of l alone, with mean 0 on tokens sampled from the policy: it reports
    but does not pull. Use k2 or k3 to train with.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(l - ref)^2 / 2: biased, never negative; its gradient is an unbiased one of KL(policy || reference)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - l) - 1 - (ref - l): unbiased, never negative, low variance.

    The one of GRPO (arXiv 2402.03300, eq. 4).
    """
    # Near 0 the terms cancel: expm1 keeps the digits that exp(.) - 1 would lose.
    return torch.expm1(ref_logprobs - logprobs) - (ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL(policy || reference) per token, [T] and [T] -> [T], for tokens sampled from the policy.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""
