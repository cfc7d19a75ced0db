"""The language-model head for edges: log-probabilities and entropies without [tokens, vocabulary] logits.

Rows are hidden states that predict at least one wanted edge. Each is listed once, however many branches follow it.
Logits exist for one chunk of rows at a time. If the loss is linear in the log-probabilities, its coefficients are known
beforehand, so the head's gradients are made together with its log-probabilities and the head runs once per row.
Otherwise the logits of a chunk are computed again in backward, or kept until then if there is memory for them. Logits
are scaled or capped as the model does it (`LogitMap`), then divided by the temperature.

PyTorch computes the softmax of a chunk: it widens the logits, and every operation reads and writes all of them. On a
GPU kernels may do so in one pass (`HeadKernels`).

Shape letters: R rows, E edges (sorted by row), r rows and e edges of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from treetrain.core.device_arrays import on_device
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import IDENTITY, Capabilities, LogitMap
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.planning.cost import head_chunk_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """The rows of the hidden states, and the tokens that they predict."""

    rows: Int64[Tensor, " R"]
    """Index of each row in the packed run."""
    edge_row: Int64[Tensor, " E"]
    """Which of the R rows predicts each edge; ascending."""
    targets: Int64[Tensor, " E"]
    """The predicted token ids."""
    host_edge_row: Int64[np.ndarray, " E"] | None = None
    """`edge_row` on the host, if known: reading it from a GPU would wait for queued work."""


class Statistics(NamedTuple):
    """Statistics of the predicted distributions for trainers' logs, without gradient."""

    is_top1: Bool[Tensor, " E"]
    """Whether the predicted token is the most likely one."""
    mean_logits: Float[Tensor, " R"]
    """Mean over the vocabulary, of logits divided by the temperature."""
    log_sum_sq_probs: Float[Tensor, " R"]
    """Log of the sum of squared probabilities."""

    @classmethod
    def empty(cls, edges: int, rows: int, dtype: torch.dtype, device: torch.device) -> "Statistics":
        two = [torch.zeros(rows, dtype=dtype, device=device) for _ in range(2)]
        return cls(torch.zeros(edges, dtype=torch.bool, device=device), *two)

    def write(self, edges: Tensor | slice, rows: Tensor | slice, part: "Statistics") -> None:
        self.is_top1[edges] = part.is_top1
        self.mean_logits[rows] = part.mean_logits
        self.log_sum_sq_probs[rows] = part.log_sum_sq_probs


@dataclass(frozen=True, slots=True)
class Scores:
    """The output of the heads."""

    logprobs: Float[Tensor, " E"]
    entropies: Float[Tensor, " R"] | None
    linear_loss: Float[Tensor, ""] | None
    """The fused loss: the log-probabilities times known coefficients."""
    values: Float[Tensor, " R *c"] | None = None
    carrier: Tensor | None = None
    """The output of the model in place of logits, if hooks on its output must run in every backward (FSDP2's do).
    Backward then also starts from it, with zeros."""
    statistics: Statistics | None = None

    @property
    def live(self) -> list[Tensor]:
        """The outputs that a backward may start from; the fused loss, if any, replaces the log-probabilities."""
        first = self.logprobs if self.linear_loss is None else self.linear_loss
        return [x for x in (first, self.entropies, self.values, self.carrier) if x is not None and x.requires_grad]


def zero_of(given: Tensor) -> Tensor:
    """A zero whose backward passes zeros to the graph of `given`, even if `given` holds infinities."""
    return given.flatten()[:0].sum()


