"""Tree attention as a few varlen calls of stock flash attention, merged by log-sum-exp.

Every path of first children (a chain) is contiguous, so one causal varlen call covers all chains. Subtrees that attach
to a chain at a fork see the chain down to that fork in full: a rectangle. The light depth of a token counts the forks
above it where its path does not take the first child. Rectangles of one light depth have no query in common and share
one call. So a tree takes 1 + (largest light depth) calls, and one more if it continues a path. The backward calls the
stock backward of each with the output and log-sum-exp over *all* keys, which is exact.

A rectangle's keys are copied for each fork, so a chain with many forks would be copied many times. Such a forest goes
to another backend, and so do layers with windows, caps or dtypes that flash attention lacks.

Shape letters: N tokens, C sequences of a call, H query heads, G key/value heads, D size of query and key heads, V size
of value heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from treetrain.device_arrays import to_device
from treetrain.softmax_attention.forks import path_tops
from treetrain.softmax_attention.kernels import sink_gradient
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.tree.layout import ranges

MOST_COPIES = 8
"""Most keys gathered for rectangles, as a multiple of the forest's tokens."""
MOST_SEQUENCES = 65_535
"""Most sequences of a call: flash attention puts them on a grid dimension with this limit."""


class Call(NamedTuple):
    """One varlen call as host arrays: sequence c of queries sees sequence c of keys."""

    queries: np.ndarray
    """int64: query tokens."""
    keys: np.ndarray
    """int64: key tokens, once for each sequence that they are in."""
    query_offsets: np.ndarray
    """int64 [C + 1]."""
    key_offsets: np.ndarray
    """int64 [C + 1]."""
    causal: bool


def varlen_calls(forest: Forest) -> list[Call]:
    """The calls that cover every visible pair of a forest exactly once; the queries of the first are all tokens."""
    start, parent = forest.segment_start, forest.segment_parent
    if not len(parent):
        return []
    top = path_tops(parent)
    tops = np.unique(top)
    chain_start, everything = start[tops], np.arange(len(forest.ends))
    offsets = np.append(chain_start, len(forest.ends))
    calls = [Call(everything, everything, offsets, offsets, True)]
    # A segment with several children has one rectangle: all children but the first against the chain above.
    forks = np.unique(parent[(parent >= 0) & (parent != np.arange(len(parent)) - 1)])
    level = _light_depth(parent, top, tops)[np.searchsorted(tops, top[forks])]
    query_start, query_stop = forest.ends[start[forks + 1]], forest.ends[start[forks]]
    key_start, key_stop = start[top[forks]], start[forks + 1]
    for number in np.unique(level):
        chosen = level == number
        query_count, key_count = (query_stop - query_start)[chosen], (key_stop - key_start)[chosen]
        calls.append(
            Call(
                ranges(query_start[chosen], query_count),
                ranges(key_start[chosen], key_count),
                np.concatenate([[0], np.cumsum(query_count)]),
                np.concatenate([[0], np.cumsum(key_count)]),
                False,
            )
        )
    return calls


def _light_depth(parent: np.ndarray, top: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """int64 [chains]: the light depth of each chain."""
    above = parent[tops]
    above = np.where(above >= 0, np.searchsorted(tops, top[above]), -1)
    depth, at = np.zeros(len(tops), np.int64), above
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, above[at], -1)
    return depth


class DeviceCall(NamedTuple):
    """A call on the device."""

    queries: Tensor | None
    """int64; None for all tokens in order."""
    keys: Tensor | None
    query_offsets: Tensor
    """int32 [C + 1]."""
    key_offsets: Tensor
    longest: tuple[int, int]
    """Length of the longest sequence of queries, and of keys."""
    causal: bool


class StockVarlen:
    """PyTorch's own flash attention: 16-bit dtypes, head sizes that are multiples of 8 up to 256."""

    def forward(self, query, key, value, call: DeviceCall, scale: float) -> tuple[Tensor, Tensor]:
        """The output [q, H, D] and the log-sum-exp [H, q] of query [q, H, D], key and value [k, G, D] in sequences."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, call.query_offsets, call.key_offsets, *call.longest, 0.0, call.causal, False, scale=scale
        )
        return out, lse

    def backward(
        self, grad_out, query, key, value, out, lse, call: DeviceCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; `out` and `lse` are those over all keys."""
        # Without dropout the random state is not used.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        return torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, lse, call.query_offsets, call.key_offsets, *call.longest, 0.0,
            call.causal, *state, scale=scale,
        )  # fmt: skip


class VarlenAttention:
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        otherwise: makes the backend for inputs that varlen calls do not support.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        kernel: None uses PyTorch's.
        dtypes: the dtypes that the kernel supports.
    """

    name = "varlen"

    def __init__(
        self,
        forest: Forest,
        device: torch.device,
        *,
        otherwise: Callable[[], Any],
        cache: KVCacheView | None = None,
        kernel: StockVarlen | None = None,
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    ):
        self.cache, self.kernel, self._dtypes = cache, kernel or StockVarlen(), dtypes
        self._otherwise, self._other = otherwise, None
        calls = varlen_calls(forest)
        copies = sum(len(call.keys) for call in calls[1:])
        sequences = max((len(call.query_offsets) - 1 for call in calls), default=0)
        self.suits = copies <= MOST_COPIES * len(forest.ends) and sequences <= MOST_SEQUENCES
        """Whether the copied keys and the sequences of a call stay within their limits."""
        path = 0 if cache is None else cache.path_tokens
        self.calls = [_on_device(call, number == 0, device) for number, call in enumerate(calls)] if self.suits else []
        self.above = _on_device(_against_path(len(forest.ends), path), True, device) if path else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        layer: int = 0,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Args: query [N, H, D], key [N, G, D], value [N, G, V], sinks [H] (logits). Returns [N, H, V]."""
        if (
            not self.suits
            or spec != PLAIN_ATTENTION
            or query.dtype not in self._dtypes
            or max(query.shape[2], value.shape[2]) > 256
        ):
            return self.other(query, key, value, scale, layer, spec, sinks)
        return _VarlenFunction.apply(query, key, value, sinks, self, scale, layer)  # type: ignore[return-value]

    @property
    def other(self) -> Any:
        """The other backend; made at first use."""
        if self._other is None:
            self._other = self._otherwise()
        return self._other


