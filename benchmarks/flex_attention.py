"""Tree attention with FlexAttention, for comparison with the library's backends: importing it adds "flex" to them.

The block mask is made on the host from the same tile lists (`tile_lists.py`) that the Triton kernels read. Nothing of
size N x N is built. Caps are a ``score_mod``; sinks rescale the output, using the log-sum-exp of its scores.

The ``mask_mod`` reads only tensors: a length or an offset held as a Python number would be compiled in, and every new
length would recompile. Gradients of a path's keys are rounded to the keys' dtype once per part, so a tree in several
parts is less exact than with the library's backends.

Shape letters: N tokens, P tokens on the path above them, H query heads, G key/value heads, D size of query and key
heads, V size of value heads.
"""

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from treetrain.device_arrays import on_device
from treetrain.softmax_attention.attention import BACKENDS
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.tile_lists import TILE, Keys, keys_of, make_tile_lists
from treetrain.tree.layout import FULL, AttentionRange, ranges

BLOCK = TILE
"""Tokens in a block of queries or keys, FlexAttention's default."""


def block_mask(keys: Keys, device: torch.device, block: int = BLOCK) -> BlockMask:
    """The block mask of a forest, from the pairs of blocks that `make_tile_lists` lists."""
    total, path = len(keys.ends), keys.path
    lists = make_tile_lists(keys, block).by_query
    # A dimension of size 1 would be compiled separately, so there are at least two blocks; the added ones stay empty.
    shape = tuple(max(-(-size // block), 2) for size in (total - path, total))
    begin, middle, stop = lists.bounds.T
    return BlockMask.from_kv_blocks(
        *_indices(lists.tiles, middle, stop, shape, device),
        *_indices(lists.tiles, begin, middle, shape, device),
        BLOCK_SIZE=block,
        mask_mod=_rule(keys, block, device),
        seq_lengths=(total - path, total),
    )


def _indices(
    tiles: np.ndarray, begin: np.ndarray, stop: np.ndarray, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The number of blocks in each of A rows, int32 [1, 1, A], and their indices, int32 [1, 1, A, B], zero-padded."""
    count, index = np.zeros(shape[0], np.int32), np.zeros(shape, np.int32)
    lengths = (stop - begin).astype(np.int64)
    count[: len(lengths)] = lengths
    rows, columns = np.repeat(np.arange(len(lengths)), lengths), ranges(np.zeros_like(lengths), lengths)
    index[rows, columns] = tiles[ranges(begin.astype(np.int64), lengths)]
    return on_device(count, device)[None, None], on_device(index, device)[None, None]


def _rule(keys: Keys, block: int, device: torch.device):
    """The ``mask_mod``: whether a query sees a key."""

    def filled(values: np.ndarray) -> Tensor:
        # Pad to whole blocks: the rule is also called for positions past the end, in the last block.
        return on_device(np.pad(values, (0, -len(values) % block)), device)

    ends, offset = filled(keys.ends), on_device(np.array(keys.path, np.int32), device)

    def inside(_batch, _head, query, key):
        return (key <= query + offset) & (query + offset < ends[key])

    if keys.depth is None or keys.lowest is None:
        return inside
    depth, lowest = filled(keys.depth), filled(keys.lowest)

    def near(batch, head, query, key):
        return inside(batch, head, query, key) & (depth[key] >= lowest[query])

    return near


@functools.cache
def _capped(cap: float):
    """The ``score_mod`` of a cap, cached so that each cap is compiled once."""

    def score(score, _batch, _head, _query, _key):
        return cap * torch.tanh(score / cap)

    return score


COMPILATIONS = 64
"""Recompilation limit. Specs, sinks, heads, dtypes and grad mode each recompile; lengths do not. A model with two kinds
of layers reaches PyTorch's default limit. Beyond the limit, `fullgraph` raises an error; without it, the call would run
uncompiled, with all scores in memory."""


@functools.cache
def _compiled():
    call = torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def attend(*args, **options):
        with _tracing():
            return call(*args, **options)

    return attend


@contextmanager
def _tracing() -> Iterator[None]:
    """Set the tracing options that FlexAttention needs.

    By default the tracer makes the cap, a float in the closure of ``score_mod``, a symbol, which FlexAttention rejects.
    It also assumes that lengths equal in the first call are always equal, and recompiles when they differ.
    """
    with (
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS, specialize_float=True),
        symbolic_shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield


def kernel_options(dtype: torch.dtype, size: int) -> dict[str, object]:
    """FlexAttention's kernel options on a GPU: its Triton kernels, and block sizes where its defaults do not work.

    Below 128 queries FlexAttention would choose its decoding kernels, which cannot split the queries if several query
    heads share a key head.

    For float32, and for head sizes above 128 other than 256, the default block sizes need more shared memory than a
    multiprocessor has, or spill most registers, according to the compiler's report for sm_90.

    Args:
        size: head size, the larger of query's and value's.
    """
    options: dict[str, object] = {"BACKEND": "TRITON"}
    if dtype == torch.float32:
        queries, keys, stages = (64, 32, 2) if size <= 64 else (32, 32, 2) if size <= 128 else (32, 16, 1)
        options |= _forward_blocks(queries, keys, stages, warps=8)
        return options | ({"bwd_num_warps": 8} if size > 64 else {})
    if size > 256:
        return options | _forward_blocks(64, 16, 3, warps=8)
    if 128 < size < 256:
        options |= _forward_blocks(64, 32, 3, warps=4)  # the blocks of 256, to which these heads are padded
    return options | ({"bwd_num_warps": 8} if size > 128 else {})


def _forward_blocks(queries: int, keys: int, stages: int, *, warps: int) -> dict[str, object]:
    return {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_stages": stages, "fwd_num_warps": warps}


class _CachedKeys(torch.autograd.Function):
    """Puts keys and values of the path in front of a part's own."""

    @staticmethod
    def forward(ctx, key: Tensor, value: Tensor, cache: KVCacheView, layer: Hashable, path: int):
        ctx.cache, ctx.layer, ctx.path = cache, layer, path
        cache.write(layer, key, value)
        path_key, path_value = cache.read(layer, key, value, path)
        return torch.cat([path_key, key]), torch.cat([path_value, value])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_key: Tensor, grad_value: Tensor):
        cache, layer, path = ctx.cache, ctx.layer, ctx.path
        wide = torch.promote_types(grad_key.dtype, torch.float32)
        if path:
            cache.add_path_gradients(layer, grad_key[:path], grad_value[:path], path)
        own_key, own_value = grad_key[path:].to(wide, copy=True), grad_value[path:].to(wide, copy=True)
        cache.collect(layer, own_key, own_value)
        return own_key.to(grad_key.dtype), own_value.to(grad_value.dtype), None, None, None


class FlexTreeAttention:
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
    """

    name = "flex"

    def __init__(self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None):
        self.cache = cache
        self._forest, self._device = forest, device
        self._masks: dict[AttentionRange, tuple[BlockMask, int]] = {}
        self._attend = _compiled() if device.type == "cuda" else flex_attention

    def mask(self, visible_range: AttentionRange) -> tuple[BlockMask, int]:
        """The mask for layers with this visible range, and the number of path tokens that are keys; cached."""
        if visible_range not in self._masks:
            forest, path = self._forest, 0 if self.cache is None else self.cache.path_tokens
            keys = keys_of(forest.ends, forest.depth, path, visible_range)
            bounded = keys.depth is not None
            self._masks[visible_range] = (
                (block_mask(keys, self._device), keys.path) if bounded or visible_range == FULL else self.mask(FULL)
            )
        return self._masks[visible_range]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        layer: int = 0,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        mask, path = self.mask(spec.visible_range)
        if self.cache is not None:
            key, value = _CachedKeys.apply(key, value, self.cache, layer, path)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        options = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        options["kernel_options"] = kernel_options(q.dtype, max(q.shape[3], v.shape[3]))
        if spec.softcap is not None:
            options["score_mod"] = _capped(spec.softcap)
        if sinks is None:
            out = self._attend(q, k, v, **options)
        else:
            out, aux = self._attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
            assert aux.lse is not None
            # A sink is a key without a value: it only takes a share of the softmax.
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
            out = (out * share.unsqueeze(-1)).to(query.dtype)
        return out.squeeze(0).transpose(0, 1)  # type: ignore[union-attr]


BACKENDS["flex"] = lambda forest, cache, device, _size: FlexTreeAttention(forest, device, cache=cache)
