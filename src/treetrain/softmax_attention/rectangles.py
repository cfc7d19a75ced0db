"""Tree attention on the CPU: kernel calls, chosen in schedule.py and local.py, merged by log-sum-exp.

The backward of softmax attention over a union of key sets is the sum of the backwards over the sets, each computed with
the *global* output and log-sum-exp. A kernel's backward takes both as arguments, so the backward makes the same calls
as the forward and is exact. With full attention, the path above a part is one more rectangle: all queries of the part
against the cache. With a window or chunks, the last tokens of that path are put before the part's own keys.

An attention sink is a key without a value: it enters the log-sum-exp once, after everything else is merged.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads, C
pieces in a batch, K keys: the last tokens of the path (none with full attention), then the part's own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.softmax_attention.kernels import CappedKernel, Kernel, StockKernel, sink_gradient
from treetrain.softmax_attention.kv_cache import KVCacheView, with_path
from treetrain.softmax_attention.local import local_schedule
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Batch, Forest, Schedule, make_schedule
from treetrain.tree.attention_range import FULL, AttentionRange

CALL_MICROSECONDS = 350.0
"""Measured cost of one more rectangle, forward and backward with its merge, on one small CPU."""
PAIR_FLOPS_PER_MICROSECOND = 130e3
"""Measured speed of the stock kernels on two cores of the same CPU."""


@dataclass(frozen=True, slots=True)
class _BatchTensors:
    """A batch of the schedule as tensors: the source of every slot and the target of every filled query slot."""

    query_index: Tensor  # int64 [C * Q]
    key_index: Tensor  # int64 [C * K]
    pieces: int
    filled_slots: Tensor | None  # int64 [filled]: the C * Q slots that are not padding; None if none is padding
    filled_tokens: Tensor  # int64 [filled]: the token in each of these slots
    mask: Tensor | None  # [C, 1, Q, K] additive, or None for causal


class _Calls:
    """A schedule and its batches as tensors, shared by all layers with the same visible range."""

    def __init__(self, schedule: Schedule, tail: int | None):
        self.schedule = schedule
        self.tail = tail
        """Number of path tokens put before the keys; None where the whole path is one more rectangle."""
        self._batches: dict[torch.dtype, list[_BatchTensors]] = {}

    def batches(self, dtype: torch.dtype) -> list[_BatchTensors]:
        """The batches' tensors, with masks in ``dtype``: made once, shared by all layers and both directions."""
        if dtype not in self._batches:
            self._batches[dtype] = [_to_tensors(batch, dtype) for batch in self.schedule.batches]
        return self._batches[dtype]


class RectangleAttention:
    """Tree attention for one forest, used by every layer of a run."""

    name = "rectangles"

    def __init__(
        self,
        forest: Forest,
        *,
        cache: KVCacheView | None = None,
        call_pairs: float | None = None,
        heads_times_size: int = 512,
    ):
        """Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        call_pairs: cost of one more call in query-key pairs; None derives it from ``heads_times_size`` (H * D).
        """
        if call_pairs is None:
            call_pairs = CALL_MICROSECONDS * PAIR_FLOPS_PER_MICROSECOND / (14.0 * heads_times_size)
        self.cache = cache
        self._forest, self._call_pairs = forest, call_pairs
        self._calls: dict[AttentionRange, _Calls] = {}

    @property
    def schedule(self) -> Schedule:
        """The calls of layers with full attention."""
        return self.calls(FULL).schedule

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
        return _RectangleFunction.apply(query, key, value, sinks, self, scale, layer, spec)  # type: ignore[return-value]

    def calls(self, visible_range: AttentionRange) -> _Calls:
        """The calls for layers with this visible range; made at first use."""
        if visible_range not in self._calls:
            self._calls[visible_range] = self._make_calls(visible_range)
        return self._calls[visible_range]

    def _make_calls(self, visible_range: AttentionRange) -> _Calls:
        forest, pairs = self._forest, self._call_pairs
        if visible_range == FULL:
            return _Calls(make_schedule(forest, call_pairs=pairs), None)
        if not visible_range.lowest(forest.depth).any():  # no path is longer than the range
            return self.calls(FULL)
        path = 0 if self.cache is None else self.cache.path_tokens
        return _Calls(*local_schedule(forest, visible_range, path_tokens=path, call_pairs=pairs))


