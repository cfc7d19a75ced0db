"""The specification of tree attention: a dense mask from the interval rule. Slow and obvious; only tests import it.

Shape letters used in this folder: N tokens, H query heads, G key/value heads (H is a multiple of G), D size of query
and key heads, V size of value heads (usually D).
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def visible(
    ends: Int64[Tensor, " N"],
    depth: Int64[Tensor, " N"] | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Bool[Tensor, "N N"]:
    """The mask: query i (row) sees key j (column) iff ``j <= i < ends[j]``.

    Args:
        ends: the exclusive end of every token's subtree in pre-order.
        depth: the position of every token on its path; needed for a window or chunks.
        window: a query sees only keys less than this many steps above it.
        chunk: chunk length; a query sees only keys whose depths are in its own chunk, counted from depth 0.
    """
    index = torch.arange(len(ends), device=ends.device)
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
    if window is not None:
        assert depth is not None
        seen &= depth[:, None] - depth[None, :] < window
    if chunk is not None:
        assert depth is not None
        seen &= depth[:, None] // chunk == depth[None, :] // chunk
    return seen


def reference_attention(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N G D"],
    value: Float[Tensor, "N G V"],
    ends: Int64[Tensor, " N"],
    scale: float,
    *,
    depth: Int64[Tensor, " N"] | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "N H V"]:
    """Softmax attention under the interval mask.

    Args:
        query, key, value: all of one dtype.
        ends: subtree ends in pre-order.
        scale: factor on the scores, usually ``D ** -0.5``.
        depth, window, chunk: see `visible`.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: logits, one per head, of an extra key without a value.

    Returns:
        In the dtype of ``query``, computed in at least float32.
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(groups, dim=1).to(wide)
    value = value.repeat_interleave(groups, dim=1).to(wide)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(ends, depth, window, chunk), float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