def without_logprobs(hidden: Float[Tensor, "N D"], edges: Edges) -> Scores:
    """Scores of a run that skips the language-model head: zeros for log-probabilities."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if len(edges.rows) == 0:
        return Scores(hidden.index_select(0, edges.rows).sum(-1, dtype=wide), None, None)  # as in `score_edges`
    return Scores(hidden.new_zeros(len(edges.targets), dtype=wide), None, None)


# ---- the gradients of embedding and head

# Autograd would make a new [vocabulary, hidden] gradient of each in every part and add it to ``.grad``: as much traffic
# per part as all layers together. Here every part adds to one buffer per matrix (one for both where they are tied),
# which is added to ``.grad`` at the end. No hook of the parameters sees that; the executor runs them on the result.


@dataclass(eq=False)
class GradientBuffers:
    """The gradients of embedding and head, summed over parts."""

    _totals: dict[Tensor, Tensor] = field(default_factory=dict)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether a matrix may have a buffer; otherwise autograd must see every gradient."""
        return type(weight) is nn.Parameter and weight.requires_grad

    def total(self, weight: Tensor) -> Float[Tensor, "V D"]:
        """The sum for a matrix in float32 or wider, zero at first; add to it."""
        if weight not in self._totals:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._totals[weight] = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
        return self._totals[weight]

    @torch.no_grad()
    def deliver(self) -> None:
        """Add all sums to ``.grad``."""
        while self._totals:
            weight, total = self._totals.popitem()
            total = total.to(weight.dtype)
            weight.grad = total if weight.grad is None else weight.grad.add_(total)

    @contextmanager
    def collecting(self, model: nn.Module) -> Iterator[None]:
        """Collect the gradients of embedding and head during the block, and deliver them at its end."""
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        # Plain: it only looks rows up, and nothing has replaced its forward.
        plain = (
            type(embedding) is nn.Embedding
            and "forward" not in vars(embedding)
            and embedding.max_norm is None
            and not embedding.scale_grad_by_freq
            and not embedding.sparse
        )
        if not (plain and self.takes(embedding.weight)):
            yield
        else:

            def forward(ids: Tensor) -> Tensor:
                return _Embed.apply(embedding.weight, ids, embedding.padding_idx, self)  # type: ignore[return-value]

            with replaced(embedding, forward=forward):
                yield
        self.deliver()


class _Embed(torch.autograd.Function):
    """A plain embedding whose gradient goes into a buffer."""

    @staticmethod
    def forward(ctx, weight: nn.Parameter, ids: Tensor, padding_idx: int | None, buffers: GradientBuffers):
        ctx.weight, ctx.ids, ctx.padding_idx, ctx.buffers = weight, ids, padding_idx, buffers
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        total = ctx.buffers.total(ctx.weight)
        flat, rows = ctx.ids.flatten(), grad.flatten(0, -2).to(total.dtype)
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((flat == ctx.padding_idx)[:, None], 0.0)
        total.index_add_(0, flat, rows)
        return None, None, None, None


# ---- scores


