"""Tree attention on the CPU: stock flash-attention calls, merged by log-sum-exp (the calls are chosen in schedule.py).

The backward of softmax attention over a union of key sets is the sum of the backwards over the sets, each computed
with the *global* output and log-sum-exp. The stock backward kernel takes both as arguments, so every call of the
forward has its twin in the backward and the result is exact. The path above a part is one more rectangle, of all its
queries against the carry.

Shape letters: N tokens, H query heads, G key/value heads, D head size, C pieces in a batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.attention.carry import CarryView
from treetrain.attention.schedule import Batch, Forest, Schedule, make_schedule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CALL_MICROSECONDS = 350.0
"""Measured cost of one more rectangle, forward and backward with its merge, on one small CPU."""
PAIR_FLOPS_PER_MICROSECOND = 130e3
"""Measured speed of the stock kernels on two cores of the same CPU."""


@dataclass(frozen=True, slots=True)
class _BatchTensors:
    """A batch of the schedule as tensors: where slots come from and where filled query slots go to."""

    query_index: Tensor  # int64 [C * Q]
    key_index: Tensor  # int64 [C * K]
    pieces: int
    filled_slots: Tensor | None  # int64 [filled]: which of the C * Q slots are real; None when all are
    filled_tokens: Tensor  # int64 [filled]: packed index of each real slot
    mask: Tensor | None  # [C, 1, Q, K] additive, or None for causal


class RectangleAttention:
    """Tree attention for one forest, used by every layer of a run."""

    name = "rectangles"

    def __init__(
        self,
        forest: Forest,
        *,
        carry: CarryView | None = None,
        call_pairs: float | None = None,
        heads_times_size: int = 512,
    ):
        """Args:
        forest: segments of the packed run.
        carry: the path above it, and where its own keys are handed on; None for a whole batch in one run.
        call_pairs: cost of one more call in query-key pairs; None derives it from ``heads_times_size`` (H * D).
        """
        if call_pairs is None:
            call_pairs = CALL_MICROSECONDS * PAIR_FLOPS_PER_MICROSECOND / (14.0 * heads_times_size)
        self.schedule: Schedule = make_schedule(forest, call_pairs=call_pairs)
        self.carry = carry
        self._batches: dict[torch.dtype, list[_BatchTensors]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int = 0) -> Tensor:
        """Args: query [N, H, D], key and value [N, G, D]. Returns [N, H, D]."""
        return _RectangleFunction.apply(query, key, value, self, scale, layer)  # type: ignore[return-value]

    def batches(self, dtype: torch.dtype) -> list[_BatchTensors]:
        """The batches' tensors, with masks in ``dtype``: made once, shared by all layers and both directions."""
        if dtype not in self._batches:
            self._batches[dtype] = [_to_tensors(batch, dtype) for batch in self.schedule.batches]
        return self._batches[dtype]


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
        ctx, query: Tensor, key: Tensor, value: Tensor, attention: RectangleAttention, scale: float, layer: int
    ):
        schedule, carry = attention.schedule, attention.carry
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty(query.shape, dtype=wide)
        lse = torch.empty(query.shape[:2], dtype=wide)
        for start, stop in schedule.chains:
            q, k, v = (_heads_first(x[start:stop]) for x in (query, key, value))
            piece, piece_lse = _flash(q, k, v, 0.0, True, scale=scale)
            out[start:stop] = _heads_last(piece)
            lse[start:stop] = _heads_last(piece_lse)
        for batch in attention.batches(query.dtype):
            q = _gather(query, batch.query_index, batch.pieces)
            k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
            piece, piece_lse = _flash(q, k, v, 0.0, batch.mask is None, attn_mask=batch.mask, scale=scale)
            out.index_copy_(0, batch.filled_tokens, _rows(piece, batch.filled_slots).to(wide))
            lse.index_copy_(0, batch.filled_tokens, _rows(piece_lse, batch.filled_slots))
        for q0, q1, k0, k1 in schedule.rectangles:
            q, k, v = (_heads_first(x) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
            piece, piece_lse = _flash(q, k, v, 0.0, False, scale=scale)
            _merge(out[q0:q1], lse[q0:q1], _heads_last(piece), _heads_last(piece_lse))
        if carry is not None:
            carry.publish(layer, key, value)
            if carry.path_tokens:
                q, k, v = (_heads_first(x) for x in (query, *carry.read(layer, key, value)))
                piece, piece_lse = _flash(q, k, v, 0.0, False, scale=scale)
                _merge(out, lse, _heads_last(piece), _heads_last(piece_lse))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.attention, ctx.scale, ctx.layer = attention, scale, layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        attention, carry, scale, layer = ctx.attention, ctx.attention.carry, ctx.scale, ctx.layer
        grad_out = grad_out.to(query.dtype)
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.empty(query.shape, dtype=wide)
        grad_key = torch.zeros(key.shape, dtype=wide)
        grad_value = torch.zeros(value.shape, dtype=wide)
        for start, stop in attention.schedule.chains:
            dq, dk, dv = _piece_backward(
                (grad_out, query, key, value, out, lse), slice(start, stop), slice(start, stop), True, scale
            )
            grad_query[start:stop] = dq
            grad_key[start:stop] += dk
            grad_value[start:stop] += dv
        for batch in attention.batches(query.dtype):
            causal = batch.mask is None
            do, q, o = (_gather(x, batch.query_index, batch.pieces) for x in (grad_out, query, out))
            k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
            piece_lse = lse.index_select(0, batch.query_index).view(batch.pieces, -1, lse.shape[1])
            if batch.filled_slots is not None:
                do = _silence_padding(do, batch.filled_slots)
            dq, dk, dv = _flash_backward(
                do, q, k, v, o, piece_lse.transpose(1, 2), 0.0, causal, attn_mask=batch.mask, scale=scale
            )
            grad_query.index_copy_(0, batch.filled_tokens, _rows(dq, batch.filled_slots).to(wide))
            grad_key.index_add_(0, batch.key_index, _rows(dk, None).to(wide))
            grad_value.index_add_(0, batch.key_index, _rows(dv, None).to(wide))
        for q0, q1, k0, k1 in attention.schedule.rectangles:
            dq, dk, dv = _piece_backward(
                (grad_out, query, key, value, out, lse), slice(q0, q1), slice(k0, k1), False, scale
            )
            grad_query[q0:q1] += dq
            grad_key[k0:k1] += dk
            grad_value[k0:k1] += dv
        if carry is not None:
            if carry.path_tokens:
                path = carry.read(layer, key, value)
                dq, dk, dv = _call_backward((grad_out, query, *path, out, lse), False, scale)
                grad_query += dq
                carry.add_path_gradient(layer, dk, dv)
            carry.collect(layer, grad_key, grad_value)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _piece_backward(tensors, queries: slice, keys: slice, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """As `_call_backward`, of some queries against some keys."""
    grad_out, query, key, value, out, lse = tensors
    pieces = grad_out[queries], query[queries], key[keys], value[keys], out[queries], lse[queries]
    return _call_backward(pieces, causal, scale)


def _call_backward(tensors: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of one unbatched call, [n, heads, D] each, from the global output and log-sum-exp."""
    do, q, k, v, o = (_heads_first(x) for x in tensors[:5])
    grads = _flash_backward(do, q, k, v, o, tensors[5].t().unsqueeze(0), 0.0, causal, scale=scale)
    return tuple(_heads_last(grad) for grad in grads)


def _silence_padding(grad_out: Tensor, filled_slots: Tensor) -> Tensor:
    """Zero the output gradient of padded query slots, so that they reach no key."""
    pieces, _, slots, _ = grad_out.shape
    keep = grad_out.new_zeros(pieces * slots)
    keep[filled_slots] = 1.0
    return grad_out * keep.view(pieces, 1, slots, 1)


def _merge(out: Tensor, lse: Tensor, piece: Tensor, piece_lse: Tensor) -> None:
    """Merge attention over further keys into ``out`` [n, H, D] and ``lse`` [n, H], in place."""
    total = torch.logaddexp(lse, piece_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(piece.to(out.dtype), (piece_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