def _to_tensors(batch: Batch, dtype: torch.dtype) -> _BatchTensors:
    pieces, width = batch.query_index.shape
    filled = np.flatnonzero(np.arange(width) < batch.query_length[:, None])
    query_index = batch.query_index.reshape(-1)
    mask = None
    if batch.mask is not None:
        mask = torch.zeros(batch.mask.shape, dtype=dtype)
        mask = mask.masked_fill_(~torch.from_numpy(batch.mask), float("-inf")).unsqueeze(1)
    return _BatchTensors(
        query_index=torch.from_numpy(query_index),
        key_index=torch.from_numpy(batch.key_index.reshape(-1)),
        pieces=pieces,
        filled_slots=None if len(filled) == len(query_index) else torch.from_numpy(filled),
        filled_tokens=torch.from_numpy(query_index[filled]),
        mask=mask,
    )


def _gather(x: Tensor, index: Tensor, pieces: int) -> Tensor:
    """[N, heads, D] -> [C, heads, slots, D] view of gathered rows."""
    return x.index_select(0, index).view(pieces, -1, *x.shape[1:]).transpose(1, 2)


def _rows(x: Tensor, filled_slots: Tensor | None) -> Tensor:
    """[C, heads, slots, ...] -> [filled, heads, ...]."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if filled_slots is None else x.index_select(0, filled_slots)


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D] view."""
    return x.transpose(0, 1).unsqueeze(0)


def _heads_last(x: Tensor) -> Tensor:
    """[1, heads, n, ...] -> [n, heads, ...] view."""
    return x.squeeze(0).transpose(0, 1)


class _RectangleFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        attention: RectangleAttention,
        scale: float,
        layer: int,
        spec: AttentionSpec,
    ):
        cache, calls = attention.cache, attention.calls(spec.visible_range)
        kernel: Kernel = StockKernel() if spec.softcap is None else CappedKernel(spec.softcap)
        if cache is not None:
            cache.write(layer, key, value)
        keys, values = with_path(cache, calls.tail or 0, layer, key, value)
        out, lse = _forward_calls(kernel, calls, query, keys, values, scale)
        if cache is not None and calls.tail is None and cache.path_tokens:
            q, k, v = (_heads_first(x) for x in (query, *cache.read(layer, key, value)))
            piece, piece_lse = kernel.forward(q, k, v, False, None, scale)
            _merge(out, lse, _heads_last(piece), _heads_last(piece_lse))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.attention, ctx.calls, ctx.kernel, ctx.scale, ctx.layer = attention, calls, kernel, scale, layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        cache, calls, kernel, scale, layer = ctx.attention.cache, ctx.calls, ctx.kernel, ctx.scale, ctx.layer
        grad_out, tail = grad_out.to(query.dtype), calls.tail or 0
        grad_sinks = None if sinks is None else sink_gradient(sinks, grad_out, out, lse)
        keys, values = with_path(cache, calls.tail or 0, layer, key, value)
        tensors = grad_out, query, keys, values, out, lse
        grad_query, grad_key, grad_value = _backward_calls(kernel, calls, tensors, scale)
        if cache is not None:
            if calls.tail is None and cache.path_tokens:
                path = cache.read(layer, key, value)
                dq, dk, dv = _call_backward(kernel, (grad_out, query, *path, out, lse), False, scale)
                grad_query += dq
                cache.add_path_gradients(layer, dk, dv)
            elif tail:
                cache.add_path_gradients(layer, grad_key[:tail], grad_value[:tail], tail)
                grad_key, grad_value = grad_key[tail:], grad_value[tail:]
            cache.collect(layer, grad_key, grad_value)
        grads = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks
        return (*grads, None, None, None, None)


