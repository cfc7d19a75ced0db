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

from treetrain.device_arrays import launch, tf32_is_allowed, to_device
from treetrain.softmax_attention.kv_cache import CachedAttention, Inputs, KVCacheView
from treetrain.softmax_attention.schedule import AttentionSpec, Forest
from treetrain.softmax_attention.tile_lists import TILE, Lists, TileLists, keys_of, make_tile_lists
from treetrain.softmax_attention.triton_kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from treetrain.tree.layout import AttentionRange

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256


# ---- block sizes


class Shape(NamedTuple):
    """Block sizes and launch options of one kernel."""

    queries: int
    """Queries in a block; divides the tile."""
    keys: int
    """Keys in a block; divides the tile."""
    warps: int
    stages: int


class Shapes(NamedTuple):
    """The settings of a layer's three kernels."""

    forward: Shape
    query_gradient: Shape
    key_gradient: Shape


# One fixed setting, for reproducible runs: autotuned kernels may sum in another order in the next process. Registers
# and shared memory were read off the compiler's report for sm_90 (benchmarks/triton_report.py). With 16 bits each
# kernel spills at most 52 bytes and uses Hopper's wgmma. Its three stages load the data of a step while the step before
# is computed; with two stages the load would only start at the end of that step.
SHAPES = {
    (64, 2): Shapes(Shape(128, 128, 8, 3), Shape(128, 64, 8, 3), Shape(64, 128, 8, 3)),
    (128, 2): Shapes(Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(32, 128, 8, 3)),
    (256, 2): Shapes(Shape(128, 32, 8, 3), Shape(64, 32, 8, 3), Shape(32, 64, 8, 3)),
    (64, 4): Shapes(Shape(64, 32, 8, 2), Shape(64, 32, 8, 2), Shape(32, 32, 8, 2)),
    (128, 4): Shapes(Shape(32, 16, 8, 2), Shape(32, 16, 8, 2), Shape(16, 32, 8, 2)),
    (256, 4): Shapes(Shape(32, 16, 8, 1), Shape(32, 16, 8, 1), Shape(16, 32, 8, 1)),
}
"""By largest head size (of query and value) and bytes per number. Tensor cores take float32 only if TF32 is allowed."""


def shapes_for(size: int, dtype: torch.dtype) -> Shapes:
    """The setting for a head size (the larger of query's and value's) and dtype."""
    return SHAPES[next(largest for largest in (64, 128, 256) if size <= largest), dtype.itemsize]


# ---- a forest


class _Lists(NamedTuple):
    """`tile_lists.Lists` on the device."""

    order: Int32[Tensor, " T"]
    bounds: Int32[Tensor, "T 3"]
    tiles: Int32[Tensor, " P"]


class _Tables(NamedTuple):
    """The device tensors that all layers of one visible range share."""

    ends: Int32[Tensor, " K"]
    depth: Int32[Tensor, " K"]
    """With full attention this and `lowest` are `ends` again, as placeholders that the kernels never read."""
    lowest: Int32[Tensor, " _"]
    by_query: _Lists
    by_key: _Lists
    path: int
    local: bool


def _padded(lists: Lists) -> Lists:
    """The lists with one more entry, which the kernels read but do not use."""
    return lists._replace(tiles=np.append(lists.tiles, np.int32(0)))


class TritonTreeAttention(CachedAttention):
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        tile: tokens in a tile of the lists.
    """

    name = "triton"

    def __init__(self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None, tile: int = TILE):
        super().__init__(cache)
        self.tile = tile
        self._forest, self._device = forest, device
        self._tables: dict[AttentionRange, _Tables] = {}

    def path_seen(self, spec: AttentionSpec) -> int:
        return self.tables(spec.visible_range).path

    def forward(self, given: Inputs, scale: float, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        query, size = given.query, max(given.query.shape[2], given.value.shape[2])
        if query.dtype not in DTYPES or size > LARGEST_HEAD:
            raise ValueError(
                f"the Triton kernels take bfloat16, float16 and float32 and heads of up to {LARGEST_HEAD}, got "
                f"{query.dtype} and heads of {size}; run on a CPU, or in one of these dtypes"
            )
        tables = self.tables(spec.visible_range)
        key, value = (x.contiguous() for x in given.below_path())
        return _forward(query.contiguous(), key, value, given.sinks, tables, self.tile, scale, spec.softcap)

    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        tables, grad_out = self.tables(spec.visible_range), grad_out.contiguous()
        delta = _delta(out, grad_out)
        key, value = (x.contiguous() for x in given.below_path())
        tensors = given.query.contiguous(), key, value, grad_out, lse, delta
        grad_query = _query_gradient(tensors, tables, self.tile, scale, spec.softcap)
        # In float32; rounded only after the last addition.
        grad_keys = _key_gradient(tensors, tables, self.tile, scale, spec.softcap)
        sinks = None
        if given.sinks is not None:
            # A sink takes a share of every query's softmax and has no value.
            share = torch.exp2(given.sinks.float()[:, None] / math.log(2) - lse)
            sinks = -(share * delta).sum(1)
        return given.gradients(grad_query, *grad_keys, sinks)

    def tables(self, visible_range: AttentionRange) -> _Tables:
        """The tables of layers with this visible range; made at first use."""
        if visible_range not in self._tables:
            self._tables[visible_range] = self._made(visible_range)
        return self._tables[visible_range]

    def _made(self, visible_range: AttentionRange) -> _Tables:
        path = 0 if self.cache is None else self.cache.path_tokens
        keys = keys_of(self._forest.ends, self._forest.depth, path, visible_range)
        visits: TileLists = make_tile_lists(keys, self.tile)
        local = keys.depth is not None and keys.lowest is not None
        arrays = [keys.ends, *_padded(visits.by_query), *_padded(visits.by_key)]
        ends, *rest = to_device(arrays + ([keys.depth, keys.lowest] if local else []), self._device)  # type: ignore[list-item]
        (bounds, tiles, order), (key_bounds, key_tiles, key_order) = rest[:3], rest[3:6]
        depth, lowest = rest[6:] if local else (ends, ends)
        by_query, by_key = _Lists(order, bounds, tiles), _Lists(key_order, key_bounds, key_tiles)
        return _Tables(ends, depth, lowest, by_query, by_key, keys.path, local)


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
