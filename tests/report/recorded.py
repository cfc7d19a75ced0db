"""Records of plausible numbers, the same ones for the same step."""

import math
import random
from typing import Any


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    """A step of plausible numbers, the same ones for the same step."""
    drawn = random.Random(step)
    flat = 1000 + 100 * (step % 3)
    record = {
        "kind": "train",
        "step": step,
        "epoch": 0,
        "trajectories": 4,
        "loss": 2 + math.exp(-step / 10) + 0.1 * drawn.random(),
        "lr": 1e-3,
        "grad_norm": 1 + drawn.random(),
        "flat_tokens": flat,
        "unique_tokens": flat // 4,
        "computed_tokens": flat // 4,
        "recomputed_tokens": 0,
        "parts": 1,
        "overlap": 0.75,
        "seconds": 0.5,
        "forward_backward_seconds": 0.4,
        "optimizer_seconds": 0.05,
        "other_seconds": 0.05,
        "flat_tokens_per_second": 2 * flat,
        "peak_memory_bytes": 900_000_000,
        "tree_flops": 1e9,
        "linear_flops": 4e9,
        "row_tokens_mean": 250.0,
        "row_tokens_max": 400.0,
    }
    return record | changes


def policy_facts(step: int) -> dict[str, float]:
    """What a policy loss adds to a step."""
    names = ("kl", "approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "entropy", "ratio")
    drawn = random.Random(-step)
    facts = {name: 0.01 + drawn.random() for name in (*names, "policy_loss", "advantage")}
    return facts | {"reward_mean": 0.5, "reward_std": 0.1}
