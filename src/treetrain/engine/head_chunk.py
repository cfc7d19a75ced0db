"""The softmax of a chunk of the head's logits, and its gradient: by PyTorch, or by Triton kernels.

A chunk has logits of r rows. It is made, asked for its log-sum-exps, for logits at some places, and last for entropies
or for the gradient, either of which may overwrite the logits.

By PyTorch the logits are widened, and every operation reads and writes all of them. The Triton kernels leave them as
the matrix product gives them (16 bits where the model has 16), read them once for log-sum-exps and entropies, and once
more to write the gradient in their place.

Shape letters: r rows of a chunk, e edges of these rows, D hidden size, V vocabulary.
"""

import os
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from treetrain.attention.backends import why_not
from treetrain.models.heads import IDENTITY, LogitMap

ENVIRONMENT = "TREETRAIN_HEAD"
KERNELS = ("torch", "triton")
"""What may be named there; the first is the default."""


class Scaling(NamedTuple):
    """What the model does to its logits, and the temperature that divides them then."""

    logit_map: LogitMap = IDENTITY
    temperature: float = 1.0

    @property
    def factor(self) -> float:
        """What a logit that is not capped is multiplied with."""
        return self.logit_map.factor / self.logit_map.divisor / self.temperature


class EdgesOfChunk(NamedTuple):
    """What is predicted from a chunk's rows."""

    row: Tensor
    """int64 [e]: row within the chunk; ascending."""
    target: Tensor
    """int64 [e]: the predicted token."""


class Entropies(NamedTuple):
    """Of rows, and the gradient of the loss by them."""

    values: Tensor
    """[r]."""
    gradient: Tensor
    """[r]."""


class Chunk(Protocol):
    """See the module."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling, *, entropy: bool, backward: bool
    ):
        """Args: rows [r, D]; weight [V, D]; entropy: whether they are asked for; backward: whether the gradient is."""
        ...

    def log_sum_exp(self) -> Tensor:
        """[r], in the wide dtype."""
        ...

    def at(self, edges: EdgesOfChunk) -> Tensor:
        """[e] scaled logits of the predicted tokens, in the wide dtype."""
        ...

    def statistics(self, lse: Tensor, edges: EdgesOfChunk) -> tuple[Tensor, Tensor, Tensor]:
        """[e] whether each target is the most likely token, [r] mean scaled logits, [r] log of the sum of squared
        probabilities; leaves the logits as they are."""
        ...

    def entropies(self, lse: Tensor) -> Tensor:
        """[r], in nats; may overwrite the logits."""
        ...

    def gradient(
        self, lse: Tensor, edges: EdgesOfChunk, by_edge: Tensor, by_row: Tensor, entropies: Entropies | None
    ) -> Tensor:
        """[r, V]: gradient of the loss by the head's own logits; may overwrite them.

        Args:
            by_edge: [e] gradient of the loss by the log-probabilities.
            by_row: [r] their sums over each row's edges.
        """
        ...


class PlainChunk:
    """By PyTorch's operations, for any device and dtype. One that is kept may be asked for the gradient last, once."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling, *, entropy: bool, backward: bool
    ):
        self._scaling = scaling
        logits = nn.functional.linear(rows, weight, bias).to(torch.promote_types(rows.dtype, torch.float32))
        self._slope = scaling.logit_map.apply_(logits, want_slope=backward)
        self._logits = logits if scaling.temperature == 1.0 else logits.div_(scaling.temperature)
        self._are_log_probs = False

    def log_sum_exp(self) -> Tensor:
        """See `Chunk`."""
        return self._logits.logsumexp(-1)

    def at(self, edges: EdgesOfChunk) -> Tensor:
        """See `Chunk`."""
        return self._logits[edges]

    def statistics(self, lse: Tensor, edges: EdgesOfChunk) -> tuple[Tensor, Tensor, Tensor]:
        """See `Chunk`."""
        return _statistics(self._logits, lse, edges)

    def entropies(self, lse: Tensor) -> Tensor:
        """See `Chunk`."""
        log_p = self._log_probs(lse)
        return -log_p.exp().mul_(log_p).sum(-1)

    def _log_probs(self, lse: Tensor) -> Tensor:
        """[r, V]: the logits, changed to log-probabilities once."""
        if not self._are_log_probs:
            self._logits.sub_(lse[:, None])
            self._are_log_probs = True
        return self._logits

    def gradient(
        self, lse: Tensor, edges: EdgesOfChunk, by_edge: Tensor, by_row: Tensor, entropies: Entropies | None
    ) -> Tensor:
        """See `Chunk`."""
        log_p = self._log_probs(lse)
        if entropies is None:
            grad = log_p.exp_().mul_(-by_row[:, None])
        else:
            # d H / d z_v = -p_v (log p_v + H)
            weightings = (log_p + entropies.values[:, None]).mul_(entropies.gradient[:, None])
            grad = log_p.exp_().mul_(weightings.add_(by_row[:, None]).neg_())
        grad.index_put_(tuple(edges), by_edge, accumulate=True)
        return self._scaling.logit_map.pull_back_(grad.div_(self._scaling.temperature), self._slope)


