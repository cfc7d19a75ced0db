"""Tree attention by our own Triton kernels, which read the subtree ends and compute only tiles with visible pairs.

Needs Triton and a CUDA device (or Triton's interpreter, TRITON_INTERPRET=1, which runs the same code on a CPU, slowly).
The backward has no atomics: the same input gives the same bits. Gradients that go through the cache stay in float32
until the last part has added to them.

Shape letters: N tokens, K keys (the visible tokens of the path, then the part's own), H query heads, G key/value heads,
D size of query and key heads, V size of value heads.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from treetrain.core.attention.kv_cache import CachedAttention, Inputs, KVCacheView
from treetrain.core.attention.schedule import AttentionSpec, Forest
from treetrain.core.device_arrays import to_device
from treetrain.core.tree.layout import AttentionRange
from treetrain.kernels.launch import launch, tf32_is_allowed
from treetrain.kernels.tile_lists import TILE, keys_of, make_tile_lists
from treetrain.kernels.triton_kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

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
    order: Int32[Tensor, " T"]
    bounds: Int32[Tensor, "T 3"]
    tiles: Int32[Tensor, " P"]


class _Tables(NamedTuple):
    """Holds the device tensors that all layers of one visible range share."""

    ends: Int32[Tensor, " K"]
    depth: Int32[Tensor, " K"]
    """With full attention this and `lowest` are `ends` again, as placeholders that the kernels never read."""
    lowest: Int32[Tensor, " _"]
    by_query: _Lists
    by_key: _Lists
    path: int
    local: bool


class TritonTreeAttention(CachedAttention):
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
        tile: tokens in a tile of the lists.
    """

    name = "triton"

    def __init__(self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None, tile: int = TILE):
        self.cache = cache
        self.tile = tile
        self._forest, self._device = forest, device
        self._tables: dict[AttentionRange, _Tables] = {}

    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        return query.dtype in DTYPES and max(query.shape[2], value.shape[2]) <= LARGEST_HEAD

    def path_seen(self, spec: AttentionSpec) -> int:
        return self.tables(spec.visible_range).path

    def forward(self, given: Inputs, scale: float, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exp to base 2, float32 [H, N]."""
        query, sinks = given.query.contiguous(), given.sinks
        key, value = (x.contiguous() for x in given.below_path())
        count, heads, _ = query.shape
        assert self.takes(query, value, spec)
        out = query.new_empty((count, heads, value.shape[2]))
        lse = query.new_empty((heads, count), dtype=torch.float32)
        sink = lse if sinks is None else sinks.contiguous()  # not read without sinks
        tensors, results = (query, key, value, sink), (out, lse)
        self._launch(forward_kernel, "forward", tensors, results, scale, spec, SINKS=sinks is not None)
        return out, lse

    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        grad_out, query = grad_out.contiguous(), given.query.contiguous()
        delta = _delta(out, grad_out)
        key, value = (x.contiguous() for x in given.below_path())
        tensors, grad_query = (query, key, value, grad_out, lse, delta), torch.empty_like(query)
        self._launch(query_gradient_kernel, "query_gradient", tensors, (grad_query,), scale, spec)
        # In float32; rounded only after the last addition.
        grad_key, grad_value = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
        self._launch(key_gradient_kernel, "key_gradient", tensors, (grad_key, grad_value), scale, spec)
        sinks = None
        if given.sinks is not None:
            # A sink takes a share of every query's softmax and has no value.
            share = torch.exp2(given.sinks.float()[:, None] / math.log(2) - lse)
            sinks = -(share * delta).sum(1)
        return given.gradients(grad_query, grad_key, grad_value, sinks)

    def _launch(
        self,
        kernel: Any,
        name: str,
        tensors: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        scale: float,
        spec: AttentionSpec,
        **options: bool,
    ) -> None:
        """Launch a kernel of `Shapes`, whose first tensors are query, key and value, over the blocks that it owns."""
        query, key, value = tensors[:3]
        (count, heads, size), (groups, value_size) = query.shape, value.shape[1:]
        tables = self.tables(spec.visible_range)
        tile = self.tile
        by_key = name == "key_gradient"
        shape: Shape = getattr(shapes_for(max(size, value_size), query.dtype), name)
        blocks = {"BLOCK_M": min(shape.queries, tile), "BLOCK_N": min(shape.keys, tile)}
        lists = tables.by_key if by_key else tables.by_query
        grid = len(lists.order) * (tile // blocks["BLOCK_N" if by_key else "BLOCK_M"]), groups if by_key else heads
        if not len(lists.order):
            return
        launch(
            kernel, grid, query,
            *tensors, *results, tables.ends, tables.depth, tables.lowest, *lists,
            count, len(key), tables.path, scale, 1.0 if spec.softcap is None else spec.softcap,
            HEADS=heads, GROUPS=groups, SIZE=size, VALUE_SIZE=value_size, BLOCK_D=_power(size),
            BLOCK_V=_power(value_size), TILE=tile, CAPPED=spec.softcap is not None, LOCAL=tables.local,
            PRECISION=_precision(query), num_warps=shape.warps, num_stages=shape.stages, **blocks, **options,
        )  # fmt: skip

    def tables(self, visible_range: AttentionRange) -> _Tables:
        """The tables of layers with this visible range; made at first use."""
        if visible_range not in self._tables:
            path = 0 if self.cache is None else self.cache.path_tokens
            keys = keys_of(self._forest.ends, self._forest.depth, path, visible_range)
            pairs = make_tile_lists(keys, self.tile)
            arrays = [keys.ends]
            for lists in pairs:  # each list has one more entry, which the kernels read but do not use
                arrays += [lists.order, lists.bounds, np.append(lists.tiles, np.int32(0))]
            local = keys.depth is not None and keys.lowest is not None
            ends, *rest = to_device(arrays + ([keys.depth, keys.lowest] if local else []), self._device)  # type: ignore[list-item]
            depth, lowest = rest[6:] if local else (ends, ends)
            by_query, by_key = _Lists(*rest[:3]), _Lists(*rest[3:6])
            self._tables[visible_range] = _Tables(ends, depth, lowest, by_query, by_key, keys.path, local)
        return self._tables[visible_range]


def _power(size: int) -> int:
    """Return the size to which a kernel pads heads."""
    return max(16, 1 << (size - 1).bit_length())


def _precision(query: Tensor) -> str:
    """Name the precision of float32 products: exact unless PyTorch's settings allow TF32; see `triton_kernels._dot`."""
    if query.device.type == "cpu":
        return "widened"
    return "tf32" if query.dtype != torch.float32 or tf32_is_allowed() else "ieee"


def _delta(out: Float[Tensor, "N H V"], grad_out: Float[Tensor, "N H V"]) -> Float32[Tensor, "H N"]:
    """Multiply the output by its gradient and sum over the head dimension."""
    count, heads, size = out.shape
    delta = out.new_empty((heads, count), dtype=torch.float32)
    if count:
        sizes = {"HEADS": heads, "VALUE_SIZE": size, "BLOCK_V": _power(size), "BLOCK_M": 64}
        launch(delta_kernel, (-(-count // 64), heads), out, out, grad_out, delta, count, **sizes)
    return delta
