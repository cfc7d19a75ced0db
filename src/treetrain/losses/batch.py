"""Losses over several trajectories at once: they see all rows of a call, each row as one number."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.losses.base import Loss, Metrics
from treetrain.losses.facts import PackedFacts, Reduction, describe


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss(Loss):
    """A loss that compares rows. The engine scores all of them before it asks for gradients."""

    scope: ClassVar[Literal["trajectory", "batch"]] = "batch"
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)

    def __call__(self, logprobs: Any, entropies: Any, trajectory: Any) -> tuple[Tensor, Metrics]:
        """The unnormalised sum over K trajectories.

        Args:
            logprobs: K tensors [L_k - 1], in nats.
            entropies: K such tensors, or None.
            trajectory: K trajectories.
        """
        rows: Sequence[Trajectory] = trajectory
        if len(logprobs) != len(rows):
            raise ValueError(f"{type(self).__name__}: {len(logprobs)} rows of logprobs for {len(rows)} trajectories")
        for number, (row, given) in enumerate(zip(rows, logprobs)):
            if given.shape != (max(len(row) - 1, 0),):
                raise ValueError(
                    f"{describe(row, number)} has {len(row)} tokens, so {max(len(row) - 1, 0)} predictions, but "
                    f"logprobs have shape {tuple(given.shape)}; give one for every token but the first"
                )
        flat = torch.cat(list(logprobs)) if len(rows) else torch.zeros(0)
        spread = None if entropies is None or not len(rows) else torch.cat(list(entropies))
        facts = PackedFacts.pack(rows, device=flat.device, dtype=flat.dtype)
        return self.packed(flat, spread, facts)


def log_likelihoods(logprobs: Tensor, facts: PackedFacts, *, average: bool, reference: bool) -> tuple[Tensor, Tensor]:
    """Every row's log-likelihood, and its score: the same less that under the reference.

    Args:
        logprobs: [T].
        average: divide each row's weighted sum by its weights; a row without weight counts 0.
        reference: whether there is one (`ref_logprobs`).

    Returns:
        [K] each; the first detached.
    """
    weights = facts.shares("trajectory" if average else "token")
    above = logprobs - facts.ref_logprobs if reference else logprobs
    with torch.no_grad():
        likelihood = facts.sum_by_row(weights * logprobs)
    return likelihood, facts.sum_by_row(weights * above)
