"""The specification of tree attention: a dense mask from the interval rule. Slow, obvious, never imported elsewhere.

Shape letters used in this folder: N tokens, H query heads, G key/value heads (H is a multiple of G), D head size.
"""

import torch
from torch import Tensor


def visible(ends: Tensor) -> Tensor:
    """Which key each query sees, [N, N] bool (rows are queries): key j iff ``j <= i < ends[j]``.

    Args:
        ends: int64 [N], the exclusive end of every token's subtree in pre-order.
    """
    index = torch.arange(len(ends), device=ends.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])


def reference_attention(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Softmax attention under the interval mask.

    Args:
        query: [N, H, D]; key, value: [N, G, D]; all of one dtype.
        ends: int64 [N], subtree ends in pre-order.
        scale: factor on the scores, usually ``D ** -0.5``.

    Returns:
        [N, H, D] in the dtype of ``query``, computed in at least float32.
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(groups, dim=1).to(wide)
    value = value.repeat_interleave(groups, dim=1).to(wide)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * scale
    scores = scores.masked_fill(~visible(ends), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value).to(query.dtype)
