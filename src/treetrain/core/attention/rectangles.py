"""Tree attention by few calls of stock kernels, chosen in schedule.py, merged by log-sum-exp.

This is the backend of CPUs, and on a GPU the one that needs no kernel of ours.

The backward of softmax attention over a union of key sets is the sum of the backwards over the sets, each computed with
the *global* output and log-sum-exp. A kernel's backward takes both as arguments, so the backward makes the same calls
as the forward and is exact. With full attention, the path above a part is one more rectangle: all queries of the part
against the cache. With a window or chunks, the last tokens of that path are put before the part's own keys.

An attention sink is a key without a value: it enters the log-sum-exp once, after everything else is merged.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads, C
pieces in a batch of Q queries and K keys: the last tokens of the path (none with full attention), then the part's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from treetrain.core.attention.kv_cache import (
    CachedAttention,
    Inputs,
    KVCacheView,
    sink_gradient,
)
from treetrain.core.attention.schedule import AttentionSpec, Batch, Forest, Schedule, local_schedule, make_schedule
from treetrain.core.device_arrays import Rows, add_rows, on_device, put_rows, rows_on, take_rows
from treetrain.core.tree.layout import FULL, AttentionRange

CALL_MICROSECONDS = 350.0
"""Measured cost of one more rectangle, forward and backward with its merge, on one small CPU."""
PAIR_FLOPS_PER_MICROSECOND = 130e3
"""Measured speed of the stock kernels on two cores of the same CPU."""


# ---- kernels: one block of queries against one block of keys

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SCORES = {"cpu": 1 << 21, "cuda": 1 << 24}
"""Most scores that the plain kernel holds at once, over all heads, by type of device."""


class Kernel(Protocol):
    """Attention of blocks of queries to blocks of keys; see `StockKernel`."""

    def forward(self, query, key, value, causal, mask, scale) -> tuple[Tensor, Tensor]: ...
    def backward(self, grad_out, query, key, value, out, lse, causal, mask, scale) -> tuple[Tensor, ...]: ...


class StockKernel:
    """The stock CPU flash kernels. Key and value heads of different size are padded with zeros to the larger one."""

    def forward(
        self,
        query: Float[Tensor, "C H Q D"],
        key: Float[Tensor, "C G K D"],
        value: Float[Tensor, "C G K V"],
        causal: bool,
        mask: Float[Tensor, "C 1 Q K"] | None,
        scale: float,
    ) -> tuple[Float[Tensor, "C H Q V"], Float[Tensor, "C H Q"]]:
        """The output and its log-sum-exp.

        Args:
            causal: only if Q = K and there is no mask.
            mask: additive.
        """
        size, value_size = query.shape[-1], value.shape[-1]
        if size == value_size:
            return _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        query, key, value = filled(max(size, value_size), query, key, value)
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return out[..., :value_size], lse

    def backward(self, grad_out, query, key, value, out, lse, causal, mask, scale) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; `out` and `lse` are those over all keys."""
        size, value_size = query.shape[-1], value.shape[-1]
        if size != value_size:
            tensors = grad_out, query, key, value, out
            grad_out, query, key, value, out = filled(max(size, value_size), *tensors)
        dq, dk, dv = _flash_backward(grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq[..., :size], dk[..., :size], dv[..., :value_size]


def filled(size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(pad(t, (0, size - t.shape[-1])) for t in tensors)


@dataclass(frozen=True, slots=True)
class PlainKernel:
    """Attention by matrix products, a few rows of queries at a time: any device, any dtype, with a cap or without.

    No stock CPU kernel has capped scores, cap * tanh(score / cap).
    """

    cap: float | None

    def forward(self, query, key, value, causal, mask, scale):
        """See `StockKernel`; outputs are in float32 or wider."""
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((*query.shape[:3], value.shape[-1]), dtype=wide)
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for rows, keys in _row_blocks(query, key, causal):
            scores, _ = self._scores(query[:, :, rows], key[:, :, keys], rows, causal, mask, scale)
            lse[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
            weights = scores.sub_(scores.logsumexp(-1, keepdim=True)).exp_()
            out[:, :, rows] = (weights.flatten(2, 3) @ value[:, :, keys].to(wide)).view(out[:, :, rows].shape)
        return out, lse

    def backward(self, grad_out, query, key, value, out, lse, causal, mask, scale):
        """See `StockKernel`; gradients are in float32 or wider."""
        wide = torch.promote_types(query.dtype, torch.float32)
        dq = query.new_empty(query.shape, dtype=wide)
        dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (key, value))
        groups = key.shape[1]
        for rows, keys in _row_blocks(query, key, causal):
            q, k, v = query[:, :, rows], key[:, :, keys], value[:, :, keys].to(wide)
            do = grad_out[:, :, rows].to(wide)
            scores, slope = self._scores(q, k, rows, causal, mask, scale)
            weights = scores.sub_(lse[:, :, rows].unflatten(1, (groups, -1)).unsqueeze(-1)).exp_().flatten(2, 3)
            delta = (do * out[:, :, rows]).sum(-1, keepdim=True)  # the sum of weights * d loss / d weight over all keys
            do, delta = _grouped(do, groups), _grouped(delta, groups)
            dv[:, :, keys] += weights.transpose(-1, -2) @ do
            grad = (do @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scale)
            if slope is not None:
                grad.mul_(slope.flatten(2, 3))
            dq[:, :, rows] = (grad @ k.to(wide)).view(q.shape)
            dk[:, :, keys] += grad.transpose(-1, -2) @ _grouped(q, groups).to(wide)
        return dq, dk, dv

    def _scores(self, query, key, rows: slice, causal: bool, mask: Tensor | None, scale: float):
        """Return capped and masked scores [C, G, H/G, q, k], and the derivative of capped by plain scores, if any."""
        wide, groups, slope = torch.promote_types(query.dtype, torch.float32), key.shape[1], None
        scores = _grouped(query, groups).to(wide) @ key.to(wide).transpose(-1, -2)
        scores = scores.mul_(scale).unflatten(2, (-1, query.shape[2]))
        if self.cap is not None:
            tanh = scores.div_(self.cap).tanh_()
            slope = 1 - tanh.square()
            scores = tanh.mul_(self.cap)
        if mask is not None:
            scores += mask[:, :, rows, : key.shape[2]].unsqueeze(2)
        elif causal:
            number = torch.arange(key.shape[2], device=key.device)  # keys and queries are the same tokens
            hidden = number > torch.arange(rows.start, rows.start + query.shape[2], device=key.device)[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        return scores, slope


def _grouped(x: Float[Tensor, "C H Q D"], groups: int) -> Float[Tensor, "C groups H/groups*Q D"]:
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _row_blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield (queries, keys that they may see) in blocks small enough for `SCORES`."""
    pieces, heads, count, _ = query.shape
    most = SCORES.get(query.device.type, SCORES["cpu"])
    step = max(1, most // max(1, pieces * heads * key.shape[2]))
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield slice(start, stop), slice(0, stop if causal else key.shape[2])


def kernel_of(query: Tensor, value: Tensor, spec: AttentionSpec) -> Kernel:
    """The stock kernels on a CPU, matrix products elsewhere and for scores with a cap."""
    return StockKernel() if query.device.type == "cpu" and spec.softcap is None else PlainKernel(spec.softcap)


# ---- a forest


@dataclass(frozen=True, slots=True)
class _BatchTensors:
    """A batch of the schedule as tensors: the source of every slot and the target of every filled query slot."""

    query_index: Rows
    key_index: Rows
    pieces: int
    filled_slots: Int64[Tensor, " filled"] | None
    """The slots that are not padding; None if none is padding."""
    filled_tokens: Rows
    """The token in each of these slots."""
    mask: Float[Tensor, "C 1 Q K"]


@dataclass(eq=False, slots=True)
class _Calls:
    """A schedule and its batches as tensors, shared by all layers with the same visible range."""

    schedule: Schedule
    tail: int | None
    """Number of path tokens put before the keys; None where the whole path is one more rectangle."""
    _batches: dict[tuple[torch.dtype, torch.device], list[_BatchTensors]] = field(default_factory=dict)

    def batches(self, like: Tensor) -> list[_BatchTensors]:
        """The batches' tensors, with masks in the dtype of `like`: made once for all layers and both directions."""
        key = like.dtype, like.device
        if key not in self._batches:
            self._batches[key] = [_to_tensors(batch, *key) for batch in self.schedule.batches]
        return self._batches[key]


class RectangleAttention(CachedAttention):
    """Tree attention for one forest, used by every layer of a run."""

    name = "rectangles"

    def __init__(
        self,
        forest: Forest,
        *,
        cache: KVCacheView | None = None,
        call_pairs: float | None = None,
        heads_times_size: int = 512,
        plain: bool = False,
        kernel_of: Callable[[Tensor, Tensor, AttentionSpec], Kernel] = kernel_of,
    ):
        """Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        call_pairs: cost of one more call in query-key pairs; None derives it from ``heads_times_size`` (H * D).
        plain: use matrix products alone.
        kernel_of: chooses the kernel by a layer's queries, values and specification.
        """
        if call_pairs is None:
            call_pairs = CALL_MICROSECONDS * PAIR_FLOPS_PER_MICROSECOND / (14.0 * heads_times_size)
        self.cache = cache
        self._forest, self._call_pairs = forest, call_pairs
        self._calls: dict[AttentionRange, _Calls] = {}
        self._kernel_of = (lambda query, value, spec: PlainKernel(spec.softcap)) if plain else kernel_of
        if plain:
            self.name = "matmul"

    @property
    def schedule(self) -> Schedule:
        """The calls of layers with full attention."""
        return self.calls(FULL).schedule

    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        return True

    def path_seen(self, spec: AttentionSpec) -> int:
        if self.cache is None:
            return 0
        tail = self.calls(spec.visible_range).tail
        return self.cache.path_tokens if tail is None else tail

    def forward(self, given: Inputs, scale: float, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        calls, kernel = self.calls(spec.visible_range), self._kernel_of(given.query, given.value, spec)
        keys = (given.key, given.value) if calls.tail is None else given.below_path()
        out, lse = _forward_calls(kernel, calls, given.query, *keys, scale)
        if calls.tail is None and given.path is not None:
            q, k, v = (heads_first(x) for x in (given.query, *given.path))
            piece, piece_lse = kernel.forward(q, k, v, False, None, scale)
            _merge(out, lse, heads_last(piece), heads_last(piece_lse))
        if given.sinks is not None:
            total = torch.logaddexp(lse, given.sinks.to(lse.dtype))  # a sink takes weight and adds no value
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        return out.to(given.query.dtype), lse

    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        calls, kernel = self.calls(spec.visible_range), self._kernel_of(given.query, given.value, spec)
        sinks = None if given.sinks is None else sink_gradient(given.sinks, grad_out, out, lse)
        keys = (given.key, given.value) if calls.tail is None else given.below_path()
        grads = _backward_calls(kernel, calls, (grad_out, given.query, *keys, out, lse), scale)
        if calls.tail is not None:
            return given.gradients(*grads, sinks)
        path = None
        if given.path is not None:
            dq, *path = _call_backward(kernel, (grad_out, given.query, *given.path, out, lse), False, scale)
            grads[0].add_(dq)
        return Inputs(*grads, sinks, None if path is None else (path[0], path[1]))

    def calls(self, visible_range: AttentionRange) -> _Calls:
        """The calls for layers with this visible range; made at first use."""
        if visible_range not in self._calls:
            forest, pairs = self._forest, self._call_pairs
            if visible_range == FULL:
                made = _Calls(make_schedule(forest, call_pairs=pairs), None)
            else:
                path = 0 if self.cache is None else self.cache.path_tokens
                made = _Calls(*local_schedule(forest, visible_range, path_tokens=path, call_pairs=pairs))
            self._calls[visible_range] = made
        return self._calls[visible_range]


def _to_tensors(batch: Batch, dtype: torch.dtype, device: torch.device) -> _BatchTensors:
    pieces, width = batch.query_index.shape
    filled = np.flatnonzero(np.arange(width) < batch.query_length[:, None])
    query_index = batch.query_index.reshape(-1)
    hidden = on_device(~batch.mask, device)
    mask = torch.zeros(batch.mask.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return _BatchTensors(
        query_index=rows_on(device, query_index),
        key_index=rows_on(device, batch.key_index.reshape(-1)),
        pieces=pieces,
        filled_slots=None if len(filled) == len(query_index) else on_device(filled, device),
        filled_tokens=rows_on(device, query_index[filled]),
        mask=mask.unsqueeze(1),
    )


def _gather(x: Float[Tensor, "N heads *rest"], index: Rows, pieces: int) -> Float[Tensor, "pieces heads _ *rest"]:
    return take_rows(x, index).view(pieces, -1, *x.shape[1:]).transpose(1, 2)


def _rows(
    x: Float[Tensor, "C heads slots *rest"], filled_slots: Int64[Tensor, " filled"] | None
) -> Float[Tensor, "_ heads *rest"]:
    x = x.transpose(1, 2).flatten(0, 1)
    return x if filled_slots is None else x.index_select(0, filled_slots)


def heads_first(x: Float[Tensor, "n heads D"]) -> Float[Tensor, "1 heads n D"]:
    return x.transpose(0, 1).unsqueeze(0)


def heads_last(x: Float[Tensor, "1 heads n *rest"]) -> Float[Tensor, "n heads *rest"]:
    return x.squeeze(0).transpose(0, 1)


def _forward_calls(
    kernel: Kernel,
    calls: _Calls,
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "K G D"],
    value: Float[Tensor, "K G V"],
    scale: float,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "N H"]]:
    """Compute output and log-sum-exp over the keys of a schedule."""
    schedule, wide = calls.schedule, torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((*query.shape[:2], value.shape[2]), dtype=wide)
    lse = query.new_empty(query.shape[:2], dtype=wide)
    # Every query is in one chain or in one tile, which write its row; rectangles merge further keys into it.
    for start, stop in schedule.chains:
        q, k, v = (heads_first(x[start:stop]) for x in (query, key, value))
        piece, piece_lse = kernel.forward(q, k, v, True, None, scale)
        out[start:stop] = heads_last(piece)
        lse[start:stop] = heads_last(piece_lse)
    for batch in calls.batches(query):
        q = _gather(query, batch.query_index, batch.pieces)
        k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
        piece, piece_lse = kernel.forward(q, k, v, False, batch.mask, scale)
        put_rows(out, batch.filled_tokens, _rows(piece, batch.filled_slots))
        put_rows(lse, batch.filled_tokens, _rows(piece_lse, batch.filled_slots))
    for q0, q1, k0, k1 in schedule.rectangles:
        q, k, v = (heads_first(x) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        piece, piece_lse = kernel.forward(q, k, v, False, None, scale)
        _merge(out[q0:q1], lse[q0:q1], heads_last(piece), heads_last(piece_lse))
    return out, lse


def _backward_calls(
    kernel: Kernel, calls: _Calls, tensors: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query [N, H, D], key [K, G, D] and value [K, G, V], in the wide dtype."""
    grad_out, query, key, value, out, lse = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = query.new_empty(query.shape, dtype=wide)
    grad_key, grad_value = (x.new_zeros(x.shape, dtype=wide) for x in (key, value))
    # The output and log-sum-exp over all keys give a call the weights that its keys have among all, so each call's
    # gradients are a part of the sum, and its own output need not be kept.
    for start, stop in calls.schedule.chains:
        dq, dk, dv = _piece_backward(kernel, tensors, slice(start, stop), slice(start, stop), True, scale)
        grad_query[start:stop] = dq
        grad_key[start:stop] += dk
        grad_value[start:stop] += dv
    for batch in calls.batches(query):
        do, q, o = (_gather(x, batch.query_index, batch.pieces) for x in (grad_out, query, out))
        k, v = (_gather(x, batch.key_index, batch.pieces) for x in (key, value))
        piece_lse = _gather(lse, batch.query_index, batch.pieces)
        if batch.filled_slots is not None:  # a padded slot repeats some token, which would count again
            do = _without_padding(do, batch.filled_slots)
        dq, dk, dv = kernel.backward(do, q, k, v, o, piece_lse, False, batch.mask, scale)
        put_rows(grad_query, batch.filled_tokens, _rows(dq, batch.filled_slots))
        add_rows(grad_key, batch.key_index, _rows(dk, None))
        add_rows(grad_value, batch.key_index, _rows(dv, None))
    for q0, q1, k0, k1 in calls.schedule.rectangles:
        dq, dk, dv = _piece_backward(kernel, tensors, slice(q0, q1), slice(k0, k1), False, scale)
        grad_query[q0:q1] += dq
        grad_key[k0:k1] += dk
        grad_value[k0:k1] += dv
    return grad_query, grad_key, grad_value


def _piece_backward(kernel: Kernel, tensors, queries: slice, keys: slice, causal: bool, scale: float):
    """Run `_call_backward` for some queries against some keys."""
    grad_out, query, key, value, out, lse = tensors
    pieces = grad_out[queries], query[queries], key[keys], value[keys], out[queries], lse[queries]
    return _call_backward(kernel, pieces, causal, scale)


def _call_backward(kernel: Kernel, tensors: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Compute the gradients [n, heads, size] of one unbatched call from the global output and log-sum-exp."""
    do, q, k, v, o = (heads_first(x) for x in tensors[:5])
    grads = kernel.backward(do, q, k, v, o, tensors[5].t().unsqueeze(0), causal, None, scale)
    return tuple(heads_last(grad) for grad in grads)


def _without_padding(
    grad_out: Float[Tensor, "C H Q V"], filled_slots: Int64[Tensor, " filled"]
) -> Float[Tensor, "C H Q V"]:
    """Zero the output gradient of padded query slots, so that they add nothing to any key's gradient."""
    pieces, _, slots, _ = grad_out.shape
    keep = grad_out.new_zeros(pieces * slots)
    keep[filled_slots] = 1.0
    return grad_out * keep.view(pieces, 1, slots, 1)


def _merge(
    out: Float[Tensor, "n H V"],
    lse: Float[Tensor, "n H"],
    piece: Float[Tensor, "n H V"],
    piece_lse: Float[Tensor, "n H"],
) -> None:
    """Merge attention over further keys into ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, piece_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(piece.to(out.dtype), (piece_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
