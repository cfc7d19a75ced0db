"""Context parallel: the ranks of a group hold the same rows and divide the tokens of every part among them.

Each rank runs the model on an even share of a part's packed tokens. Only attention needs other tokens, and it treats
every head by itself. So one all-to-all gives each rank its share of the heads for all tokens. Any attention backend
runs unchanged on the whole forest. A second all-to-all returns the results (DeepSpeed-Ulysses, arXiv 2309.14509):

    outside of attention                  inside
    rank 0: tokens 0 1 2, heads A B       rank 0: tokens 0 1 2 3 4 5, head A
    rank 1: tokens 3 4 5, heads A B       rank 1: tokens 0 1 2 3 4 5, head B

Shares are equal for any shape of the tree, and each rank keeps the KV cache of its heads. The last shares are padded
with tokens that no token attends to.

Why the gradients are right: the scores of all shares are put together on every rank, so every rank evaluates the same
loss and gets the same gradients of scores. Each runs backward from the scores of its own tokens, times the number of
ranks. The exchange's backward is the reverse exchange. So the mean over ranks, as data parallel takes it, is the sum
over all tokens.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.engine.distributed import Ranks
from treetrain.engine.lm_head import Scores, Statistics
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities
from treetrain.softmax_attention.schedule import AttentionSpec
from treetrain.tree.layout import PackedLayout


def check_context(ranks: Ranks, model: Any, capabilities: Capabilities, *, alone: bool) -> None:
    """Raise UnsupportedModel for a model that these ranks cannot divide.

    Args:
        alone: whether no other ranks (data parallel, FSDP2) share the steps.
    """
    if ranks.alone:
        return
    name, scalar = type(model).__name__, capabilities.scalar
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    fitting = [size for size in range(1, keys + 1) if heads % size == 0 and keys % size == 0]
    refused = {
        f"{heads} heads and {keys} heads of keys and values, which {ranks.size} ranks cannot share evenly; groups of "
        f"{', '.join(map(str, fitting))} can": ranks.size not in fitting,
        "recurrent layers, whose states are not exchanged between ranks yet": capabilities.recurrent_layers,
        "an auxiliary loss of its routers, which counts the tokens of all ranks": capabilities.auxiliary != 0,
        "a head for one token of each row": scalar is not None and scalar.pooled,
        "weights or rows that other ranks share too (FSDP2, DistributedDataParallel, group=)": not alone,
    }
    for what, is_so in refused.items():
        if is_so:
            raise UnsupportedModel(
                f"context parallel over {ranks.size} ranks is not supported for {name}: it has {what}"
            )


class Share:
    """One rank's tokens of a layout, padded to the same number on every rank, and the edges that they predict.

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

    def arrays(self) -> list[np.ndarray]:
        """int64 arrays: ids and positions of the tokens; rows, row of each edge and targets, as in `Edges`."""
        layout, none = self.layout, slice(0, 0)
        rows, edges = (self._rows, self._edges) if self._scored else (none, none)
        tokens = [np.zeros(self.size, np.int64) for _ in range(2)]
        for padded, own in zip(tokens, (layout.input_ids[self._tokens], layout.positions[self._tokens])):
            padded[: len(own)] = own
        return [
            *tokens,
            layout.rows[rows] - self._tokens.start,
            layout.edge_row_index[edges] - rows.start,
            layout.edge_targets[edges].astype(np.int64, copy=False),
        ]

    def coefficients(self, whole: Tensor | None) -> Tensor | None:
        """The share's part of gradients that are known before the pass, [E] -> [e], times the number of ranks."""
        return None if whole is None else whole[self._edges] * self.ranks.size

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
        return Scores(
            logprobs=joined(scores.logprobs, edges),  # type: ignore[arg-type]
            entropies=joined(scores.entropies, rows),
            linear_loss=scores.linear_loss,
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


class HeadExchange:
    """Tree attention over tokens divided among ranks; the caller passes its share of them with all heads.

    Args:
        attention: the backend of the whole forest, for this rank's share of the heads.
    """

    def __init__(self, attention: Any, share: Share):
        self._attention, self._share = attention, share
        self.calls = attention.calls

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        layer: int,
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [n, H, D], key [n, G, D], value [n, G, V], sinks [H] -> [n, H, V]; n tokens of the share."""
        ranks, tokens = self._share.ranks, self._share.layout.num_tokens
        for states, what in ((query, "heads"), (key, "heads of keys and values")):
            if states.shape[1] % ranks.size:
                raise UnsupportedModel(
                    f"layer {layer} has {states.shape[1]} {what}, which {ranks.size} ranks cannot share evenly; take "
                    "a context-parallel group whose size divides them"
                )
        # One exchange for all three: fewer messages, and the same order on every rank in backward.
        shapes = [(x.shape[1] // ranks.size, x.shape[2]) for x in (query, key, value)]
        parts = [x.unflatten(1, (ranks.size, -1)).flatten(2) for x in (query, key, value)]
        mine = _Exchange.apply(torch.cat(parts, dim=2).transpose(0, 1).contiguous(), ranks)
        mine = mine.flatten(0, 1)[:tokens].split([heads * size for heads, size in shapes], dim=1)
        states = (x.unflatten(1, shape).contiguous() for x, shape in zip(mine, shapes))
        own = None if sinks is None else sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
        out = self._attention(*states, scale, layer, spec, own)
        padded = torch.nn.functional.pad(out.flatten(1), (0, 0, 0, ranks.size * self._share.size - tokens))
        back = _Exchange.apply(padded.unflatten(0, (ranks.size, -1)), ranks)
        return back.transpose(0, 1).reshape(self._share.size, -1, out.shape[2])


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
