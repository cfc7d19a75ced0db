"""Tree attention with FlexAttention: the GPU path. Its forward also runs on the CPU, where it is tested.

The block mask is made from the subtree ends alone: for a block of keys only the least and the greatest end decide
whether a later block of queries sees all of it, some of it or none. Nothing of size N x N is built. Windows and chunks
bound that by the depths of the tokens, again block by block; caps and sinks go by way of scores and log-sum-exps.

A mask rule reads nothing but tensors: a length or an offset that it held as a number would be compiled in, and every
length would be compiled anew.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from treetrain.attention.carry import CarryView, carried_keys
from treetrain.attention.sight import PLAIN, Ask
from treetrain.tree.attention_range import FULL, AttentionRange

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
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=block, mask_mod=_rule(ends, block), seq_lengths=(n, n)
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
        mask_mod=_rule(everywhere, block, path),
        seq_lengths=(n, path + n),
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [A, B] -> (count [1, 1, A], chosen column numbers first [1, 1, A, B]) as int32; A and B are at least 2.

    Lists of one would be compiled apart. Nobody looks at a block behind the last token, and it is in no list.
    """
    rows, columns = (max(2 - size, 0) for size in chosen.shape)
    if rows or columns:
        chosen = torch.nn.functional.pad(chosen, (0, columns, 0, rows))
    count = chosen.sum(1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]


def _rule(ends: Tensor, block: int, path: int = 0):
    ends, offset = _filled(ends, block), torch.full((), path, device=ends.device)

    def rule(_batch, _head, query, key):
        return (key <= query + offset) & (query + offset < ends[key])

    return rule


def _filled(values: Tensor, block: int) -> Tensor:
    """With zeros up to whole blocks: a rule is also asked about places past the end, in the last block."""
    return torch.nn.functional.pad(values, (0, -len(values) % block))


def local_block_mask(
    ends: Tensor, depth: Tensor, sight: AttentionRange, block: int = BLOCK, path: int = 0
) -> BlockMask:
    """The block mask of tokens that see their nearest ancestors only.

    Args:
        ends, path: see `block_mask`. The roots lie at depth `path`.
        depth: int64 [N], the place of every token on its path.
    """
    wide = block_mask(ends, block, path)
    n, device = len(ends), ends.device
    depths = torch.cat([torch.arange(path, device=device), depth])
    lowest = sight.lowest(depth)
    low_least, low_most = _block_bounds(lowest, block)
    key_least, key_most = _block_bounds(depths, block)
    reached = key_most[None, :] >= low_least[:, None]
    inside = key_least[None, :] >= low_most[:, None]
    partial = _chosen(wide.kv_num_blocks, wide.kv_indices, reached)
    assert wide.full_kv_num_blocks is not None and wide.full_kv_indices is not None
    full = _chosen(wide.full_kv_num_blocks, wide.full_kv_indices, reached)
    key_depth, query_lowest, wide_rule = _filled(depths, block), _filled(lowest, block), wide.mask_mod

    def rule(batch, head, query, key):
        return wide_rule(batch, head, query, key) & (key_depth[key] >= query_lowest[query])

    return BlockMask.from_kv_blocks(
        *_ordered((partial | full & ~inside) & reached),
        *_ordered(full & inside),
        BLOCK_SIZE=block,
        mask_mod=rule,
        seq_lengths=(n, path + n),
    )