class VocabularyShare(Protocol):
    """The logits that one process has of a vocabulary that several divide."""

    @property
    def width(self) -> int:
        """Tokens in the largest share."""
        ...

    def own(self, weight: Tensor) -> Tensor:
        """This process's part of the head's weight or bias."""
        ...

    def chunk(self, own: "PlainChunk") -> "PlainChunk":
        """A chunk over the whole vocabulary, from that of this process."""
        ...

    def sum(self, own: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """The scores that a pass must compute."""

    temperature: float = 1.0
    need_entropy: bool = False
    coefficients: Float[Tensor, " E"] | None = None
    """d loss / d log-probability, when the loss is linear; the loss is then returned fused."""
    buffers: GradientBuffers | None = None
    """Buffers for the gradient of a fused head's matrix; None leaves it to autograd."""
    reaches_all_weights: bool = False
    """Whether every backward must reach the same weights, with zeros if no row is scored."""
    carrier_dtype: torch.dtype | None = None
    """The dtype of the carrier, where the model's output is cast after its forward; None leaves it."""
    need_statistics: bool = False
    """Whether to compute `Statistics` too; cannot be combined with `coefficients`."""
    keep_logits: bool = False
    """Whether a fused head keeps its logits until backward instead of computing them again."""
    kernels: "HeadKernels" = field(default_factory=lambda: PLAIN)
    """How a fused head computes its chunks."""
    vocabulary: "VocabularyShare | None" = None
    """This process's share of the vocabulary, where several divide the head; None if it has all of it."""


def score_edges(
    hidden: Float[Tensor, "N D"],
    head: nn.Module,
    head_forward: Callable[[Tensor], Tensor],
    edges: Edges,
    request: ScoreRequest,
    *,
    fused: bool,
    vocab_size: int,
    logit_map: LogitMap = IDENTITY,
) -> Scores:
    """Score the wanted edges of a packed run.

    Args:
        hidden: the input of the model's head.
        fused: whether the head is a plain ``nn.Linear``, scored from its weight; otherwise it is called by chunk.
        logit_map: applied by the model to its logits after the head.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    found = (
        Statistics.empty(len(edges.targets), len(edges.rows), wide, hidden.device) if request.need_statistics else None
    )
    rows = hidden.index_select(0, edges.rows)
    if len(edges.rows) == 0:
        # The result must be in the graph: gradients from the caches need a backward of this part.
        nothing = rows.sum(-1, dtype=wide)
        if request.reaches_all_weights:
            nothing = nothing + zero_of(head_forward(hidden[:1]))
        return Scores(nothing, nothing.detach() if request.need_entropy else None, None, statistics=found)
    scaling, coefficients = Scaling(logit_map, request.temperature), request.coefficients
    if fused:
        assert isinstance(head, nn.Linear)
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        known = coefficients.to(wide) if coefficients is not None and torch.is_grad_enabled() else None
        settings = _Settings(edges, replace(request, coefficients=known), scaling, compute)
        weight, bias = head.weight, head.bias
        if request.vocabulary is not None:
            weight, bias = (None if x is None else request.vocabulary.own(x) for x in (weight, bias))
        loss, logprobs, entropies = _LinearScores.apply(rows, weight, bias, settings, found)  # type: ignore[misc]
        if known is not None:
            return Scores(logprobs, None, loss)
    else:
        logprobs, entropies = _scores_through_module(
            rows, head_forward, edges, vocab_size, scaling, request.need_entropy, found
        )
    loss = None if coefficients is None else (logprobs * coefficients.to(logprobs.dtype)).sum()
    return Scores(logprobs, entropies if request.need_entropy else None, loss, statistics=found)


# ---- in the place of the model's head

PROBES = (0.37, -2.9, 11.0, 173.0, -64.0, 2.5e4, -3.1e4)
"""Numbers behind the scores of a model that scales or caps its logits, to see that it does so as it declares. Two maps
may agree on the scores of a part: a cap changes small numbers little, and a factor hides behind a cap in large ones."""


class HeadCall(NamedTuple):
    """One call of the head: its scores, and the tensor returned to the model in place of logits."""

    scores: Scores
    carrier: Tensor
    version: int
    """The version of the carrier when it was returned."""


@contextmanager
def scoring_head(capabilities: Capabilities, edges: Edges, request: ScoreRequest) -> Iterator[list[HeadCall]]:
    """Inside the block, replace the head's forward by one that scores edges; yields the list of its calls.

    Scores use the logit map that the configuration declares. The model gets a carrier in place of logits, and its
    operations on the carrier show whether the declaration is right.
    """
    calls: list[HeadCall] = []
    original = capabilities.head.forward
    scalar = capabilities.scalar
    # A head whose forward has already been replaced may compute more than its matrix product.
    is_replaced = "forward" in vars(capabilities.head) and request.vocabulary is None
    fused = capabilities.head_is_linear and not is_replaced

    def forward(hidden: Tensor) -> Tensor:
        if hidden.dim() != 3:
            raise UnsupportedModel(
                f"the head ({type(capabilities.head).__name__}) is given a tensor {list(hidden.shape)}, where states "
                "[1, tokens, size] were expected: the model pools the tokens of a call before its head (an encoder's "
                "pooler of the first token?), which on a tree are those of many rows. Use a model whose head reads "
                "the state of every token, or of the last one."
            )
        flat = hidden.flatten(0, 1)
        if capabilities.scores_tokens:
            scores = score_edges(
                flat,
                capabilities.head,
                original,
                edges,
                request,
                fused=fused,
                vocab_size=capabilities.vocab_size,
                logit_map=capabilities.logit_map,
            )
        else:
            scores = without_logprobs(flat, edges)
        if scalar is not None:
            value = partial(scalar.values, original if scalar.is_models_own else scalar.module)
            values = value(flat.index_select(0, edges.rows) if len(edges.rows) else flat[:1])
            scores = replace(scores, values=values[: len(edges.rows)])
            if request.reaches_all_weights and not len(edges.rows):
                scores = replace(scores, logprobs=scores.logprobs + zero_of(values))
        carrier = _carrier(scores, len(flat), capabilities, request)
        version = 0 if carrier.is_inference() else carrier._version
        calls.append(HeadCall(scores, carrier, version))
        return carrier

    with replaced(capabilities.head, forward=forward):
        yield calls


def _carrier(scores: Scores, tokens: int, capabilities: Capabilities, request: ScoreRequest) -> Tensor:
    """Numbers that the model gets in place of logits; `check_head` knows by them that it returned them unchanged."""
    if capabilities.scores_tokens:
        carrier = (scores.logprobs if scores.linear_loss is None else scores.linear_loss).view(1, -1, 1)
        carrier = carrier.clone() if request.reaches_all_weights else carrier  # a hook would not follow a view
    else:  # distinct, unevenly spaced numbers, one per token, so that the one kept is known
        like = scores.logprobs
        carrier = (torch.arange(tokens, device=like.device, dtype=like.dtype) + 0.37).sqrt().view(1, -1, 1)
        if request.reaches_all_weights and scores.values is not None:
            carrier = carrier + zero_of(scores.values)
    if capabilities.logit_map is not IDENTITY:
        probes = on_device(np.array(PROBES), carrier.device, carrier.dtype)
        carrier = torch.cat([carrier, probes.view(1, -1, 1)], dim=1)
    return carrier if request.carrier_dtype is None else carrier.to(request.carrier_dtype)


def check_head(model: nn.Module, capabilities: Capabilities, calls: list[HeadCall], logits: Tensor) -> None:
    """Raise UnsupportedModel unless the model called its head once and applied exactly its logit map to the carrier."""
    scalar, logit_map = capabilities.scalar, capabilities.logit_map
    pooled = scalar is not None and scalar.pooled  # the model keeps the value of one token only
    if len(calls) == 1:
        carrier = calls[0].carrier
        if pooled:
            if logits.shape == (1, 1) and bool((carrier == logits).any()):
                return
        elif carrier.is_inference() or carrier._version == calls[0].version:  # else scores may have changed in place
            if logit_map is IDENTITY:
                # Hooks that hand an output on may leave another tensor over the same memory.
                seen, made = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (logits, carrier))
                same = logits is carrier or seen == made
            else:
                with torch.no_grad():
                    expected = logit_map(carrier)
                same = torch.equal(logits, expected) and logits.dtype == expected.dtype
            if same:
                return
    declared = "at a row's last token" if pooled else str(logit_map)
    raise UnsupportedModel(
        f"{type(model).__name__} does not return what its head gives, {declared} (so its configuration says): it was "
        f"called {len(calls)} times, or its logits are scaled, capped, cut or cast otherwise afterwards; such a head "
        "is not supported."
    )


# ---- the softmax of a chunk


class Scaling(NamedTuple):
    """The scaling that the model applies to its logits, and the temperature that divides the result."""

    logit_map: LogitMap = IDENTITY
    temperature: float = 1.0

    @property
    def factor(self) -> float:
        """The total factor of a logit, without a cap."""
        return self.logit_map.factor / self.logit_map.divisor / self.temperature


class EdgesOfChunk(NamedTuple):
    """The edges of a chunk's rows."""

    row: Int64[Tensor, " e"]
    """Row within the chunk; ascending."""
    target: Int64[Tensor, " e"]
    """The predicted token."""


class ChunkGradients(NamedTuple):
    """The gradients of the loss with respect to a chunk's scores."""

    by_edge: Float[Tensor, " e"]
    """With respect to log-probabilities."""
    by_row: Float[Tensor, " r"]
    """Sums of `by_edge` over each row's edges."""
    entropies: Float[Tensor, " r"] | None = None
    by_entropy: Float[Tensor, " r"] | None = None
    """With respect to `entropies`; both may be None."""


class LogSumExp(NamedTuple):
    """Log-sum-exps of rows' scaled logits, each in two numbers that are never added up.

    A log-probability is (logit - `highest`) - `log_total`. If the token is all but certain, both differences are small
    and keep all their digits. The sum of the two numbers is as large as a logit: at 30 float32 rounds it by 2e-6, one
    part in 5,000 of a log-probability of -0.01 and of its gradient.
    """

    highest: Float[Tensor, " r"]
    """The highest logit."""
    log_total: Float[Tensor, " r"]
    """Log of the sum of exp(logit - highest)."""

    @classmethod
    def of(cls, logits: Float[Tensor, "r V"]) -> "LogSumExp":
        highest = logits.amax(-1)
        shares = (logits - highest[:, None]).exp_()
        total = shares.sum(-1)
        # Added to 1, small shares lose their digits. `frac_` turns the shares of the highest logits (1) into 0, so that
        # `others` sums the rest; total - others is their number n, and the result is log(n + others).
        others = shares.frac_().sum(-1)
        return cls(highest, ((total - others).round_() - 1).add_(others).log1p_())

    def rows(self, rows: slice | Tensor) -> "LogSumExp":
        return LogSumExp(self.highest[rows], self.log_total[rows])


class PlainChunk:
    """The logits of a chunk and their softmax in plain PyTorch, for any device and dtype.

    Call `log_sum_exp` first, then `logprobs` and `statistics`, last `entropies` or `gradient`, which may overwrite the
    logits. For a kept chunk, `gradient` may follow `entropies`, once.

    Args:
        logits: the head's output; they are overwritten.
        entropy: whether `entropies` will be called.
        backward: whether `gradient` will be called.
    """

    def __init__(self, logits: Float[Tensor, "r V"], scaling: Scaling, *, entropy: bool, backward: bool):
        self._scaling = scaling
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self._slope = scaling.logit_map.apply_(logits, want_slope=backward)
        self._logits = logits if scaling.temperature == 1.0 else logits.div_(scaling.temperature)
        self._are_below_highest = False

    def log_sum_exp(self) -> LogSumExp:
        """In the wide dtype, as all results but the gradient."""
        return LogSumExp.of(self._logits)

    def logprobs(self, lse: LogSumExp, edges: EdgesOfChunk) -> Float[Tensor, " e"]:
        return self._logits[edges].sub_(lse.highest[edges.row]).sub_(lse.log_total[edges.row])

    def statistics(self, lse: LogSumExp, edges: EdgesOfChunk) -> Statistics:
        """`Statistics` of the chunk; does not change the logits."""
        return self.moments(lse).statistics(self._logits.shape[-1], lse, edges)

    def moments(self, lse: LogSumExp) -> "Moments":
        return Moments.of(self._logits, lse)

    def entropies(self, lse: LogSumExp) -> Float[Tensor, " r"]:
        """In nats; of a share of the vocabulary, its part of the sum."""
        below = self._below_highest(lse)
        shares = below.exp()
        total = shares.sum(-1)
        # No term is negative, so nothing cancels.
        return (lse.log_total * total - shares.mul_(below).sum(-1)) / lse.log_total.exp()

    def _below_highest(self, lse: LogSumExp) -> Float[Tensor, "r V"]:
        """The logits, from which the highest is subtracted once."""
        if not self._are_below_highest:
            self._logits.sub_(lse.highest[:, None])
            self._are_below_highest = True
        return self._logits

    def gradient(self, lse: LogSumExp, edges: EdgesOfChunk, gradients: ChunkGradients) -> Float[Tensor, "r V"]:
        """The gradient of the loss with respect to the head's own logits."""
        below, by_row = self._below_highest(lse), gradients.by_row
        log_p = below[edges].sub_(lse.log_total[edges.row])
        from_entropy: Tensor | float = 0.0
        if gradients.entropies is None or gradients.by_entropy is None:
            grad = below.exp_().mul_(by_row.div(lse.log_total.exp()).neg_()[:, None])
        else:
            # d H / d z_v = -p_v (log p_v + H)
            by_entropy, entropies = gradients.by_entropy, gradients.entropies
            from_entropy = by_entropy[edges.row] * (log_p + entropies[edges.row])
            weightings = (below + (entropies - lse.log_total)[:, None]).mul_(by_entropy[:, None])
            weightings.add_(by_row[:, None]).mul_(lse.log_total.exp().reciprocal_().neg_()[:, None])
            grad = below.exp_().mul_(weightings)
        # Predicted tokens again, with w = `own`: w - p by_row = w (1 - p) - p (by_row - w). -expm1(log p) is 1 - p with
        # all digits where p is near 1.
        grad[edges] = 0.0
        grad.index_put_(tuple(edges), gradients.by_edge, accumulate=True)
        own = grad[edges]
        grad[edges] = -own * log_p.expm1() - (by_row[edges.row] - own + from_entropy) * log_p.exp()
        return self._scaling.logit_map.pull_back_(grad.div_(self._scaling.temperature), self._slope)


class Moments(NamedTuple):
    """Moments of the rows' scaled logits, from which `Statistics` are made."""

    highest: Float[Tensor, " r"]
    token: Int64[Tensor, " r"]
    """The token with the highest logit."""
    total: Float[Tensor, " r"]
    squares: Float[Tensor, " r"]
    """Log-sum-exp of twice the logits less the highest logit of the whole vocabulary."""

    @classmethod
    def of(cls, logits: Float[Tensor, "r V"], lse: LogSumExp) -> "Moments":
        return cls(*logits.max(-1), logits.sum(-1), (2 * (logits - lse.highest[:, None])).logsumexp(-1))

    def statistics(self, vocab_size: int, lse: LogSumExp, edges: EdgesOfChunk) -> Statistics:
        is_top1 = self.token[edges.row] == edges.target
        return Statistics(is_top1, self.total / vocab_size, self.squares - 2 * lse.log_total)


class HeadKernels:
    """How a fused head computes its chunks: here by PyTorch alone. `kernels/lm_head.py` has those of GPUs."""

    @property
    def setting(self) -> str | None:
        """The user's choice, where there is one."""
        return None

    def chunk_type(
        self, dtype: torch.dtype, device: torch.device, bias: Tensor | None, scaling: Scaling
    ) -> type[PlainChunk]:
        """The class that computes the softmax of a chunk, for logits of a dtype on a device."""
        return PlainChunk

    def logit_bytes(self, dtype: torch.dtype, device: torch.device, bias: Tensor | None, scaling: Scaling) -> int:
        """The bytes that one logit takes while it is scored."""
        wide = torch.promote_types(dtype, torch.float32).itemsize
        return 2 * wide + (dtype.itemsize if dtype.itemsize < wide else 0)

    def add_product(self, total: Float[Tensor, "V D"], left: Float[Tensor, "V r"], right: Float[Tensor, "r D"]) -> None:
        """total += left @ right, in place."""
        if left.dtype == total.dtype:
            total.addmm_(left, right)
        else:  # the product of a chunk is rounded
            total.add_(left @ right)


PLAIN = HeadKernels()


# ---- a plain linear head, chunk by chunk


class _Settings(NamedTuple):
    """The arguments of a fused call other than tensors of the graph."""

    edges: Edges
    request: ScoreRequest
    """It has coefficients only if gradients are wanted; loss and gradients are then computed together."""
    scaling: Scaling
    compute: torch.dtype


class _Chunked(NamedTuple):
    """One chunk of a call."""

    rows: slice
    edges: slice
    own: EdgesOfChunk
    """The edges, with rows numbered from 0 within the chunk."""


def _chunks(edges: Edges, vocab_size: int, device: torch.device) -> Iterator[_Chunked]:
    step = head_chunk_rows(vocab_size, device.type)
    bounds = list(range(0, len(edges.rows), step))
    edge_row = edges.edge_row.cpu().numpy() if edges.host_edge_row is None else edges.host_edge_row
    edge_cuts = np.searchsorted(edge_row, [*bounds, len(edges.rows)]).tolist()  # edges are sorted by row
    for number, start in enumerate(bounds):
        taken = slice(edge_cuts[number], edge_cuts[number + 1])
        own = EdgesOfChunk(edges.edge_row[taken] - start, edges.targets[taken])
        yield _Chunked(slice(start, start + step), taken, own)


class _LinearHead:
    """Computes logits by chunk in the compute dtype, and sums weight gradients in the wide dtype."""

    def __init__(
        self,
        rows: Float[Tensor, "R D"],
        weight: Float[Tensor, "V D"],
        bias: Float[Tensor, " V"] | None,
        settings: _Settings,
        *,
        backward: bool,
        needs=(),
    ):
        compute, buffers = settings.compute, settings.request.buffers
        buffers = buffers if buffers is not None and buffers.takes(weight) else None
        wide = torch.promote_types(compute, torch.float32)
        self._rows = rows
        self._given = rows, weight, bias
        self._settings = settings
        self._backward = backward
        self._weight = weight.to(compute)
        self._bias = None if bias is None else bias.to(compute)
        self._type = settings.request.kernels.chunk_type(compute, rows.device, bias, settings.scaling)
        vocabulary = settings.request.vocabulary  # ranks exchange numbers at every chunk: all have the same chunks
        self.vocab_size = len(weight) if vocabulary is None else vocabulary.width
        self._buffered = buffers is not None
        self._by_rows = self._by_weight = self._by_bias = None
        if any(needs):
            self._by_rows = torch.empty_like(rows, dtype=compute) if needs[0] else None
            if needs[1]:
                self._by_weight = torch.zeros_like(weight, dtype=wide) if buffers is None else buffers.total(weight)
            self._by_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def logits(self, chunk: _Chunked) -> PlainChunk:
        settings, vocabulary = self._settings, self._settings.request.vocabulary
        logits = nn.functional.linear(self._rows[chunk.rows].to(settings.compute), self._weight, self._bias)
        entropy, backward = settings.request.need_entropy, self._backward
        own = self._type(logits, settings.scaling, entropy=entropy, backward=backward)
        return own if vocabulary is None else vocabulary.chunk(own)

    def add(
        self,
        chunk: _Chunked,
        logits: PlainChunk,
        lse: LogSumExp,
        by_edge: Float[Tensor, " e"],
        *of_entropies: Float[Tensor, " r"],
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            by_edge: gradients with respect to log-probabilities.
            of_entropies: the rows' entropies and their gradients, if the loss has any.
        """
        by_row = torch.zeros_like(lse.highest).index_add_(0, chunk.own.row, by_edge)
        grad_logits = logits.gradient(lse, chunk.own, ChunkGradients(by_edge, by_row, *of_entropies))
        narrow = grad_logits.to(self._settings.compute)
        if self._by_rows is not None:
            count = len(narrow)
            # A CPU's product of up to three rows adds up the vocabulary in order, with ten times the rounding error.
            filled = nn.functional.pad(narrow, (0, 0, 0, max(0, 4 - count)))
            self._by_rows[chunk.rows] = (filled @ self._weight)[:count]
        if self._by_weight is not None:
            x = self._rows[chunk.rows].to(narrow.dtype)
            self._settings.request.kernels.add_product(self._by_weight, narrow.t(), x)
        if self._by_bias is not None:
            self._by_bias += grad_logits.sum(0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients in the dtypes of the tensors they belong to, without those in a buffer."""
        by_weight = None if self._buffered else self._by_weight
        if self._by_rows is not None and self._settings.request.vocabulary is not None:
            self._settings.request.vocabulary.sum(self._by_rows)
        found = zip((self._by_rows, by_weight, self._by_bias), self._given)
        return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in found)


class _LinearScores(torch.autograd.Function):
    """The loss with known coefficients (else 0), log-probabilities of edges and entropies of rows.

    With known coefficients, the gradients are made in the same pass over the logits, and only the loss is
    differentiable. Otherwise logits are computed again in backward, or kept until then.
    """

    @staticmethod
    def forward(ctx, rows, weight, bias, settings: _Settings, found: Statistics | None):
        request, known = settings.request, settings.request.coefficients
        wide = torch.promote_types(settings.compute, torch.float32)
        logprobs = rows.new_empty(len(settings.edges.targets), dtype=wide)
        lse = LogSumExp(*rows.new_empty(2, len(rows), dtype=wide))
        entropies = rows.new_zeros(len(rows) if request.need_entropy else 0, dtype=wide)
        kept: list[PlainChunk | None] | None = [] if request.keep_logits and known is None else None
        needs = () if known is None else ctx.needs_input_grad[:3]
        with torch.autocast(rows.device.type, enabled=False):
            head = _LinearHead(
                rows, weight, bias, settings, backward=kept is not None or known is not None, needs=needs
            )
            for chunk in _chunks(settings.edges, head.vocab_size, rows.device):
                logits = head.logits(chunk)
                own = logits.log_sum_exp()
                lse.highest[chunk.rows], lse.log_total[chunk.rows] = own
                logprobs[chunk.edges] = logits.logprobs(own, chunk.own)
                if known is not None:  # while the logits are there: the head runs once
                    head.add(chunk, logits, own, known[chunk.edges])
                    continue
                if kept is not None:
                    kept.append(logits)
                if found is not None:
                    found.write(chunk.edges, chunk.rows, logits.statistics(own, chunk.own))
                if request.need_entropy:
                    entropies[chunk.rows] = logits.entropies(own)
        ctx.settings, ctx.kept, ctx.made = settings, kept, None
        if known is None:
            ctx.save_for_backward(rows, weight, bias, *lse, entropies)
            return logprobs.new_zeros(()), logprobs, entropies
        ctx.made = head.gradients()
        ctx.mark_non_differentiable(logprobs, entropies)
        return (logprobs * known).sum(), logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, grad_logprobs, grad_entropies):
        settings, kept, ctx.kept = ctx.settings, ctx.kept, None
        if settings.request.coefficients is not None:
            if ctx.made is None:
                raise RuntimeError("a second backward through a fused tree loss: run the forward again")
            made, ctx.made = ctx.made, None
            # In place: the gradients were made for this loss alone.
            return (*(None if g is None else g.mul_(grad_loss) for g in made), None, None)
        rows, weight, bias, *lse, entropies = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            head = _LinearHead(rows, weight, bias, settings, backward=True, needs=ctx.needs_input_grad[:3])
            for number, chunk in enumerate(_chunks(settings.edges, head.vocab_size, rows.device)):
                if kept is None:  # there was no memory to keep all logits
                    logits = head.logits(chunk)
                else:
                    logits, kept[number] = kept[number], None
                both = (entropies, grad_entropies) if settings.request.need_entropy else ()
                of_entropies = [x[chunk.rows] for x in both]
                head.add(chunk, logits, LogSumExp(*lse).rows(chunk.rows), grad_logprobs[chunk.edges], *of_entropies)
        return (*head.gradients(), None, None)


