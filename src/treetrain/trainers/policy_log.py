"""Metrics of RL runs in addition to those of the loss: extremes of ratios, advantages, answers, groups."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.distributed import Ranks
from treetrain.engine.loss import Metrics, Rows
from treetrain.losses.kl import KL_ESTIMATORS, sampler_log_ratio
from treetrain.losses.loss import Facts, Loss
from treetrain.losses.policy import PolicyLoss


class Extremes:
    """Largest and smallest values of a step. A part that runs again after an out-of-memory error changes nothing."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, counts: Tensor) -> None:
        """Add the values, [T], at which `counts`, bool [T], is true."""
        if not len(values):
            return
        for key, value, better in (
            (f"{name}_max", torch.where(counts, values, -torch.inf).max(), torch.maximum),
            (f"{name}_min", torch.where(counts, values, torch.inf).min(), torch.minimum),
        ):
            self._values[key] = better(self._values[key], value) if key in self._values else value

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the extremes of the step over all ranks, and reset them."""
        everywhere = ranks.gather({name: float(value) for name, value in self._values.items()})
        self._values = {}
        names = dict.fromkeys(name for values in everywhere for name in values)
        return {
            name: (max if name.endswith("_max") else min)(values[name] for values in everywhere if name in values)
            for name in names
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPolicyLoss(Loss):
    """A policy loss that also logs the extremes of its ratios. Its values and gradients are the loss's own."""

    mergeable: ClassVar[bool] = False

    inner: PolicyLoss
    extremes: Extremes
    log_entropy: bool
    """Log entropies even if the loss does not need them."""
    log_reference: bool
    """All rows have ref_logprobs: log the KL to the reference even if the loss has no such term."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.inner.needs, *(("entropies",) if self.log_entropy else ()))

    @property
    def identity(self) -> str:
        return f"{self.inner.identity}, entropy {self.log_entropy}, reference {self.log_reference}"

    def total_weight(self, rows: Rows) -> float:
        return self.inner.total_weight(rows)

    def coefficients(self, facts: Facts) -> Tensor | None:
        """See `Loss.coefficients`; None where entropies are wanted, which need the head's whole output."""
        return None if "entropies" in self.needs else self.inner.coefficients(facts)

    def evaluate(
        self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        inner = self.inner
        total, metrics = inner.evaluate(logprobs, entropies, facts, values)
        with torch.no_grad():
            shares = facts.shares(self.reduction)
            counts = shares != 0
            if self.log_reference and "kl" not in metrics:
                kl = KL_ESTIMATORS[inner.kl_estimator](logprobs, facts.ref_logprobs)
                metrics["kl"] = (shares * kl).sum(), shares.sum()
            if inner.clipped and not inner.on_policy:
                self.extremes.add("ratio", inner.log_ratio(logprobs, facts).exp(), counts)
            if inner.importance_cap is not None:
                old = inner.sampling_logprobs(logprobs, facts)
                self.extremes.add("importance", sampler_log_ratio(old, facts, inner.importance_mode).exp(), counts)
        return total, metrics


def step_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a step's rows: advantages (over trained tokens), answers and groups."""
    trained = [(row, row.weights != 0) for row in rows if row.weights.any() and row.advantages is not None]
    if not trained:
        return {}
    advantages = [row.advantages[mask] for row, mask in trained]  # type: ignore[index]
    lengths = [len(each) for each in advantages]
    signal: dict[Any, bool] = {}
    for number, ((row, _), each) in enumerate(zip(trained, advantages, strict=True)):
        name = ("row", number) if row.group is None else ("group", row.group)
        signal[name] = signal.get(name, False) or bool(each.any())
    together = np.concatenate(advantages)
    return {
        "advantage_mean": float(together.mean()),
        "advantage_std": float(together.std()),
        "response_tokens_mean": float(np.mean(lengths)),
        "response_tokens_max": float(max(lengths)),
        "groups": float(len(signal)),
        "groups_without_signal": float(sum(not each for each in signal.values())),
    }
