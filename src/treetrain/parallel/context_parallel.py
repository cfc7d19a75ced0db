"""Context parallel: the ranks of a group hold the same rows and divide the tokens of every part among them.

Each rank runs the model on an even share of a part's packed tokens. Attention needs other ranks' tokens, but treats
heads independently. So one all-to-all gives each rank its share of the heads for all tokens. Any attention backend runs
unchanged on the whole forest. A second all-to-all returns the results (DeepSpeed-Ulysses, arXiv 2309.14509):

    outside of attention                  inside
    rank 0: tokens 0 1 2, heads A B       rank 0: tokens 0 1 2 3 4 5, head A
    rank 1: tokens 3 4 5, heads A B       rank 1: tokens 0 1 2 3 4 5, head B

Several heads may share one head of keys and values. If the ranks cannot share those evenly, each is repeated before the
exchange, so that every rank gets those of its own heads. The gradients of the copies are summed.

Shares are equal for any shape of the tree, and each rank keeps the KV cache of its heads. The last shares are padded
with tokens that no token attends to. A recurrent layer does the same exchanges around its convolution and its
recurrence, which treat channels and heads independently. The recurrent states of a path also stay with their heads.

Why the gradients are right: every rank gathers the scores of all shares, so every rank evaluates the same loss and gets
the same gradients of scores. Each rank runs backward from the scores of its own tokens, with their gradients times the
number of ranks. The exchange's backward is the reverse exchange. So the mean over ranks, as in data parallel, is the
sum over all tokens.
"""

from dataclasses import replace
from math import gcd

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import ModelOutput

from treetrain.core.attention.kv_cache import AttentionCall
from treetrain.core.attention.schedule import PLAIN_ATTENTION
from treetrain.core.engine.extension import Extension, LayoutArrays, ModelPass
from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import Scores, Statistics
from treetrain.core.hf.capability import Capabilities, causal_lm
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.tree.layout import PackedLayout


def check_context(ranks: Ranks, model: nn.Module, capabilities: Capabilities) -> None:
    """Raise UnsupportedModel for a model that these ranks cannot divide."""
    if ranks.alone:
        return
    name, scalar = type(model).__name__, capabilities.scalar
    config = causal_lm(model).config.get_text_config()
    heads = int(config.num_attention_heads)
    counts = {heads: "heads"}
    counts |= {n: f"{unit} of recurrent layers" for x in capabilities.special for n, unit in x.heads.items()}
    fitting = [size for size in range(1, min(counts) + 1) if all(number % size == 0 for number in counts)]
    if ranks.size not in fitting:
        has = (
            f"{' and '.join(f'{number} {what}' for number, what in counts.items())}, which {ranks.size} ranks cannot "
            f"share evenly; groups of {', '.join(map(str, fitting))} can: pass one of them as context="
        )
    elif scalar is not None and scalar.pooled:
        has = "a head for one token of each row"
    else:
        return
    raise UnsupportedModel(f"context parallel over {ranks.size} ranks is not supported for {name}: it has {has}")


def copies_of_keys(heads: int, size: int) -> int:
    """Count the copies of each of the heads of keys and values that `size` ranks need to have equal shares of them.

    Copies are neighbours, so together there are as many as the least common multiple. Ranks that divide the query heads
    thus get the ones that their queries use, in the same order, with equally many queries for each.
    """
    return size // gcd(heads, size)


