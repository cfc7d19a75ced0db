"""What people watch in an RL run beside what its loss reports: extremes, advantages, answers, groups."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.ranks import Ranks
from treetrain.losses import KL_ESTIMATORS, Loss, Metrics
from treetrain.losses.facts import Facts, PackedFacts
from treetrain.losses.importance import per_sequence
from treetrain.losses.policy import ClippedLoss, PolicyLoss


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

    def __repr__(self) -> str:
        return "Watch()"  # a loss is known by its repr to be that of the other ranks


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
    def needs_entropy(self) -> bool:
        return self.log_entropy or self.inner.needs_entropy

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return self.inner.needs_facts

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """See `Loss.total_weight`."""
        return self.inner.total_weight(trajectories)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """See `Loss.check`."""
        self.inner.check(trajectories)

    def needed(self, trajectory: Trajectory) -> list[str]:
        """See `Loss.needed`."""
        return self.inner.needed(trajectory)

    def coefficients(self, facts: Facts) -> Tensor | None:
        """See `Loss.coefficients`; None where entropies are wanted, which need the head's whole output."""
        return None if self.needs_entropy else self.inner.coefficients(facts)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        total, metrics = self.inner.evaluate(logprobs, entropies, facts)
        with torch.no_grad():
            shares = facts.shares(self.reduction)
            if self.log_reference and "kl" not in metrics:
                kl = KL_ESTIMATORS[self.inner.kl_estimator](logprobs, facts.ref_logprobs)
                metrics["kl"] = (shares * kl).sum(), shares.sum()
            self._note(logprobs.detach(), facts, shares != 0)
        return total, metrics

    def _note(self, logprobs: Tensor, facts: Facts, counts: Tensor) -> None:
        inner = self.inner
        old = inner.sampling_logprobs(logprobs, facts)
        if isinstance(inner, ClippedLoss) and not inner.on_policy:
            ratio = inner.log_ratio(logprobs - old, facts).exp()
            self.watch.note("ratio", ratio, counts, smallest=True)
        if inner.importance_cap is not None:
            log_ratio = old - facts.rollout_logprobs
            if per_sequence(inner.importance_mode):
                assert isinstance(facts, PackedFacts)
                log_ratio = facts.sum_by_row(log_ratio)[facts.rows]
            self.watch.note("importance", log_ratio.exp(), counts)


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
