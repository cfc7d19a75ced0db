"""The language-model head for edges: log-probabilities and entropies without [tokens, vocabulary] logits.

Rows are hidden states that own at least one wanted edge, each once, however many branches follow it. Logits exist for
one chunk of rows at a time. When the loss is linear in the log-probabilities its coefficients are known beforehand,
so the head's gradients are made together with its log-probabilities and the head runs once per row; otherwise the
logits of a chunk are computed again in backward, or kept until then where there is memory for them. Logits are scaled
or capped as the model does it (`LogitMap`), then divided by the temperature.

Shape letters: R rows, E edges (sorted by row), D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from treetrain.engine.gradients import GradientBuffer
from treetrain.engine.head_chunk import Chunk, EdgesOfChunk, Entropies, Scaling, chunk_type
from treetrain.models.heads import IDENTITY, LogitMap
from treetrain.planning.constants import head_chunk_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """Which rows of the hidden states predict which tokens."""

    rows: Tensor
    """int64 [R]: index of each row in the packed run."""
    edge_row: Tensor
    """int64 [E]: which of the R rows predicts each edge; ascending."""
    targets: Tensor
    """int64 [E]: the predicted token ids."""
    host_edge_row: np.ndarray | None = None
    """`edge_row` on the host, where it is known there: asking a GPU for it would wait for all that it has to do."""


class Statistics(NamedTuple):
    """What trainers log of the distributions that tokens were drawn from, without gradient."""

    is_top1: Tensor
    """bool [E]: whether the predicted token is the most likely one."""
    mean_logits: Tensor
    """[R]: mean over the vocabulary, of logits divided by the temperature."""
    log_sum_sq_probs: Tensor
    """[R]: log of the sum of squared probabilities."""

    @classmethod
    def empty(cls, edges: int, rows: int, dtype: torch.dtype, device: torch.device) -> "Statistics":
        """Zeros, to be written to."""
        two = [torch.zeros(rows, dtype=dtype, device=device) for _ in range(2)]
        return cls(torch.zeros(edges, dtype=torch.bool, device=device), *two)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the heads give: [E] log-probabilities, [R] entropies (or None), the fused loss (or None), and [R] or [R, c]
    values (or None)."""

    logprobs: Tensor
    entropies: Tensor | None
    linear_loss: Tensor | None
    values: Tensor | None = None
    carrier: Tensor | None = None
    """What the model's own output holds, where every backward must begin there too (FSDP listens to it)."""
    statistics: "Statistics | None" = None

    @property
    def live(self) -> list[Tensor]:
        """What a backward may start from: every output, the fused loss in place of its log-probabilities."""
        first = self.logprobs if self.linear_loss is None else self.linear_loss
        return [x for x in (first, self.entropies, self.values, self.carrier) if x is not None and x.requires_grad]


