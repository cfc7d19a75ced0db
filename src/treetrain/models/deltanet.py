"""Gated DeltaNet layers on a tree: the layer's own modules around a convolution and a rule that follow the paths.

Gated short convolutions (LFM2) are the same without the rule.

Projections, gate, norm and output are called as the layer calls them, so that adapters and hooks on them work; only
what mixes tokens is ours. Three ways of projecting are known (Qwen3-Next, Qwen3.5, OLMo hybrid).

Shape letters: N tokens, J key heads, H value heads, K and V sizes of keys and values.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from treetrain.linear_attention.paths import Paths


def fused_projections(layer: Any, hidden: Tensor, paths: Paths) -> Tensor:
    """Two projections, their outputs interleaved by key head (Qwen3-Next). [1, N, D] -> [1, N, D]."""
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, step = parts
    mixed = torch.cat([x.flatten(2) for x in (query, key, value)], -1)
    out = _rule(layer, mixed, beta.sigmoid(), step, paths)
    return layer.out_proj(_gated(layer.norm, out, gate, hidden))


def split_projections(layer: Any, hidden: Tensor, paths: Paths) -> Tensor:
    """Queries, keys and values by one projection, the rest by one each (Qwen3.5). [1, N, D] -> [1, N, D]."""
    mixed, gate = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
    beta, step = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    out = _rule(layer, mixed, beta.sigmoid(), step, paths)
    return layer.out_proj(_gated(layer.norm, out, gate, hidden))


def separate_projections(layer: Any, hidden: Tensor, paths: Paths) -> Tensor:
    """One projection for everything (OLMo hybrid), whose beta may go up to 2. [1, N, D] -> [1, N, D]."""
    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], -1)
    beta = layer.b_proj(hidden).sigmoid()
    beta = beta * 2.0 if layer.allow_neg_eigval else beta
    out = _rule(layer, mixed, beta, layer.a_proj(hidden), paths)
    return layer.o_proj(_gated(layer.o_norm, out, layer.g_proj(hidden), hidden))


def short_convolution(layer: Any, hidden: Tensor, paths: Paths) -> Tensor:
    """A convolution between two gates (LFM2). [1, N, D] -> [1, N, D]."""
    before, after, values = layer.in_proj(hidden).chunk(3, -1)
    gated = before * values
    out = paths.convolve(layer.layer_idx, gated[0], layer.conv.weight.squeeze(1))
    if layer.conv.bias is not None:
        out = out + layer.conv.bias
    return layer.out_proj(after * out.to(gated.dtype))


def _rule(layer: Any, mixed: Tensor, beta: Tensor, step: Tensor, paths: Paths) -> Tensor:
    """Convolution and rule. mixed [1, N, 2 J K + H V], beta and step [1, N, H] -> [N, H, V] in the dtype of `mixed`."""
    name, dtype = layer.layer_idx, mixed.dtype
    wide = torch.promote_types(dtype, torch.float32)
    conv = layer.conv1d
    smoothed = paths.convolve(name, mixed[0], conv.weight.squeeze(1))
    if conv.bias is not None:
        smoothed = smoothed + conv.bias
    smoothed = ACT2FN[layer.activation](smoothed).to(dtype)
    query, key, value = smoothed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    decay = -layer.A_log.to(wide).exp() * torch.nn.functional.softplus(step[0].to(wide) + layer.dt_bias)
    out = paths.gated_delta(
        name,
        query.unflatten(-1, (-1, layer.head_k_dim)),
        key.unflatten(-1, (-1, layer.head_k_dim)),
        value.unflatten(-1, (-1, layer.head_v_dim)),
        decay,
        beta[0],
    )
    return out.to(dtype)


def _gated(norm: Any, out: Tensor, gate: Tensor, hidden: Tensor) -> Tensor:
    """The gated norm of every head. out [N, H, V], gate [1, N, H, V] or [1, N, H V] -> [1, N, H V]."""
    size = out.shape[-1]
    return norm(out.reshape(-1, size), gate.reshape(-1, size)).reshape(*hidden.shape[:2], -1)
