"""Tree attention with FlexAttention: the GPU path. Its forward also runs on the CPU, where it is tested.

The block mask is made from the subtree ends alone: for a block of keys only the least and the greatest end decide
whether a later block of queries sees all of it, some of it or none. Nothing of size N x N is built.
"""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from treetrain.attention.carry import CarryView, carried_keys

BLOCK = 128
"""Tokens in a block of queries or keys, FlexAttention's default."""


def block_mask(ends: Tensor, block: int = BLOCK, path: int = 0) -> BlockMask:
    """The block mask of the interval rule.

    Args:
        ends: int64 [N], the exclusive end of every token's subtree in pre-order.
        path: tokens before the first, all of which every token sees; they are keys 0 to path - 1.
    """
    if path:
        return _block_mask_after_path(ends, block, path)
    n, device = len(ends), ends.device
    blocks = -(-n // block)
    starts = torch.arange(blocks, device=device) * block
    stops = (starts + block).clamp(max=n)
    by_block = torch.nn.functional.pad(ends, (0, blocks * block - n)).view(blocks, block)
    furthest = by_block.amax(1)
    padding = torch.arange(blocks * block, device=device).view(blocks, block) >= n
    nearest = by_block.masked_fill(padding, n).amin(1)
    before = starts[None, :] < starts[:, None]
    diagonal = starts[None, :] == starts[:, None]
    # Key block before the query block: seen in full when every subtree in it outlasts the queries, and at all when
    # one reaches them (that one's token is then seen by the first query).
    full = before & (nearest[None, :] >= stops[:, None])
    partial = (before & (furthest[None, :] > starts[:, None]) & ~full) | diagonal
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=block, mask_mod=_rule(ends), seq_lengths=(n, n)
    )


def _block_mask_after_path(ends: Tensor, block: int, path: int) -> BlockMask:
    """Queries are tokens path to path + N - 1 of a forest whose first `path` tokens are one chain above all."""
    n, device = len(ends), ends.device
    chain = torch.full((path,), path + n, dtype=ends.dtype, device=device)
    everywhere = torch.cat([chain, ends + path])
    query_blocks, key_blocks = -(-n // block), -(-(path + n) // block)
    first_query = torch.arange(query_blocks, device=device) * block + path
    last_query = (first_query + block).clamp(max=path + n)
    first_key = torch.arange(key_blocks, device=device) * block
    last_key = (first_key + block).clamp(max=path + n)
    by_block = torch.nn.functional.pad(everywhere, (0, key_blocks * block - path - n)).view(key_blocks, block)
    padding = (torch.arange(key_blocks * block, device=device) >= path + n).view(key_blocks, block)
    furthest, nearest = by_block.amax(1), by_block.masked_fill(padding, path + n).amin(1)
    before = last_key[None, :] <= first_query[:, None]
    full = before & (nearest[None, :] >= last_query[:, None])
    # A block of keys that reaches into the queries' own range is looked at token by token.
    overlaps = ~before & (first_key[None, :] < last_query[:, None])
    partial = (before & (furthest[None, :] > first_query[:, None]) & ~full) | overlaps
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=block,
        mask_mod=_rule(everywhere, path),
        seq_lengths=(n, path + n),
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, B] -> (count [1, 1, B], chosen column numbers first [1, 1, B, B]) as int32."""
    count = chosen.sum(1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]


def _rule(ends: Tensor, path: int = 0):
    last = len(ends) - 1

    def rule(_batch, _head, query, key):
        # Indices past the end occur in the last, partly filled block.
        return (key <= query + path) & (query + path < ends[key.clamp(max=last)])

    return rule


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True)


class FlexTreeAttention:
    """Tree attention for one forest, used by every layer of a run."""

    name = "flex"

    def __init__(self, ends: Tensor, carry: CarryView | None = None):
        self.carry = carry
        self.mask = block_mask(ends, path=0 if carry is None else carry.path_tokens)
        self._attend = _compiled() if ends.device.type == "cuda" else flex_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int = 0) -> Tensor:
        """Args: query [N, H, D], key and value [N, G, D]. Returns [N, H, D]."""
        if self.carry is not None:
            key, value = carried_keys(key, value, self.carry, layer)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = self._attend(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.squeeze(0).transpose(0, 1)  # type: ignore[union-attr]
