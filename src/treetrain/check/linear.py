"""The linear reference: one plain forward per row (`check/row_scores.py`), losses written out, autograd."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.check import row_scores
from treetrain.kernels.checks import relative_error as relative_error
from treetrain.layers.trajectory import Trajectory

Facts = dict[str, Tensor]
RowLoss = Callable[[Tensor, Tensor, Facts], Tensor]
"""(log-probabilities [T], entropies [T], facts of [T] each) of one row -> the loss of each token, [T]."""


def score_row(model: nn.Module, ids: Sequence[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [L - 1] of one row."""
    logprobs, entropies = row_scores.score_row(model, torch.tensor(list(ids)), temperature, entropy=True)
    assert entropies is not None
    return logprobs, entropies


def score_rows(model: nn.Module, rows: Sequence[Sequence[int]], temperature: float = 1.0):
    """Score every row; rows of less than two tokens predict nothing."""
    empty = torch.zeros(0, dtype=torch.promote_types(next(model.parameters()).dtype, torch.float32))
    scored = [score_row(model, row, temperature) if len(row) > 1 else (empty, empty) for row in rows]
    return [s[0] for s in scored], [s[1] for s in scored]


def facts_of(row: Trajectory, like: Tensor) -> Facts:
    """A row's facts at its predictions."""
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs")
    given = {name: getattr(row, name) for name in names if getattr(row, name) is not None}
    given["weights"] = np.ones(len(row)) if row.loss_weights is None else row.loss_weights
    return {name: torch.tensor(value[1:], dtype=like.dtype) for name, value in given.items()}


def batch_loss(scores, rows: Sequence[Trajectory], per_token: RowLoss, reduction: str = "token") -> Tensor:
    """Mean over all weighted tokens, or over each trajectory's tokens first (written out row by row)."""
    total, normaliser = torch.zeros((), dtype=torch.float64), 0.0
    for logp, entropy, row in zip(*scores, rows):
        weights = torch.ones(len(logp)) if row.loss_weights is None else torch.tensor(row.loss_weights[1:])
        if len(row) < 2 or float(weights.sum()) == 0:
            continue
        loss = (weights.to(logp.dtype) * per_token(logp, entropy, facts_of(row, logp))).double().sum()
        share = float(weights.double().sum())
        total = total + (loss if reduction == "token" else loss / share)
        normaliser += share if reduction == "token" else 1.0
    return total / normaliser


def gradients(model: nn.Module, loss: Tensor | None = None, *, retain_graph: bool = False) -> Tensor:
    """Concatenate all parameters' gradients in float64: the gradients of ``loss``, or what is in ``.grad``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if loss is None:
        grads = [p.grad for p in parameters]
    else:
        grads = torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).double().flatten() for p, g in zip(parameters, grads)])


def rms(errors: Sequence[float]) -> float:
    """Root mean square of errors over forests."""
    return float(torch.tensor(errors, dtype=torch.float64).square().mean().sqrt())


def clipped(logp: Tensor, facts: Facts, low: float, high: float) -> Tensor:
    """Minus the clipped surrogate of one token."""
    ratio = (logp - facts["old_logprobs"]).exp()
    advantage = facts["advantages"]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
