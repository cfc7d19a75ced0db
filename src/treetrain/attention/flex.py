"""Tree attention with FlexAttention: the GPU path. Its forward also runs on the CPU, where it is tested.

The block mask is made on the host from the lists of tiles (`tile_lists.py`) that the Triton kernels read too. Nothing
of size N x N is built. Caps and sinks go by way of scores and log-sum-exps.

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

from treetrain.attention.kv_cache import KVCacheView, cached_keys
from treetrain.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.attention.tile_lists import TILE, Keys, keys_of, make_tile_lists
from treetrain.device_arrays import on_device
from treetrain.tree.attention_range import FULL, AttentionRange
from treetrain.tree.layout import ranges

BLOCK = TILE
"""Tokens in a block of queries or keys, FlexAttention's default."""


def block_mask(keys: Keys, device: torch.device, block: int = BLOCK) -> BlockMask:
    """The block mask of the pairs of blocks that `make_tile_lists` lists, for queries and keys of a forest."""
    total, path = len(keys.ends), keys.path
    lists = make_tile_lists(keys, block).by_query
    # Lists of one would be compiled apart. No query is in the blocks that are added, and no list has them.
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
    """For each row the number of its blocks, int32 [1, 1, A], and which they are, int32 [1, 1, A, B], those first."""
    count, index = np.zeros(shape[0], np.int32), np.zeros(shape, np.int32)
    lengths = (stop - begin).astype(np.int64)
    count[: len(lengths)] = lengths
    rows, columns = np.repeat(np.arange(len(lengths)), lengths), ranges(np.zeros_like(lengths), lengths)
    index[rows, columns] = tiles[ranges(begin.astype(np.int64), lengths)]
    return on_device(count, device)[None, None], on_device(index, device)[None, None]


def _rule(keys: Keys, block: int, device: torch.device):
    """Whether one query sees one key."""

    def filled(values: np.ndarray) -> Tensor:
        # Up to whole blocks: a rule is also asked about places past the end, in the last block.
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
    """One function for each cap, so that one is compiled."""

    def score(score, _batch, _head, _query, _key):
        return cap * torch.tanh(score / cap)

    return score


COMPILATIONS = 64
"""At most. Lengths do not count; specs, sinks, heads, dtypes, with or without graph do, and PyTorch's own bound is met
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
    """Tree attention for one forest, used by every layer of a run.

    Args:
        forest: segments of the packed run.
        cache: the path above, and where own keys are handed on.
        kernels: what FlexAttention calls its backend, "TRITON" or "FLASH"; None leaves it the choice.
    """

    def __init__(
        self, forest: Forest, device: torch.device, *, cache: KVCacheView | None = None, kernels: str | None = None
    ):
        self.name = "flex-flash" if kernels == "FLASH" else "flex"
        self.cache = cache
        self._forest, self._device, self._kernels = forest, device, kernels
        self._masks: dict[AttentionRange, tuple[BlockMask, int]] = {}
        self._attend = _compiled() if device.type == "cuda" else flex_attention

    def mask(self, visible_range: AttentionRange) -> tuple[BlockMask, int]:
        """The mask of layers with this visible range, and how many tokens of the path are keys; made at first use."""
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
        """Args: query [N, H, D], key [N, G, D], value [N, G, V], sinks [H] (logits). Returns [N, H, V]."""
        mask, path = self.mask(spec.visible_range)
        if self.cache is not None:
            key, value = cached_keys(key, value, self.cache, layer, path)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        options = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        options["kernel_options"] = kernel_options(q.dtype, max(q.shape[3], v.shape[3]), self._kernels)
        if spec.softcap is not None:
            options["score_mod"] = _capped(spec.softcap)
        if sinks is None:
            out = self._attend(q, k, v, **options)
        else:
            out, aux = self._attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
            assert aux.lse is not None
            # A sink is a key without value: it takes its share of the softmax and gives nothing.
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
            out = (out * share.unsqueeze(-1)).to(query.dtype)
        return out.squeeze(0).transpose(0, 1)  # type: ignore[union-attr]