def _against_path(count: int, path: int) -> Call:
    everything, above = np.arange(count), np.arange(path)
    return Call(everything, above, np.array([0, count]), np.array([0, path]), False)


def _on_device(call: Call, in_order: bool, device: torch.device) -> DeviceCall:
    """Args: in_order: whether the queries are all tokens and the keys all keys, both in order."""
    query_offsets, key_offsets = to_device([x.astype(np.int32) for x in (call.query_offsets, call.key_offsets)], device)
    longest = int(np.diff(call.query_offsets).max()), int(np.diff(call.key_offsets).max())
    queries, keys = (None, None) if in_order else to_device([call.queries, call.keys], device)
    return DeviceCall(queries, keys, query_offsets, key_offsets, longest, call.causal)


class _VarlenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, attention: VarlenAttention, scale: float, layer: int):
        cache = attention.cache
        if cache is not None:
            cache.write(layer, key, value)
        heads = _Filled(query, key, value)
        whole, *rectangles = attention.calls
        piece, piece_lse = attention.kernel.forward(*heads.inputs, whole, scale)
        # Where nothing is merged (rows that share nothing), this is plain flash attention without a copy.
        merges = bool(rectangles) or attention.above is not None or sinks is not None
        out, lse = (piece.to(_wide(piece)), piece_lse.clone()) if merges else (piece, piece_lse)
        for call in rectangles:
            assert call.queries is not None and call.keys is not None
            q, k, v = heads.taken(call)
            piece, piece_lse = attention.kernel.forward(q, k, v, call, scale)
            merged = _merged(out[call.queries], lse[:, call.queries], piece, piece_lse)
            out[call.queries], lse[:, call.queries] = merged
        if attention.above is not None and cache is not None:
            above = heads.like(*cache.read(layer, key, value))
            out, lse = _merged(out, lse, *attention.kernel.forward(heads.inputs[0], *above, attention.above, scale))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * _per_row(lse - total), total
        result = out[..., : value.shape[2]].to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.attention, ctx.scale, ctx.layer = attention, scale, layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        attention, scale, layer = ctx.attention, ctx.scale, ctx.layer
        cache, kernel, heads = attention.cache, attention.kernel, _Filled(query, key, value)
        do, o = heads.filled(grad_out.to(query.dtype)), heads.filled(out)
        lse = lse.contiguous()
        whole, *rectangles = attention.calls
        dq, dk, dv = kernel.backward(do, *heads.inputs, o, lse, whole, scale)
        if rectangles or cache is not None:  # more gradients will be added
            dq, dk, dv = (x.to(_wide(x)) for x in (dq, dk, dv))
        for call in rectangles:
            at = call.queries
            taken = *heads.taken(call), o[at], lse[:, at].contiguous()
            piece = kernel.backward(do[at], *taken, call, scale)
            for total, part, index in zip((dq, dk, dv), piece, (at, call.keys, call.keys)):
                total.index_add_(0, index, part.to(total.dtype))
        size, value_size = query.shape[2], value.shape[2]
        if cache is not None:
            if attention.above is not None:
                above = heads.like(*cache.read(layer, key, value))
                piece = kernel.backward(do, heads.inputs[0], *above, o, lse, attention.above, scale)
                dq += piece[0]
                cache.add_path_gradients(layer, piece[1][..., :size], piece[2][..., :value_size])
            dk, dv = dk[..., :size].contiguous(), dv[..., :value_size].contiguous()
            cache.collect(layer, dk, dv)
        grads = dq[..., :size].to(query.dtype), dk[..., :size].to(key.dtype), dv[..., :value_size].to(value.dtype)
        return *grads, None if sinks is None else sink_gradient(sinks, grad_out, out, lse.t()), None, None, None


class _Filled:
    """Query, key and value padded with zeros to one head size that the kernel supports; scores do not change."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        self._size = -(-max(query.shape[2], value.shape[2]) // 8) * 8
        self.inputs = self.filled(query), self.filled(key), self.filled(value)

    def filled(self, x: Tensor) -> Tensor:
        return x.contiguous() if x.shape[2] == self._size else pad(x, (0, self._size - x.shape[2]))

    def like(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.filled(key), self.filled(value)

    def taken(self, call: DeviceCall) -> tuple[Tensor, Tensor, Tensor]:
        assert call.queries is not None and call.keys is not None
        query, key, value = self.inputs
        keys = key.index_select(0, call.keys), value.index_select(0, call.keys)
        return query.index_select(0, call.queries), *keys


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _per_row(log_weights: Tensor) -> Tensor:
    """[H, n] -> [n, H, 1] weights."""
    return log_weights.exp().t().unsqueeze(-1)


def _merged(out: Tensor, lse: Tensor, piece: Tensor, piece_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys: outputs [n, H, V], log-sum-exps [H, n]."""
    total = torch.logaddexp(lse, piece_lse)
    return out * _per_row(lse - total) + piece * _per_row(piece_lse - total), total
