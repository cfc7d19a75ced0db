"""Causal depthwise convolution along the paths of a forest.

`extended` [K - 1 + N, D] holds the last K - 1 inputs of the path above the forest (zeros before a root), then the
forest's own inputs in pre-order.

Shape letters: N tokens, D channels, K taps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.device_arrays import on_device
from treetrain.tree.assemble import Int64s


@dataclass(frozen=True, slots=True)
class Taps:
    """The positions of a convolution's taps."""

    width: int
    """K."""
    elsewhere: Tensor | None
    """int64 [b]: tokens whose last K - 1 inputs are not the ones right before them in pre-order; None if b = 0."""
    index: Tensor
    """int64 [b, K]: the indices of these tokens' taps in `extended`, oldest first."""
    tails: Tensor
    """int64 [x, K - 1]: for every exported token, the indices of the last inputs that its child tokens need."""


def make_taps(parent: Int64s, exported: Int64s, width: int, device: torch.device) -> Taps:
    """The taps of a forest.

    Args:
        parent: int64 [N], -1 at roots.
        exported: int64 [x].
        width: K.
    """
    count, before = len(parent), width - 1
    # For every index of `extended`, the index before it on its path; index 0 stands for everything earlier.
    back = np.concatenate([np.arange(-1, before - 1), np.where(parent >= 0, parent + before, before - 1)])
    back[:1] = 0
    places = np.empty((count, width), np.int64)
    places[:, -1] = np.arange(count) + before
    for tap in range(width - 2, -1, -1):
        places[:, tap] = back[places[:, tap + 1]]
    apart = np.flatnonzero((places != np.arange(count)[:, None] + np.arange(width)).any(1))
    return Taps(
        width=width,
        elsewhere=on_device(apart, device) if len(apart) else None,
        index=on_device(places[apart], device),
        tails=on_device(places[exported, 1:], device),
    )


def convolve(extended: Tensor, weight: Tensor, taps: Taps) -> Tensor:
    """[K - 1 + N, D] inputs and a weight [D, K] -> [N, D], computed and returned in at least float32."""
    return _Convolve.apply(extended, weight, taps)  # type: ignore[return-value]


class _Convolve(torch.autograd.Function):
    """Multiplies shifted inputs by each tap; gathers the inputs of the few tokens right after a fork."""

    @staticmethod
    def forward(ctx, extended: Tensor, weight: Tensor, taps: Taps):
        ctx.save_for_backward(extended, weight)
        ctx.taps = taps
        source, factor = _wide(extended), _wide(weight)
        count = len(extended) - taps.width + 1
        out = source[:count] * factor[:, 0]
        for tap in range(1, taps.width):
            out.addcmul_(source[tap : tap + count], factor[:, tap])
        if taps.elsewhere is not None:
            out.index_copy_(0, taps.elsewhere, (source[taps.index] * factor.t()).sum(1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        extended, weight = ctx.saved_tensors
        taps: Taps = ctx.taps
        source, factor, count = _wide(extended), _wide(weight), len(grad)
        behind = None
        if taps.elsewhere is not None:
            behind = grad.index_select(0, taps.elsewhere)
            grad = grad.index_fill(0, taps.elsewhere, 0.0)
        grad_source, grad_factor = torch.zeros_like(source), torch.empty_like(factor)
        for tap in range(taps.width):
            grad_source[tap : tap + count].addcmul_(grad, factor[:, tap])
            grad_factor[:, tap] = (grad * source[tap : tap + count]).sum(0)
        if behind is not None:
            places = taps.index.flatten()
            grad_source.index_add_(0, places, (behind[:, None] * factor.t()).flatten(0, 1))
            grad_factor += (behind[:, None] * source[taps.index]).sum(0).t()
        return grad_source.to(extended.dtype), grad_factor.to(weight.dtype), None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