class TritonChunk:
    """By Triton kernels, for 16-bit and float32 logits without bias and cap."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling, *, entropy: bool, backward: bool
    ):
        from treetrain.engine import head_kernels  # imports Triton, which is not there on every machine

        assert bias is None and scaling.logit_map.cap is None
        self._kernels, self._factor, self._entropy = head_kernels, scaling.factor, entropy
        self._logits = nn.functional.linear(rows, weight)
        self._entropies: Tensor | None = None

    def log_sum_exp(self) -> Tensor:
        """See `Chunk`."""
        lse, self._entropies = self._kernels.statistics(self._logits, self._factor, entropy=self._entropy)
        return lse

    def at(self, edges: EdgesOfChunk) -> Tensor:
        """See `Chunk`."""
        return self._logits[edges].float().mul_(self._factor)

    def statistics(self, lse: Tensor, edges: EdgesOfChunk) -> tuple[Tensor, Tensor, Tensor]:
        """See `Chunk`."""
        return _statistics(self._logits.float() * self._factor, lse, edges)

    def entropies(self, lse: Tensor) -> Tensor:
        """See `Chunk`."""
        assert self._entropies is not None, "entropies are found with the log-sum-exps"
        return self._entropies

    def gradient(
        self, lse: Tensor, edges: EdgesOfChunk, by_edge: Tensor, by_row: Tensor, entropies: Entropies | None
    ) -> Tensor:
        """See `Chunk`."""
        self._kernels.to_gradient_(self._logits, self._factor, lse, edges, by_edge, by_row, entropies)
        return self._logits


def _statistics(logits: Tensor, lse: Tensor, edges: EdgesOfChunk) -> tuple[Tensor, Tensor, Tensor]:
    """See `Chunk.statistics`; of scaled logits [r, V]."""
    top = logits.argmax(-1)
    return top[edges.row] == edges.target, logits.mean(-1), (2 * logits).logsumexp(-1) - 2 * lse


def chunk_type(logits: Tensor, bias: Tensor | None, scaling: Scaling) -> type[Any]:
    """What runs the softmax of logits like these: `TREETRAIN_HEAD` names it, and PyTorch has what the kernels lack.

    Args:
        logits: of their dtype and device; the hidden states will do.

    Raises:
        ValueError: a name that there is none of, or kernels that cannot run here.
    """
    named = os.environ.get(ENVIRONMENT, "") or KERNELS[0]
    if named not in KERNELS:
        raise ValueError(f"{ENVIRONMENT}={named}: no kernels have that name; there are {', '.join(KERNELS)}")
    if named == "torch":
        return PlainChunk
    hindrance = why_not("triton", logits.device)
    if hindrance is not None:
        raise ValueError(f"{ENVIRONMENT}={named} cannot run here: Triton kernels: {hindrance}; unset it, or name torch")
    suits = logits.dtype in (torch.bfloat16, torch.float16, torch.float32) and scaling.factor > 0
    return TritonChunk if suits and bias is None and scaling.logit_map.cap is None else PlainChunk