class Share:
    """One rank's n tokens of a layout of N, padded so that all ranks have as many, and the e edges that they predict.

    Args:
        score: whether edges are scored; False runs the layers alone.
    """

    def __init__(self, ranks: Ranks, layout: PackedLayout, *, score: bool = True):
        self.ranks, self.layout, self._scored = ranks, layout, score
        self.size = -(-layout.num_tokens // ranks.size)
        start = ranks.rank * self.size
        self._tokens = slice(start, start + self.size)
        first, last = np.searchsorted(layout.rows, [start, start + self.size])
        self._rows = slice(int(first), int(last))
        first, last = np.searchsorted(layout.edge_row_index, [first, last])
        self._edges = slice(int(first), int(last))

    def arrays(self) -> LayoutArrays:
        """The arrays of this rank's tokens and edges, numbered within the share."""
        layout, none = self.layout, slice(0, 0)
        rows, edges = (self._rows, self._edges) if self._scored else (none, none)
        ids, positions = (np.zeros(self.size, np.int64) for _ in range(2))
        for padded, own in ((ids, layout.input_ids[self._tokens]), (positions, layout.positions[self._tokens])):
            padded[: len(own)] = own
        return LayoutArrays(
            ids,
            positions,
            layout.rows[rows] - self._tokens.start,
            layout.edge_row_index[edges] - rows.start,
            layout.edge_targets[edges].astype(np.int64, copy=False),
        )

    def coefficients(self, whole: Float[Tensor, " E"] | None) -> Float[Tensor, " e"] | None:
        """Take this rank's part of gradients that are known before the pass, times the number of ranks."""
        return None if whole is None else whole[self._edges] * self.ranks.size

    def of_tokens(self, whole: Shaped[Tensor, " N *rest"] | None, padding: int) -> Shaped[Tensor, " n *rest"] | None:
        """Take this rank's entries of a tensor with one entry per token, and pad them."""
        if whole is None:
            return None
        own = whole[self._tokens]
        return torch.cat([own, own.new_full((self.size - len(own), *own.shape[1:]), padding)])

    def own(self, weight: Tensor) -> Tensor:
        """Take this rank's share of weights by head or channel."""
        return weight.chunk(self.ranks.size)[self.ranks.rank]

    def to_heads(self, *states: Float[Tensor, "n _"]) -> list[Float[Tensor, "N _"]]:
        """Exchange all heads of this rank's tokens for its own heads of all tokens."""
        # One exchange for all: fewer messages, and the same order on every rank in backward.
        parts = [x.unflatten(1, (self.ranks.size, -1)) for x in states]
        sent = torch.cat(parts, dim=2).transpose(0, 1).contiguous()
        mine = _Exchange.apply(sent, self.ranks).flatten(0, 1)[: self.layout.num_tokens]  # type: ignore[union-attr]
        return [x.to(of.dtype) for x, of in zip(mine.split([part.shape[2] for part in parts], dim=1), states)]

    def to_tokens(self, states: Float[Tensor, "N _"]) -> Float[Tensor, "n _"]:
        """Reverse `to_heads`."""
        padded = torch.nn.functional.pad(states, (0, 0, 0, self.ranks.size * self.size - len(states)))
        back = _Exchange.apply(padded.unflatten(0, (self.ranks.size, -1)), self.ranks)
        return back.transpose(0, 1).flatten(1)  # type: ignore[union-attr]

    def whole(self, scores: Scores) -> Scores:
        """Gather the scores of all shares; a collective call. Backward reaches only this rank's scores."""
        if not self._scored:
            return scores
        edges, rows = (self._edges, self.layout.num_edges), (self._rows, len(self.layout.rows))

        def joined(own: Tensor | None, place: tuple[slice, int]) -> Tensor | None:
            return None if own is None else _Join.apply(own, *place, self.ranks)

        found = scores.statistics
        statistics = None
        if found is not None:
            top, *others = (joined(own, place) for own, place in zip(found, (edges, rows, rows)))
            assert top is not None
            statistics = Statistics(top > 0, *others)  # type: ignore[arg-type]
        return replace(
            scores,
            logprobs=joined(scores.logprobs, edges),  # type: ignore[arg-type]
            entropies=joined(scores.entropies, rows),
            values=joined(scores.values, rows),
            statistics=statistics,
        )


class _Join(torch.autograd.Function):
    """Gather the entries of all ranks by an all-reduce."""

    @staticmethod
    def forward(ctx, own: Tensor, place: slice, count: int, ranks: Ranks):
        ctx.place, ctx.factor = place, ranks.size
        wide = own.to(torch.float32) if own.dtype == torch.bool else own
        whole = wide.new_zeros(count, *own.shape[1:])
        whole[place] = wide
        dist.all_reduce(whole, group=ranks.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad[ctx.place] * ctx.factor, None, None, None


class ContextParallel(Extension):
    """Runs the model on this rank's tokens of every part."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def before_forward(self, model_pass: ModelPass) -> None:
        if model_pass.idle:  # these ranks have the same passes, so they run it together, each over the whole token
            return
        share = Share(self._ranks, model_pass.part.piece.layout, score=model_pass.scores)
        model_pass.extras.append(share)
        model_pass.arrays = share.arrays()
        model_pass.attention = HeadExchange(model_pass.attention, share)
        coefficients = share.coefficients(model_pass.request.coefficients)
        model_pass.request = replace(model_pass.request, coefficients=coefficients)

    def after_forward(self, model_pass: ModelPass, outputs: ModelOutput, scores: Scores) -> Scores:
        share = instance_of(Share, model_pass.extras)
        return scores if share is None else share.whole(scores)


class HeadExchange(AttentionCall):
    """Tree attention over tokens divided among ranks; the caller passes its share of them with all heads.

    Args:
        attention: the backend of the whole forest, for this rank's share of the heads.
    """

    def __init__(self, attention: AttentionCall, share: Share):
        self._attention, self._share = attention, share

    def __call__(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None) -> Tensor:
        """Attention of the share's tokens."""
        share, heads = self._share, query.shape[1]
        if heads % share.ranks.size:
            raise UnsupportedModel(
                f"layer {layer} has {heads} heads, which {share.ranks.size} ranks cannot share evenly; take a "
                "context-parallel group whose size divides them"
            )
        copies = copies_of_keys(key.shape[1], share.ranks.size)
        given = (query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)))
        mine = share.to_heads(*(x.flatten(1) for x in given))
        q, k, v = (x.unflatten(1, (-1, of.shape[2])).contiguous() for x, of in zip(mine, given))
        out = self._attention(q, k, v, scale, layer, spec, None if sinks is None else share.own(sinks))
        return share.to_tokens(out.flatten(1)).unflatten(1, (-1, out.shape[2]))


class _Exchange(torch.autograd.Function):
    """[P, ...] -> [P, ...]: entry p goes to rank p, and entry p of the result comes from it."""

    @staticmethod
    def forward(ctx, sent: Tensor, ranks: Ranks):
        ctx.ranks = ranks
        return _exchange(sent, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _exchange(grad, ctx.ranks), None


def _exchange(sent: Tensor, ranks: Ranks) -> Tensor:
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, sent.contiguous(), group=ranks.group)
    return received