def _forward_calls(
    kernel: Kernel, calls: _Calls, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, H, V] and log-sum-exp [N, H] over the keys of a schedule."""
    schedule, wide = calls.schedule, torch.promote_types(query.dtype, torch.float32)
    out = torch.empty((*query.shape[:2], value.shape[2]), dtype=wide)
    lse = torch.empty(query.shape[:2], dtype=wide)
    for start, stop in schedule.chains:
        q, k, v = (_heads_first(x[start:stop]) for x in (query, key, value))
        piece, piece_lse = kernel.forward(q, k, v, True, None, scale)
        out[start:stop] = _heads_last(piece)
        lse[start:stop] = _heads_last(piece_lse)
    for batch in calls.batches(query.dtype):
        q = _gather(query, batch.query_index, batch.pieces)
        k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
        piece, piece_lse = kernel.forward(q, k, v, batch.mask is None, batch.mask, scale)
        out.index_copy_(0, batch.filled_tokens, _rows(piece, batch.filled_slots).to(wide))
        lse.index_copy_(0, batch.filled_tokens, _rows(piece_lse, batch.filled_slots))
    for q0, q1, k0, k1 in schedule.rectangles:
        q, k, v = (_heads_first(x) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        piece, piece_lse = kernel.forward(q, k, v, False, None, scale)
        _merge(out[q0:q1], lse[q0:q1], _heads_last(piece), _heads_last(piece_lse))
    return out, lse


def _backward_calls(
    kernel: Kernel, calls: _Calls, tensors: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [N, H, D], key [K, G, D] and value [K, G, V] from a schedule's calls, in the wide dtype."""
    grad_out, query, key, value, out, lse = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = torch.empty(query.shape, dtype=wide)
    grad_key, grad_value = torch.zeros(key.shape, dtype=wide), torch.zeros(value.shape, dtype=wide)
    for start, stop in calls.schedule.chains:
        dq, dk, dv = _piece_backward(kernel, tensors, slice(start, stop), slice(start, stop), True, scale)
        grad_query[start:stop] = dq
        grad_key[start:stop] += dk
        grad_value[start:stop] += dv
    for batch in calls.batches(query.dtype):
        do, q, o = (_gather(x, batch.query_index, batch.pieces) for x in (grad_out, query, out))
        k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
        piece_lse = lse.index_select(0, batch.query_index).view(batch.pieces, -1, lse.shape[1]).transpose(1, 2)
        if batch.filled_slots is not None:
            do = _silence_padding(do, batch.filled_slots)
        dq, dk, dv = kernel.backward(do, q, k, v, o, piece_lse, batch.mask is None, batch.mask, scale)
        grad_query.index_copy_(0, batch.filled_tokens, _rows(dq, batch.filled_slots).to(wide))
        grad_key.index_add_(0, batch.key_index, _rows(dk, None).to(wide))
        grad_value.index_add_(0, batch.key_index, _rows(dv, None).to(wide))
    for q0, q1, k0, k1 in calls.schedule.rectangles:
        dq, dk, dv = _piece_backward(kernel, tensors, slice(q0, q1), slice(k0, k1), False, scale)
        grad_query[q0:q1] += dq
        grad_key[k0:k1] += dk
        grad_value[k0:k1] += dv
    return grad_query, grad_key, grad_value


def _piece_backward(kernel: Kernel, tensors, queries: slice, keys: slice, causal: bool, scale: float):
    """`_call_backward` for some queries against some keys."""
    grad_out, query, key, value, out, lse = tensors
    pieces = grad_out[queries], query[queries], key[keys], value[keys], out[queries], lse[queries]
    return _call_backward(kernel, pieces, causal, scale)


def _call_backward(kernel: Kernel, tensors: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of one unbatched call, [n, heads, size] each, from the global output and log-sum-exp."""
    do, q, k, v, o = (_heads_first(x) for x in tensors[:5])
    grads = kernel.backward(do, q, k, v, o, tensors[5].t().unsqueeze(0), causal, None, scale)
    return tuple(_heads_last(grad) for grad in grads)


def _silence_padding(grad_out: Tensor, filled_slots: Tensor) -> Tensor:
    """Zero the output gradient of padded query slots, so that they add nothing to any key's gradient."""
    pieces, _, slots, _ = grad_out.shape
    keep = grad_out.new_zeros(pieces * slots)
    keep[filled_slots] = 1.0
    return grad_out * keep.view(pieces, 1, slots, 1)


def _merge(out: Tensor, lse: Tensor, piece: Tensor, piece_lse: Tensor) -> None:
    """Merge attention over further keys into ``out`` [n, H, V] and ``lse`` [n, H], in place."""
    total = torch.logaddexp(lse, piece_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(piece.to(out.dtype), (piece_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
