"""Stock flash attention of a GPU for the rectangles of a schedule (`core/attention/rectangles.py`)."""

import numpy as np
import torch
from torch import Tensor

from treetrain.core.attention.rectangles import Kernel, PlainKernel, filled, heads_first, heads_last
from treetrain.core.attention.rectangles import kernel_of as stock_kernel_of
from treetrain.core.attention.schedule import AttentionSpec
from treetrain.core.device_arrays import to_device
from treetrain.kernels.varlen import DeviceCall, StockVarlen


def kernel_of(query: Tensor, value: Tensor, spec: AttentionSpec) -> Kernel:
    """The fastest kernel for a layer's device, dtype, head sizes and cap."""
    sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
    flash = query.device.type != "cpu" and sixteen_bits and max(query.shape[-1], value.shape[-1]) <= 256
    return FlashKernel() if flash and spec.softcap is None else stock_kernel_of(query, value, spec)


class FlashKernel:
    """Stock flash attention of a GPU for calls without a mask; matrix products for tiles."""

    def __init__(self):
        self._flash, self._plain = StockVarlen(), PlainKernel(None)

    def forward(self, query, key, value, causal, mask, scale):
        """See `StockKernel`; a call without a mask has one piece."""
        if mask is not None:
            return self._plain.forward(query, key, value, causal, mask, scale)
        size = value.shape[-1]
        q, k, v = (heads_last(x).contiguous() for x in filled(_multiple_of_8(query, value), query, key, value))
        out, lse = self._flash.forward(q, k, v, _one_piece(query, key, causal), scale)
        return heads_first(out[..., :size]), lse.unsqueeze(0)

    def backward(self, grad_out, query, key, value, out, lse, causal, mask, scale):
        """See `StockKernel`."""
        if mask is not None:
            return self._plain.backward(grad_out, query, key, value, out, lse, causal, mask, scale)
        tensors = filled(_multiple_of_8(query, value), grad_out, query, key, value, out.to(query.dtype))
        do, q, k, v, o = (heads_last(x).contiguous() for x in tensors)
        call = _one_piece(query, key, causal)
        grads = self._flash.backward(do, q, k, v, o, lse.squeeze(0).contiguous(), call, scale)
        return tuple(heads_first(x[..., : like.shape[-1]]) for x, like in zip(grads, (query, key, value)))


def _multiple_of_8(query: Tensor, value: Tensor) -> int:
    """Round a head size up to one that stock flash attention takes."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _one_piece(query: Tensor, key: Tensor, causal: bool) -> DeviceCall:
    """Make one call of all queries [1, H, Q, D] against all keys."""
    queries, keys = query.shape[2], key.shape[2]
    query_offsets, key_offsets = to_device([np.array([0, n], np.int32) for n in (queries, keys)], query.device)
    return DeviceCall(slice(0, queries), slice(0, keys), query_offsets, key_offsets, (queries, keys), causal)
