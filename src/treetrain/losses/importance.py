"""Correction for rows that were sampled with other numerics than training's, as inference engines do.

d = old - rollout: the log-probability of a token in training's numerics less the one that the sampler recorded. The
policy term is multiplied by exp(d), bounded: truncated importance sampling.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from treetrain.losses.facts import Facts, PackedFacts
from treetrain.losses.kl import k3

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def per_sequence(mode: ImportanceMode) -> bool:
    """Whether a mode looks at whole rows, so that they cannot be merged."""
    return mode.startswith("sequence")


def importance(old: Tensor, facts: Facts, cap: float, mode: ImportanceMode) -> tuple[Tensor, dict[str, Tensor]]:
    """The factors of the policy term, and what to watch; none has a gradient.

    Args:
        old: [T], log-probabilities in training's numerics of the policy that sampled the rows.
        facts: with rollout_logprobs.
        cap: the largest exp(d), above 0.
        mode: exp(d) of every token, or exp of the sum of d over a row's trained tokens for all of them; what is above
            the cap is set to the cap (truncate) or to 0 (mask).

    Returns:
        [T] factors; names and [T] of what to watch.
    """
    with torch.no_grad():
        old, rollout = old.detach(), facts.rollout_logprobs
        log_ratio = old - rollout
        if per_sequence(mode):
            assert isinstance(facts, PackedFacts)
            # Both read 0 at untrained predictions, so only trained ones count.
            log_ratio = facts.sum_by_row(log_ratio)[facts.rows]
        beyond = log_ratio > math.log(cap)
        factor = log_ratio.clamp(max=math.log(cap)).exp()
        if mode.endswith("mask"):
            factor = factor.masked_fill(beyond, 0.0)
        return factor, {
            "importance": factor,
            "importance_square": factor.square(),
            "importance_capped": beyond.to(factor.dtype),
            "rollout_kl": k3(rollout, old),  # sampled from the rollout policy: KL(rollout || old)
        }