class _LogitScores(torch.autograd.Function):
    """Log-probabilities of edges and entropies of rows, from a head's logits."""

    @staticmethod
    def forward(ctx, logits, edges: EdgesOfChunk, scaling: Scaling, need_entropy: bool, need_statistics: bool):
        # The head's graph may have saved its output: the chunk overwrites a copy.
        chunk = PlainChunk(logits.clone(), scaling, entropy=need_entropy, backward=True)
        lse = chunk.log_sum_exp()
        logprobs = chunk.logprobs(lse, edges)
        found = chunk.statistics(lse, edges) if need_statistics else None
        entropies = chunk.entropies(lse) if need_entropy else logprobs.new_zeros(0)
        ctx.chunk, ctx.given, ctx.dtype = chunk, (lse, edges, entropies if need_entropy else None), logits.dtype
        return logprobs, entropies, found

    @staticmethod
    @once_differentiable
    def backward(ctx, by_edge, by_entropy, _found):
        chunk, (lse, edges, entropies) = ctx.chunk, ctx.given
        by_row = torch.zeros_like(lse.highest).index_add_(0, edges.row, by_edge)
        grad = chunk.gradient(lse, edges, ChunkGradients(by_edge, by_row, entropies, by_entropy))
        return grad.to(ctx.dtype), None, None, None, None


def _scores_through_module(rows, head_forward, edges: Edges, vocab_size: int, scaling: Scaling, need_entropy, found):
    """Score a head that is more than a matrix (such as an adapter around one) by autograd, chunk by chunk."""

    def score(x: Tensor, chunk: _Chunked) -> tuple[Tensor, Tensor]:
        logprobs, entropies, part = _LogitScores.apply(  # type: ignore[misc]
            head_forward(x), chunk.own, scaling, need_entropy, found is not None
        )
        if found is not None:
            found.write(chunk.edges, chunk.rows, part)
        return logprobs, entropies

    chunks = _chunks(edges, vocab_size, rows.device)
    pieces = [checkpoint(score, rows[chunk.rows], chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*pieces)
    return torch.cat(logprobs), torch.cat(entropies)
