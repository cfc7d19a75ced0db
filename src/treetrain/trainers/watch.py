"""What people watch in an RL run beside what its loss reports: extremes, advantages, answers, groups."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.loss import Rows
from treetrain.engine.ranks import Ranks
from treetrain.engine.results import Metrics
from treetrain.losses.kl import KL_ESTIMATORS, sampler_log_ratio
from treetrain.losses.loss import Facts, Loss
from treetrain.losses.policy import PolicyLoss


class Watch:
    """Extremes over the parts of a step. A part that is run again, where memory ran out, counts once all the same."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}
        self._smallest: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        self._largest.clear()
        self._smallest.clear()

    def note(self, name: str, values: Tensor, counts: Tensor, *, smallest: bool = False) -> None:
        """The extremes of some values, [T], where `counts`, bool [T], says so."""
        if not len(values):
            return
        kinds = [(self._largest, -torch.inf, torch.maximum)]
        kinds += [(self._smallest, torch.inf, torch.minimum)] if smallest else []
        for kept, neutral, better in kinds:
            found = torch.where(counts, values, neutral)
            found = found.max() if kept is self._largest else found.min()
            kept[name] = better(kept[name], found) if name in kept else found

    def read(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Of the step so far; of these ranks together, or of this one alone."""
        found, ranks = {}, ranks or Ranks()
        for kept, ending, better in ((self._largest, "max", max), (self._smallest, "min", min)):
            for told in ranks.gather({name: float(value) for name, value in kept.items()}):
                for name, value in told.items():
                    name = f"{name}_{ending}"
                    found[name] = better(found[name], value) if name in found else value
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoss(Loss):
    """A policy loss that also tells a watch the extremes of its ratios. Its values and gradients are the loss's own."""

    mergeable: ClassVar[bool] = False

    inner: PolicyLoss
    watch: Watch
    log_entropy: bool
    """Entropies are reported whether the loss needs them or not."""
    log_reference: bool
    """All rows have ref_logprobs: the KL to the reference is reported whether the loss has such a term or not."""

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
                self.watch.note("ratio", inner.log_ratio(logprobs, facts).exp(), counts, smallest=True)
            if inner.importance_cap is not None:
                old = inner.sampling_logprobs(logprobs, facts)
                self.watch.note("importance", sampler_log_ratio(old, facts, inner.importance_mode).exp(), counts)
        return total, metrics


def facts_of_step(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Of the rows of a step of a policy loss: their advantages (over trained tokens), answers and groups."""
    trained = [row for row in rows if row.weights.any() and row.advantages is not None]
    if not trained:
        return {}
    masks = [row.weights != 0 for row in trained]
    advantages = np.concatenate([_advantages(row)[mask] for row, mask in zip(trained, masks, strict=True)])
    lengths = [int(mask.sum()) for mask in masks]
    groups: dict[Any, bool] = {}
    for number, (row, mask) in enumerate(zip(trained, masks, strict=True)):
        name = ("row", number) if row.group is None else ("group", row.group)
        groups[name] = groups.get(name, False) or bool(_advantages(row)[mask].any())
    return {
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std()),
        "response_tokens_mean": float(np.mean(lengths)),
        "response_tokens_max": float(max(lengths)),
        "groups": float(len(groups)),
        "groups_without_signal": float(sum(not signal for signal in groups.values())),
    }


def _advantages(row: Trajectory) -> np.ndarray:
    assert row.advantages is not None
    return row.advantages