def without_logprobs(hidden: Tensor, edges: Edges) -> Scores:
    """Scores of a run whose language-model head is not asked; zeros for its log-probabilities."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if len(edges.rows) == 0:
        return Scores(hidden.index_select(0, edges.rows).sum(-1, dtype=wide), None, None)  # as in `score_edges`
    return Scores(hidden.new_zeros(len(edges.targets), dtype=wide), None, None)


class _Zero(torch.autograd.Function):
    """Zero, with a gradient of zeros."""

    @staticmethod
    def forward(ctx, given: Tensor):
        ctx.shape = given.shape
        return given.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.shape)


def zero_of(given: Tensor) -> Tensor:
    """Zero, through which a backward reaches what made this, with zeros: whatever it holds, infinities included."""
    return _Zero.apply(given)  # type: ignore[return-value]


def score_edges(
    hidden: Tensor,
    head: nn.Module,
    head_forward: Callable[[Tensor], Tensor],
    edges: Edges,
    *,
    fused: bool,
    vocab_size: int,
    temperature: float,
    need_entropy: bool,
    coefficients: Tensor | None = None,
    buffer: GradientBuffer | None = None,
    logit_map: LogitMap = IDENTITY,
    meets_all: bool = False,
    need_statistics: bool = False,
    keep_logits: bool = False,
) -> Scores:
    """Score the wanted edges of a packed run.

    Args:
        hidden: [N, D] hidden states as the model hands them to its head.
        head: the head module.
        head_forward: what it does when it is called.
        fused: it is a plain ``nn.Linear``, scored from its weight; otherwise it is called chunk by chunk.
        coefficients: [E] d loss / d log-probability, when the loss is linear; the loss is then returned fused.
        buffer: takes the gradient of a fused head's matrix; None gives it to autograd.
        logit_map: what the model does to its logits after the head.
        meets_all: the head's weights get a gradient, be it zero, also where no row is scored.
        need_statistics: also give `Statistics`; not beside `coefficients`.
        keep_logits: of a fused head, until the backward, in place of a second product.
    """
    found = None
    if need_statistics:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found = Statistics.empty(len(edges.targets), len(edges.rows), wide, hidden.device)
    rows = hidden.index_select(0, edges.rows)
    if len(edges.rows) == 0:
        # Still a part of the graph: gradients that come back through the cache need a backward to ride on.
        nothing = rows.sum(-1, dtype=torch.promote_types(hidden.dtype, torch.float32))
        if meets_all:
            nothing = nothing + zero_of(head_forward(hidden[:1]))
        return Scores(nothing, nothing.detach() if need_entropy else None, None, statistics=found)
    scaling = Scaling(logit_map, temperature)
    if fused:
        assert isinstance(head, nn.Linear)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if coefficients is not None and torch.is_grad_enabled():
            compute = _compute_dtype(hidden)
            loss, logprobs = _LinearLoss.apply(  # type: ignore[misc]
                rows, head.weight, head.bias, edges, scaling, coefficients.to(wide), compute, buffer
            )
            return Scores(logprobs, None, loss)
        logprobs, entropies = _LinearScores.apply(  # type: ignore[misc]
            rows,
            head.weight,
            head.bias,
            edges,
            scaling,
            need_entropy,
            _compute_dtype(hidden),
            buffer,
            found,
            keep_logits,
        )
    else:
        logprobs, entropies = _scores_through_module(
            rows, head_forward, edges, vocab_size, scaling, need_entropy, found
        )
    loss = None if coefficients is None else (logprobs * coefficients.to(logprobs.dtype)).sum()
    return Scores(logprobs, entropies if need_entropy else None, loss, statistics=found)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _chunks(edges: Edges, vocab_size: int, device: torch.device) -> Iterator[tuple[slice, slice, EdgesOfChunk]]:
    """(rows, edges, edges as the chunk numbers its rows) of every chunk."""
    step = head_chunk_rows(vocab_size, device.type)
    bounds = list(range(0, len(edges.rows), step))
    edge_row = edges.edge_row.cpu().numpy() if edges.host_edge_row is None else edges.host_edge_row
    edge_cuts = np.searchsorted(edge_row, [*bounds, len(edges.rows)]).tolist()
    for number, start in enumerate(bounds):
        taken = slice(edge_cuts[number], edge_cuts[number + 1])
        yield slice(start, start + step), taken, EdgesOfChunk(edges.edge_row[taken] - start, edges.targets[taken])


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, in the dtype of ``total``."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(left.t() @ right)


class _HeadGradients:
    """Collects the head's gradients over chunks; the wide dtype accumulates."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
        buffer: GradientBuffer | None,
    ):
        wide = torch.promote_types(rows.dtype, torch.float32)
        self.rows = torch.empty_like(rows) if needs[0] else None
        self.weight = None
        if needs[1]:
            self.weight = torch.zeros_like(weight, dtype=wide) if buffer is None else buffer.total
        self.bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def add(self, chunk: slice, grad_logits: Tensor, rows: Tensor, weight: Tensor) -> None:
        """grad_logits: [r, V] in the wide dtype, or already in that of the rows."""
        narrow = grad_logits.to(rows.dtype)
        if self.rows is not None:
            torch.matmul(narrow, weight, out=self.rows[chunk])
        if self.weight is not None:
            _accumulate(self.weight, narrow, rows)
        if self.bias is not None:
            self.bias += grad_logits.sum(0)


class _LinearScores(torch.autograd.Function):
    """Log-probabilities of edges and entropies of rows; logits are computed again in backward, or kept until then."""

    @staticmethod
    def forward(ctx, rows, weight, bias, edges: Edges, scaling: Scaling, need_entropy, compute, buffer, found, keep):
        wide = torch.promote_types(compute, torch.float32)
        logprobs = rows.new_empty(len(edges.targets), dtype=wide)
        lse = rows.new_empty(len(rows), dtype=wide)
        entropies = rows.new_zeros(len(rows) if need_entropy else 0, dtype=wide)
        with torch.autocast(rows.device.type, enabled=False):
            made = _Maker(rows, weight, bias, compute, scaling, entropy=need_entropy, backward=keep)
            kept: list[Chunk] | None = [] if keep else None
            for chunk, taken, own in _chunks(edges, len(weight), rows.device):
                _, logits = made.chunk(chunk)
                if kept is not None:
                    kept.append(logits)
                lse[chunk] = logits.log_sum_exp()
                logprobs[taken] = logits.at(own) - lse[chunk][own.row]
                if found is not None:
                    for whole, part in zip(found, logits.statistics(lse[chunk], own)):
                        whole[taken if whole is found.is_top1 else chunk] = part
                if need_entropy:
                    entropies[chunk] = logits.entropies(lse[chunk])
        ctx.save_for_backward(rows, weight, bias, lse, entropies)
        ctx.settings, ctx.kept = (edges, scaling, need_entropy, compute, buffer), kept
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        rows, weight, bias, lse, entropies = ctx.saved_tensors
        edges, scaling, need_entropy, compute, buffer = ctx.settings
        with torch.autocast(rows.device.type, enabled=False):
            made = _Maker(rows, weight, bias, compute, scaling, entropy=need_entropy, backward=True)
            grads = _HeadGradients(rows.to(compute), weight, bias, ctx.needs_input_grad[:3], buffer)
            kept, ctx.kept = ctx.kept, None
            for number, (chunk, taken, own) in enumerate(_chunks(edges, len(weight), rows.device)):
                if kept is None:
                    x, logits = made.chunk(chunk)
                else:
                    x, logits = rows[chunk].to(compute), kept[number]
                    kept[number] = None
                by_edge = grad_logprobs[taken]
                by_row = torch.zeros_like(lse[chunk]).index_add_(0, own.row, by_edge)
                spread = Entropies(entropies[chunk], grad_entropies[chunk]) if need_entropy else None
                grads.add(chunk, logits.gradient(lse[chunk], own, by_edge, by_row, spread), x, made.weight)
        return (*_outgoing(grads, rows, weight, bias, buffer), None, None, None, None, None, None, None)


