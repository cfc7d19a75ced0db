"""Tree attention by our own Triton kernels, which read the subtree ends and compute only tiles with visible pairs.

Needs Triton and a CUDA device (or Triton's interpreter, TRITON_INTERPRET=1, which runs the same code on a CPU, slowly).
The backward has no atomics: the same input gives the same bits. Gradients that go through the cache stay in float32
until the last part has added to them.

Shape letters: N tokens, K keys (the visible tokens of the path, then the part's own), H query heads, G key/value heads,
D size of query and key heads, V size of value heads.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.device_arrays import launch, to_device
from treetrain.softmax_attention.kv_cache import KVCacheView, with_path
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.tile_lists import TILE, Lists, TileLists, keys_of, make_tile_lists
from treetrain.softmax_attention.triton_kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from treetrain.softmax_attention.triton_shapes import Shape, shapes_for, tf32_is_allowed
from treetrain.tree.attention_range import FULL, AttentionRange

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256


class _Lists(NamedTuple):
    """`tile_lists.Lists` on the device."""

    order: Int32[Tensor, "T"]
    bounds: Int32[Tensor, "T 3"]
    tiles: Int32[Tensor, "P"]


class _Tables(NamedTuple):
    """The device tensors that all layers of one visible range share."""

    ends: Int32[Tensor, "K"]
    depth: Int32[Tensor, "K"]
    """With full attention this and `lowest` are `ends` again, as placeholders that the kernels never read."""
    lowest: Int32[Tensor, "_"]
    by_query: _Lists
    by_key: _Lists
    path: int
    local: bool


def _padded(lists: Lists) -> Lists:
    """The lists with one more entry, which the kernels read but do not use."""
    return lists._replace(tiles=np.append(lists.tiles, np.int32(0)))


class TritonTreeAttention:
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        tile: tokens in a tile of the lists.
    """

    name = "triton"

    def __init__(self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None, tile: int = TILE):
        self.cache, self.tile = cache, tile
        self._forest, self._device = forest, device
        self._tables: dict[AttentionRange, _Tables] = {}

    def __call__(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        scale: float,
        layer: int = 0,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "N H V"]:
        """Raises:
        ValueError: a dtype or head size that the kernels do not have.
        """
        if query.dtype not in DTYPES or max(query.shape[2], value.shape[2]) > LARGEST_HEAD:
            raise ValueError(
                f"the Triton kernels take bfloat16, float16 and float32 and heads of up to {LARGEST_HEAD}, got "
                f"{query.dtype} and heads of {query.shape[2]} and {value.shape[2]}; set TREETRAIN_ATTENTION=flex"
            )
        return _TreeFunction.apply(query, key, value, sinks, self, scale, layer, spec)  # type: ignore[return-value]

    def tables(self, visible_range: AttentionRange) -> _Tables:
        """The tables of layers with this visible range; made at first use."""
        if visible_range not in self._tables:
            forest = self._forest
            path = 0 if self.cache is None else self.cache.path_tokens
            if visible_range != FULL and not np.asarray(visible_range.lowest(forest.depth)).any():
                self._tables[visible_range] = self.tables(FULL)
            else:
                self._tables[visible_range] = self._made(visible_range, path)
        return self._tables[visible_range]

    def _made(self, visible_range: AttentionRange, path: int) -> _Tables:
        keys = keys_of(self._forest.ends, self._forest.depth, path, visible_range)
        visits: TileLists = make_tile_lists(keys, self.tile)
        local = keys.depth is not None and keys.lowest is not None
        arrays = [keys.ends, *_padded(visits.by_query), *_padded(visits.by_key)]
        ends, *rest = to_device(arrays + ([keys.depth, keys.lowest] if local else []), self._device)  # type: ignore[list-item]
        (bounds, tiles, order), (key_bounds, key_tiles, key_order) = rest[:3], rest[3:6]
        depth, lowest = rest[6:] if local else (ends, ends)
        by_query, by_key = _Lists(order, bounds, tiles), _Lists(key_order, key_bounds, key_tiles)
        return _Tables(ends, depth, lowest, by_query, by_key, keys.path, local)


class _TreeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        sinks: Float[Tensor, "H"] | None,
        attention: TritonTreeAttention,
        scale: float,
        layer: int,
        spec: AttentionSpec,
    ):
        cache, tables = attention.cache, attention.tables(spec.visible_range)
        if cache is not None:
            cache.write(layer, key, value)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        keys, values = with_path(cache, tables.path, layer, key, value)
        out, lse = _forward(query, keys, values, sinks, tables, attention.tile, scale, spec.softcap)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.attention, ctx.tables, ctx.scale, ctx.layer, ctx.softcap = attention, tables, scale, layer, spec.softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        attention, tables, layer = ctx.attention, ctx.tables, ctx.layer
        cache, path = attention.cache, tables.path
        keys, values = with_path(cache, path, layer, key, value)
        grad_out = grad_out.to(query.dtype).contiguous()
        delta = _delta(out, grad_out)
        given = query, keys, values, grad_out, lse, delta
        grad_query = _query_gradient(given, tables, attention.tile, ctx.scale, ctx.softcap)
        # In float32; rounded only after the last addition.
        grad_key, grad_value = _key_gradient(given, tables, attention.tile, ctx.scale, ctx.softcap)
        if cache is not None:
            if path:
                cache.add_path_gradients(layer, grad_key[:path], grad_value[:path], path)
                grad_key, grad_value = grad_key[path:], grad_value[path:]
            cache.collect(layer, grad_key, grad_value)
        grad_sinks = None
        if sinks is not None:
            # A sink takes a share of every query's softmax and has no value.
            share = torch.exp2(sinks.float()[:, None] / math.log(2) - lse)
            grad_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None, None, None


