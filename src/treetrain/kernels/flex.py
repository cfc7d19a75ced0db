"""Tree attention with PyTorch's FlexAttention: the second choice on a GPU, for 16-bit layers with full attention.

The block mask is made on the host from the lists of visible tiles (`tile_lists.py`) that the Triton kernels read too,
for queries and for keys. The intervals of pre-order give them in time proportional to their number; nothing of size
N x N is built. (FlexAttention's format has one index for each pair of tiles, N^2 / 16,384 numbers, shared by all
layers.)

The ``mask_mod`` reads only tensors: a length or an offset held as a Python number would be compiled in, and every new
length would recompile. FlexAttention returns the gradients of keys in the keys' dtype, so parts below a path, whose
gradients are added to float32 sums, are left to other backends; so are windows, caps and sinks.

Shape letters: N tokens, T tiles, H query heads, G key/value heads, D size of query and key heads, V size of value
heads.
"""

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.fx.experimental._config as symbolic_shapes_config
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from treetrain.core.attention.kv_cache import KVCacheView, TreeAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.device_arrays import on_device, to_device
from treetrain.core.tree.layout import ranges
from treetrain.kernels.tile_lists import TILE, Lists, keys_of, make_tile_lists

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


def block_mask(forest: Forest, device: torch.device, block: int = TILE) -> BlockMask:
    """The block mask of a forest.

    Args:
        block: tokens in a block of queries or of keys.
    """
    count = len(forest.ends)
    by_query, by_key = make_tile_lists(keys_of(forest.ends, None), block)
    whole_keys, some_keys, whole_queries, some_queries = (
        _indices(lists, whole, device) for lists in (by_query, by_key) for whole in (True, False)
    )
    # Padded to whole blocks: the rule is also called for positions past the end, in the last block.
    ends = on_device(np.pad(forest.ends, (0, -count % block)).astype(np.int32), device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask(
        (count, count), *some_keys, *whole_keys, *some_queries, *whole_queries, BLOCK_SIZE=(block, block),
        mask_mod=visible,
    )  # fmt: skip


def _indices(
    lists: Lists, whole: bool, device: torch.device
) -> tuple[Int32[Tensor, "1 1 T"], Int32[Tensor, "1 1 T T"]]:
    """The number of tiles that each tile is paired with, unmasked (`whole`) or masked ones, and their indices."""
    begin, middle, stop = lists.bounds.T.astype(np.int64)
    first, lengths = (begin, middle - begin) if whole else (middle, stop - middle)
    # A dimension of size 1 would be compiled separately, so there are at least two tiles; the added one stays empty.
    tiles = max(len(lengths), 2)
    count, index = np.zeros(tiles, np.int32), np.zeros((tiles, tiles), np.int32)
    count[: len(lengths)] = lengths
    columns = ranges(np.zeros_like(lengths), lengths)
    index[np.repeat(np.arange(len(lengths)), lengths), columns] = lists.tiles[ranges(first, lengths)]
    counts, indices = to_device([count, index], device)
    return counts[None, None], indices[None, None]


COMPILATIONS = 64
"""Recompilation limit. Heads, dtypes and grad mode each recompile; lengths do not. Beyond the limit, `fullgraph` raises
an error; without it, the call would run uncompiled, with all scores in memory."""


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

    By default the tracer assumes that lengths equal in the first call are always equal, and recompiles when they
    differ.
    """
    with (
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS, specialize_float=True),
        symbolic_shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield


def kernel_options(size: int) -> FlexKernelOptions:
    """FlexAttention's kernel options on a GPU: its Triton kernels, and block sizes where its defaults do not work.

    Below 128 queries FlexAttention would choose its decoding kernels, which cannot split the queries if several query
    heads share a key head. For head sizes above 128 other than 256, the default block sizes need more shared memory
    than a multiprocessor has, or spill most registers, according to the compiler's report for sm_90.

    Args:
        size: head size, the larger of query's and value's.
    """
    options: dict[str, Any] = {"BACKEND": "TRITON"}
    if 128 < size < 256:  # the blocks of 256, to which these heads are padded
        options |= {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 3, "fwd_num_warps": 4}
    if size > 128:
        options["bwd_num_warps"] = 8
    return cast(FlexKernelOptions, options)  # whose type lists no names with fwd_ or bwd_


class _Exported(torch.autograd.Function):
    """Writes a part's exported keys to the cache, and collects their gradients from it."""

    @staticmethod
    def forward(ctx, key: Tensor, value: Tensor, cache: KVCacheView, layer: Hashable):
        ctx.cache, ctx.layer = cache, layer
        cache.write(layer, key, value)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_key: Tensor, grad_value: Tensor):
        wide = torch.promote_types(grad_key.dtype, torch.float32)
        keys, values = (grad.to(wide, copy=True) for grad in (grad_key, grad_value))
        ctx.cache.collect(ctx.layer, keys, values)
        return keys.to(grad_key.dtype), values.to(grad_value.dtype), None, None


class FlexTreeAttention(TreeAttention):
    """Tree attention for one forest without a path above it, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: stores the forest's own keys; None for whole trees.
    """

    name = "flex"
    serves_sinks = False

    def __init__(self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None):
        assert cache is None or not cache.path_tokens
        self.cache = cache
        self._forest, self._device = forest, device
        self._attend = _compiled() if device.type == "cuda" else flex_attention

    @functools.cached_property
    def mask(self) -> BlockMask:
        """The block mask of all layers."""
        return block_mask(self._forest, self._device)

    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        """Whether the backend has kernels for a layer's dtype, head sizes and spec."""
        size = max(query.shape[2], value.shape[2])
        return spec == PLAIN_ATTENTION and query.dtype in DTYPES and size <= LARGEST_HEAD

    def __call__(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None) -> Tensor:
        assert spec == PLAIN_ATTENTION and sinks is None
        if self.cache is not None and self.cache.exports:
            self.cache.gradient_input(layer, query, key, value)  # it notes whether rows of the cache need gradients
            key, value = _Exported.apply(key, value, self.cache, layer)  # type: ignore[misc]
        return self._attention(query, key, value, scale)

    def _attention(
        self, query: Float[Tensor, "N H D"], key: Float[Tensor, "N G D"], value: Float[Tensor, "N G V"], scale: float
    ) -> Float[Tensor, "N H V"]:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = self._attend(
            q, k, v, block_mask=self.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=kernel_options(max(q.shape[3], v.shape[3])),
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)