class _LinearLoss(torch.autograd.Function):
    """sum of coefficients * log-probabilities, with the gradients made in the same pass over the logits."""

    @staticmethod
    def forward(
        ctx, rows, weight, bias, edges: Edges, scaling: Scaling, coefficients, compute, buffer: GradientBuffer | None
    ):
        wide = torch.promote_types(compute, torch.float32)
        logprobs = rows.new_empty(len(edges.targets), dtype=wide)
        with torch.autocast(rows.device.type, enabled=False):
            made = _Maker(rows, weight, bias, compute, scaling, entropy=False, backward=True)
            grads = _HeadGradients(rows.to(compute), weight, bias, ctx.needs_input_grad[:3], buffer)
            for chunk, taken, own in _chunks(edges, len(weight), rows.device):
                x, logits = made.chunk(chunk)
                lse = logits.log_sum_exp()
                logprobs[taken] = logits.at(own) - lse[own.row]
                by_row = torch.zeros_like(lse).index_add_(0, own.row, coefficients[taken])
                grad = logits.gradient(lse, own, coefficients[taken], by_row, None)
                grads.add(chunk, grad, x, made.weight)
        ctx.grads = _outgoing(grads, rows, weight, bias, buffer)
        ctx.mark_non_differentiable(logprobs)
        return (logprobs * coefficients).sum(), logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        if ctx.grads is None:
            raise RuntimeError("a second backward through a fused tree loss: run the forward again")
        grads, ctx.grads = ctx.grads, None
        # In place: the gradients were made for this loss alone.
        scaled = tuple(None if g is None else g.mul_(grad_loss) for g in grads)
        return (*scaled, None, None, None, None, None)


class _Maker:
    """Makes the chunks of a call, in the dtype that it computes in."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: torch.dtype,
        scaling: Scaling,
        *,
        entropy: bool,
        backward: bool,
    ):
        self.weight, self._bias = weight.to(compute), None if bias is None else bias.to(compute)
        self._rows, self._compute, self._scaling = rows, compute, scaling
        self._options = {"entropy": entropy, "backward": backward}
        self._type = chunk_type(self.weight, bias, scaling)

    def chunk(self, chunk: slice) -> tuple[Tensor, Chunk]:
        """([r, D] its rows, its logits)."""
        x = self._rows[chunk].to(self._compute)
        return x, self._type(x, self.weight, self._bias, self._scaling, **self._options)


def _outgoing(grads: _HeadGradients, rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: GradientBuffer | None):
    """Gradients in the dtypes of the tensors they belong to, less what has gone into a buffer."""
    pairs = ((grads.rows, rows), (grads.weight if buffer is None else None, weight), (grads.bias, bias))
    return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in pairs)


def _scores_through_module(rows, head_forward, edges: Edges, vocab_size: int, scaling: Scaling, need_entropy, found):
    """The same for a head that is more than a matrix (an adapter around it): autograd, one chunk at a time."""

    logit_map, temperature = scaling

    def score(x: Tensor, edge_row: Tensor, targets: Tensor, chunk: slice, taken: slice) -> tuple[Tensor, Tensor]:
        logits = head_forward(x)
        z = logit_map(logits.to(torch.promote_types(logits.dtype, torch.float32))) / temperature
        log_p = z.log_softmax(-1)
        entropies = -(log_p.exp() * log_p).sum(-1) if need_entropy else log_p.new_zeros(0)
        if found is not None:
            with torch.no_grad():
                found.is_top1[taken] = z.argmax(-1)[edge_row] == targets
                found.mean_logits[chunk], found.log_sum_sq_probs[chunk] = z.mean(-1), (2 * log_p).logsumexp(-1)
        return log_p[edge_row, targets], entropies

    pieces = [
        checkpoint(score, rows[chunk], own.row, own.target, chunk, taken, use_reentrant=False)
        for chunk, taken, own in _chunks(edges, vocab_size, rows.device)
    ]
    if not pieces:
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.new_zeros(0, dtype=wide), rows.new_zeros(0, dtype=wide)
    logprobs, entropies = zip(*pieces)
    return torch.cat(logprobs), torch.cat(entropies)
