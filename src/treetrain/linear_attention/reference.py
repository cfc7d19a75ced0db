"""The specification of recurrence on a tree: token by token, each from its parent's state. Slow and obvious."""

import torch
from torch import Tensor

from treetrain.tree.assemble import Int64s


def reference_convolution(inputs: Tensor, weight: Tensor, parent: Int64s) -> Tensor:
    """Causal depthwise convolution along paths: inputs [N, D], weight [D, K], parents (-1 at roots) -> [N, D]."""
    rows = []
    for token in range(len(parent)):
        total, at = torch.zeros_like(inputs[0]), token
        for tap in range(weight.shape[1] - 1, -1, -1):
            if at >= 0:
                total = total + weight[:, tap] * inputs[at]
                at = int(parent[at])
        rows.append(total)
    return torch.stack(rows)


def reference_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, parent: Int64s, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule along paths.

    Args:
        query, key: [N, J, K]; value: [N, H, V]; decay, beta: [N, H].
        parent: int64 [N], -1 at roots.
        state: [H, K, V], the state that the roots start from.

    Returns:
        [N, H, V], and the state after every token [N, H, K, V].
    """
    repeat = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeat, 1) for x in (query, key))
    query, key = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    states: list[Tensor] = []
    outs = []
    for token, before in enumerate(parent.tolist()):
        s = (state if before < 0 else states[before]) * decay[token].exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", key[token], s)
        s = s + torch.einsum("hk,hv->hkv", key[token], beta[token][:, None] * (value[token] - held))
        states.append(s)
        outs.append(torch.einsum("hk,hkv->hv", query[token], s) / key.shape[-1] ** 0.5)
    return torch.stack(outs), torch.stack(states)