def _sizes(query: Tensor, key: Tensor, value: Tensor, tables: _Tables, tile: int, softcap: float | None):
    """Arguments that all kernels take by name."""
    size, value_size = query.shape[2], value.shape[2]
    return {
        "HEADS": query.shape[1],
        "GROUPS": key.shape[1],
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "BLOCK_D": max(16, 1 << (size - 1).bit_length()),
        "BLOCK_V": max(16, 1 << (value_size - 1).bit_length()),
        "TILE": tile,
        "CAPPED": softcap is not None,
        "LOCAL": tables.local,
        "PRECISION": _precision(query),
    }


def _precision(query: Tensor) -> str:
    """The precision of float32 products: exact unless PyTorch's settings allow TF32; see `triton_kernels._dot`."""
    if query.device.type == "cpu":
        return "widened"
    return "tf32" if query.dtype != torch.float32 or tf32_is_allowed() else "ieee"


def _cut(shape: Shape, tile: int) -> dict[str, int]:
    """A kernel's block sizes within a tile."""
    blocks = {"BLOCK_M": min(shape.queries, tile), "BLOCK_N": min(shape.keys, tile)}
    return blocks | {"num_warps": shape.warps, "num_stages": shape.stages}


def _shapes(query: Tensor, value: Tensor):
    return shapes_for(max(query.shape[2], value.shape[2]), query.dtype)


def _forward(query, key, value, sinks, tables: _Tables, tile: int, scale: float, softcap: float | None):
    """Output [N, H, V] and log-sum-exp to base 2, float32 [H, N]."""
    count, heads = query.shape[:2]
    out = query.new_empty((count, heads, value.shape[2]))
    lse = query.new_empty((heads, count), dtype=torch.float32)
    cut, lists = _cut(_shapes(query, value).forward, tile), tables.by_query
    grid = (len(lists.order) * (tile // cut["BLOCK_M"]), heads)
    if count:
        sink = lse if sinks is None else sinks.contiguous()
        launch(
            forward_kernel, grid, query,
            query, key, value, sink, out, lse, tables.ends, tables.depth, tables.lowest, *lists,
            count, len(key), tables.path, scale, 1.0 if softcap is None else softcap,
            SINKS=sinks is not None, **_sizes(query, key, value, tables, tile, softcap), **cut,
        )  # fmt: skip
    return out, lse


def _delta(out: Float[Tensor, "N H V"], grad_out: Float[Tensor, "N H V"]) -> Float32[Tensor, "H N"]:
    """Output times its gradient, summed over the head dimension."""
    count, heads, size = out.shape
    delta = out.new_empty((heads, count), dtype=torch.float32)
    block = max(16, 1 << (size - 1).bit_length())
    if count:
        sizes = {"HEADS": heads, "VALUE_SIZE": size, "BLOCK_V": block, "BLOCK_M": 64}
        launch(delta_kernel, (-(-count // 64), heads), out, out, grad_out, delta, count, **sizes)
    return delta


def _query_gradient(given: tuple[Tensor, ...], tables: _Tables, tile: int, scale: float, softcap: float | None):
    query, key, value, grad_out, lse, delta = given
    grad_query = torch.empty_like(query)
    cut, lists = _cut(_shapes(query, value).query_gradient, tile), tables.by_query
    grid = (len(lists.order) * (tile // cut["BLOCK_M"]), query.shape[1])
    if len(query):
        launch(
            query_gradient_kernel, grid, query,
            query, key, value, grad_out, lse, delta, grad_query, tables.ends, tables.depth, tables.lowest, *lists,
            len(query), len(key), tables.path, scale, 1.0 if softcap is None else softcap,
            **_sizes(query, key, value, tables, tile, softcap), **cut,
        )  # fmt: skip
    return grad_query


def _key_gradient(given: tuple[Tensor, ...], tables: _Tables, tile: int, scale: float, softcap: float | None):
    query, key, value, grad_out, lse, delta = given
    grad_key, grad_value = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    cut, lists = _cut(_shapes(query, value).key_gradient, tile), tables.by_key
    grid = (len(lists.order) * (tile // cut["BLOCK_N"]), key.shape[1])
    if len(key):
        launch(
            key_gradient_kernel, grid, query,
            query, key, value, grad_out, lse, delta, grad_key, grad_value,
            tables.ends, tables.depth, tables.lowest, *lists,
            len(query), len(key), tables.path, scale, 1.0 if softcap is None else softcap,
            **_sizes(query, key, value, tables, tile, softcap), **cut,
        )  # fmt: skip
    return grad_key, grad_value
