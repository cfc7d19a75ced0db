"""CPU attention kernels: one block of queries against one block of keys, returning output and log-sum-exp.

Every backward takes the output and log-sum-exp over *all* keys of its queries. So each block's gradients are exact
although blocks are merged by log-sum-exp.

Shape letters: C pieces of equal shape, H query heads, G key/value heads, Q queries, K keys, D size of query and key
heads, V size of value heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CAPPED_SCORES = 1 << 21
"""Most scores that the capped kernel holds at once, over all heads."""


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
        query, key, value = _filled(max(size, value_size), query, key, value)
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return out[..., :value_size], lse

    def backward(self, grad_out, query, key, value, out, lse, causal, mask, scale) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; `out` and `lse` are those over all keys."""
        size, value_size = query.shape[-1], value.shape[-1]
        if size != value_size:
            tensors = grad_out, query, key, value, out
            grad_out, query, key, value, out = _filled(max(size, value_size), *tensors)
        dq, dk, dv = _flash_backward(grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq[..., :size], dk[..., :size], dv[..., :value_size]


def _filled(size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(pad(t, (0, size - t.shape[-1])) for t in tensors)


@dataclass(frozen=True, slots=True)
class CappedKernel:
    """Attention with scores cap * tanh(score / cap), which no stock CPU kernel has; a few rows of queries at a time."""

    cap: float

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
            delta = (do * out[:, :, rows]).sum(-1, keepdim=True)
            do, delta = _grouped(do, groups), _grouped(delta, groups)
            dv[:, :, keys] += weights.transpose(-1, -2) @ do
            grad = (do @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(slope.flatten(2, 3)).mul_(scale)
            dq[:, :, rows] = (grad @ k.to(wide)).view(q.shape)
            dk[:, :, keys] += grad.transpose(-1, -2) @ _grouped(q, groups).to(wide)
        return dq, dk, dv

    def _scores(self, query, key, rows: slice, causal: bool, mask: Tensor | None, scale: float):
        """Capped and masked scores [C, G, H/G, q, k], and the derivative of the capped by the plain scores."""
        wide, groups = torch.promote_types(query.dtype, torch.float32), key.shape[1]
        plain = _grouped(query, groups).to(wide) @ key.to(wide).transpose(-1, -2)
        tanh = plain.mul_(scale / self.cap).tanh_().unflatten(2, (-1, query.shape[2]))
        slope = 1 - tanh.square()
        scores = tanh.mul_(self.cap)
        if mask is not None:
            scores += mask[:, :, rows, : key.shape[2]].unsqueeze(2)
        elif causal:
            number = torch.arange(key.shape[2])
            hidden = number > torch.arange(rows.start, rows.start + query.shape[2])[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        return scores, slope


Kernel = StockKernel | CappedKernel


def _grouped(x: Float[Tensor, "C H Q D"], groups: int) -> Float[Tensor, "C groups H/groups*Q D"]:
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _row_blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield (queries, keys that they may see) in blocks small enough for ``CAPPED_SCORES``."""
    pieces, heads, count, _ = query.shape
    step = max(1, CAPPED_SCORES // max(1, pieces * heads * key.shape[2]))
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield slice(start, stop), slice(0, stop if causal else key.shape[2])


def sink_gradient(
    sinks: Float[Tensor, "H"],
    grad_out: Float[Tensor, "N H V"],
    out: Float[Tensor, "N H V"],
    lse: Float[Tensor, "N H"],
) -> Float[Tensor, "H"]:
    """Gradient of the sinks: a sink takes the weight exp(sink - lse) and has no value."""
    wide = lse.dtype
    share = (sinks.to(wide) - lse).exp_()
    return -(share * (grad_out.to(wide) * out).sum(-1)).sum(0).to(sinks.dtype)