def _block_bounds(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of every block, [B] each."""
    filled = -(-len(values) // block) * block
    by_block = torch.cat([values, values[-1:].expand(filled - len(values))]).view(-1, block)
    return by_block.amin(1), by_block.amax(1)


def _chosen(count: Tensor, order: Tensor, like: Tensor) -> Tensor:
    """What `_ordered` was given, of the shape of `like`."""
    among_first = torch.arange(order.shape[-1], device=order.device) < count[0, 0, :, None]
    found = torch.zeros_like(among_first).scatter_(1, order[0, 0].long(), among_first)
    return found[: like.shape[0], : like.shape[1]]


@functools.cache
def _capped(cap: float):
    """One function for each cap, so that one is compiled."""

    def score(score, _batch, _head, _query, _key):
        return cap * torch.tanh(score / cap)

    return score


COMPILATIONS = 64
"""At most. Lengths do not count; asks, sinks, heads, dtypes, with or without graph do, and PyTorch's own bound is met
by a model of two kinds of layers: behind it FlexAttention would run uncompiled, with all scores in memory."""


@functools.cache
def _compiled():
    call = torch.compile(flex_attention, dynamic=True)

    def attend(*args, **options):
        with _tracing():
            return call(*args, **options)

    return attend


@contextmanager
def _tracing() -> Iterator[None]:
    """How FlexAttention is traced.

    A cap is a number that a score function holds: the tracer would take it for a variable, and refuse it. And it would
    take lengths that are equal in the first call for the same length, and trace anew when they differ.
    """
    with (
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS, specialize_float=True),
        symbolic_shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield


def kernel_options(dtype: torch.dtype, size: int, kernels: str | None = None) -> dict[str, object]:
    """Which of FlexAttention's kernels runs on a GPU, and in which blocks where its own would not do.

    FlexAttention's own choice for float32, and for heads of more than 128 entries but 256, asks for more shared memory
    than a multiprocessor has, or spills most of what it computes: so the compiler's report for sm_90 says.

    Args:
        size: of a head, the larger of query's and value's.
        kernels: what FlexAttention calls its backend; None is its Triton kernels for any length. By itself it takes
            those for decoding below 128 queries, and cannot cut them up where a group has several query heads.
    """
    options: dict[str, object] = {"BACKEND": kernels or "TRITON"}
    if options["BACKEND"] != "TRITON":
        return options
    if dtype == torch.float32:
        queries, keys, stages = (64, 32, 2) if size <= 64 else (32, 32, 2) if size <= 128 else (32, 16, 1)
        options |= _forward_blocks(queries, keys, stages, warps=8)
        return options | ({"bwd_num_warps": 8} if size > 64 else {})
    if size > 256:
        return options | _forward_blocks(64, 16, 3, warps=8)
    if 128 < size < 256:
        options |= _forward_blocks(64, 32, 3, warps=4)  # those of 256, which heads are filled up to
    return options | ({"bwd_num_warps": 8} if size > 128 else {})


def _forward_blocks(queries: int, keys: int, stages: int, *, warps: int) -> dict[str, object]:
    return {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_stages": stages, "fwd_num_warps": warps}


class FlexTreeAttention:
    """Tree attention for one forest, used by every layer of a run."""

    def __init__(
        self,
        ends: Tensor,
        carry: CarryView | None = None,
        depth: Tensor | None = None,
        *,
        deepest: int | None = None,
        kernels: str | None = None,
    ):
        """Args:
        ends: int64 [N], subtree ends.
        carry: the path above, and where own keys are handed on.
        depth: int64 [N], places on the path; needed where layers see their nearest ancestors only.
        deepest: the greatest of them, where the host knows it: asking the device would wait for it.
        kernels: what FlexAttention calls its backend, "TRITON" or "FLASH"; None leaves it the choice.
        """
        self.name = "flex-flash" if kernels == "FLASH" else "flex"
        self.carry = carry
        self._ends, self._depth, self._deepest = ends, depth, deepest
        self._kernels = kernels
        self._masks: dict[AttentionRange, BlockMask] = {}
        self._attend = _compiled() if ends.device.type == "cuda" else flex_attention

    def mask(self, sight: AttentionRange) -> BlockMask:
        """Of layers that see so far; made at first use."""
        if sight not in self._masks:
            path = 0 if self.carry is None else self.carry.path_tokens
            if sight == FULL:
                self._masks[sight] = block_mask(self._ends, path=path)
            else:
                assert self._depth is not None
                if self._deepest is None:
                    self._deepest = int(self._depth.max())
                # The deepest token is the first that does not see to the top.
                beyond = int(sight.lowest(np.int64(self._deepest))) > 0
                self._masks[sight] = (
                    local_block_mask(self._ends, self._depth, sight, path=path) if beyond else self.mask(FULL)
                )
        return self._masks[sight]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        layer: int = 0,
        ask: Ask = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Args: query [N, H, D], key [N, G, D], value [N, G, V], sinks [H] (logits). Returns [N, H, V]."""
        if self.carry is not None:
            key, value = carried_keys(key, value, self.carry, layer)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        options = {"block_mask": self.mask(ask.sight), "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        options["kernel_options"] = kernel_options(q.dtype, max(q.shape[3], v.shape[3]), self._kernels)
        if ask.softcap is not None:
            options["score_mod"] = _capped(ask.softcap)
        if sinks is None:
            out = self._attend(q, k, v, **options)
        else:
            out, aux = self._attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
            assert aux.lse is not None
            # A sink is a key without value: it takes its share of the softmax and gives nothing.
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
            out = (out * share.unsqueeze(-1)).to(query.dtype)
        return out.squeeze(0).transpose(0, 1)  # type: ignore[union-attr]
