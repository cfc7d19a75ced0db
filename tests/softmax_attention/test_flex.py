"""FlexAttention's block mask against the truth, and its forward on the CPU against the reference."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import FlexKernelOptions

from support.plans import attention_forest, uniform
from treetrain.softmax_attention import flex
from treetrain.softmax_attention.flex import BLOCK, FlexTreeAttention, block_mask, kernel_options
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.softmax_attention.reference import reference_attention, visible
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.tile_lists import keys_of, make_tile_lists
from treetrain.testing.forests import bushy_rows, forests, runs
from treetrain.testing.linear import relative_error
from treetrain.tree.build import build_tree
from treetrain.tree.layout import FULL, AttentionRange, cut, pack

CPU = torch.device("cpu")
RANGES = st.one_of(
    st.just(FULL),
    st.builds(AttentionRange, window=st.integers(1, 40)),
    st.builds(AttentionRange, chunk=st.integers(1, 40)),
)


def chosen(count: torch.Tensor, index: torch.Tensor) -> np.ndarray:
    """(count [1, 1, A], index [1, 1, A, B]) -> bool [A, B]."""
    grid = np.zeros(index.shape[2:], bool)
    for row in range(len(grid)):
        grid[row, index[0, 0, row, : count[0, 0, row]].numpy()] = True
    return grid


def check_mask(forest, visible_range: AttentionRange, block: int, path: int) -> None:
    """The mask is the lists of tiles, which test_tile_lists.py holds against the truth; its rule is the truth."""
    keys = keys_of(forest.ends, forest.depth + path, path, visible_range)
    mask, lists = block_mask(keys, CPU, block), make_tile_lists(keys, block).by_query
    for first, count, index, back in (
        (1, mask.kv_num_blocks, mask.kv_indices, (mask.q_num_blocks, mask.q_indices)),
        (0, mask.full_kv_num_blocks, mask.full_kv_indices, (mask.full_q_num_blocks, mask.full_q_indices)),
    ):
        grid = chosen(count, index)
        assert min(grid.shape) >= 2 and (grid == chosen(*back).T).all()
        listed = np.zeros_like(grid)
        for row, bounds in enumerate(lists.bounds.tolist()):
            listed[row, lists.tiles[bounds[first] : bounds[first + 1]]] = True
        assert (grid == listed).all()
    n, kept = len(forest.ends), keys.path
    assert mask.seq_lengths == (n, kept + n)
    ends = torch.from_numpy(np.concatenate([np.full(path, path + n), forest.ends + path]))
    depth = torch.from_numpy(np.concatenate([np.arange(path), forest.depth + path]))
    truth = visible(ends, depth, visible_range.window, visible_range.chunk)[path:, path - kept :]
    queries, places = torch.meshgrid(torch.arange(n), torch.arange(kept + n), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, queries, places), truth)


@runs(120)
@given(forests(max_rows=12, max_length=30), RANGES, st.sampled_from([1, 2, 4, 16]), st.integers(0, 70))
def test_the_block_mask_is_that_of_the_lists_of_tiles(rows, visible_range, block, path):
    forest = attention_forest(rows)
    if len(forest.ends):
        check_mask(forest, visible_range, block, path)


@pytest.mark.parametrize("path", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("trunk", [1, 127, 128, 129])
def test_the_block_mask_of_the_default_size(trunk, path):
    rng = np.random.default_rng(trunk)
    rows = [[*(list(range(37)) * 9)[:trunk], i, *rng.integers(0, 37, 150).tolist()] for i in range(3)]
    check_mask(attention_forest(rows), FULL, BLOCK, path)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(AttentionRange(window=9)),
        AttentionSpec(AttentionRange(chunk=16), softcap=0.7),
        AttentionSpec(softcap=1.5),
        PLAIN_ATTENTION,
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_eager_forward_of_what_layers_ask_equals_the_reference(spec, parts):
    layout = pack(build_tree(bushy_rows(np.random.default_rng(5), rows=8, segment=40, levels=4)), trim=False)
    n = layout.num_tokens
    plan = uniform(layout, -(-n // parts))
    assert plan.num_parts >= parts
    generator = torch.Generator().manual_seed(0)
    q, sinks = torch.randn(n, 4, 16, generator=generator), torch.randn(4, generator=generator)
    k, v = torch.randn(n, 2, 16, generator=generator), torch.randn(n, 2, 8, generator=generator)
    cache, got = KVCache(n, CPU, gradients=False), torch.zeros(n, 4, 8)
    with torch.no_grad():
        for part in range(plan.num_parts):
            tokens, attach = plan.tokens(part), int(plan.attach[part])
            path = plan.path(attach) if attach >= 0 else np.zeros(0, np.int64)
            view = cache.view(path, np.where(plan.exported[tokens], tokens, -1))
            attention = FlexTreeAttention(Forest.of(cut(layout, tokens).layout), CPU, cache=view)
            got[tokens] = attention(q[tokens], k[tokens], v[tokens], 0.3, 0, spec, sinks)
    ends, depth = torch.from_numpy(layout.ends), torch.from_numpy(layout.positions)
    visible_range = {"depth": depth, "window": spec.visible_range.window, "chunk": spec.visible_range.chunk}
    expected = reference_attention(q, k, v, ends, 0.3, **visible_range, softcap=spec.softcap, sinks=sinks)
    assert relative_error(got, expected) <= 1e-5


def check_forward(rows, groups: int = 2) -> None:
    forest = attention_forest(rows)
    ends = torch.from_numpy(forest.ends)
    generator = torch.Generator().manual_seed(len(ends))
    q = torch.randn(len(ends), 4, 16, generator=generator)
    k, v = torch.randn(2, len(ends), groups, 16, generator=generator)
    with torch.no_grad():
        got = FlexTreeAttention(forest, CPU)(q, k, v, 0.3)
    assert got.shape == q.shape
    assert relative_error(got, reference_attention(q, k, v, ends, 0.3)) <= 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_eager_forward_equals_the_reference(groups):
    check_forward([[1]], groups)
    check_forward([[1, 2, 3], [1, 2, 4], [5]], groups)
    check_forward(bushy_rows(np.random.default_rng(3), rows=30, segment=12, levels=4), groups)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_eager_forward_of_parts_equals_the_reference_over_the_whole_tree(groups):
    layout = pack(build_tree(bushy_rows(np.random.default_rng(5), rows=8, segment=40, levels=4)), trim=False)
    plan = uniform(layout, 150)
    assert plan.num_parts > 3 and plan.path(int(plan.attach[-1])).size % BLOCK
    n = layout.num_tokens
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(n, 4, 16, generator=generator)
    k, v = torch.randn(2, n, groups, 16, generator=generator)
    cache, got = KVCache(n, CPU, gradients=False), torch.zeros_like(q)
    with torch.no_grad():
        for part in range(plan.num_parts):
            tokens, attach = plan.tokens(part), int(plan.attach[part])
            path = plan.path(attach) if attach >= 0 else np.zeros(0, np.int64)
            view = cache.view(path, np.where(plan.exported[tokens], tokens, -1))
            attention = FlexTreeAttention(Forest.of(cut(layout, tokens).layout), CPU, cache=view)
            got[tokens] = attention(q[tokens], k[tokens], v[tokens], 0.3)
    assert relative_error(got, reference_attention(q, k, v, torch.from_numpy(layout.ends), 0.3)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 128, 160, 192, 256, 320, 512])
def test_flexattention_is_told_which_kernels_and_blocks_to_take(size, dtype):
    options = kernel_options(dtype, size)
    assert options["BACKEND"] == "TRITON", "left to itself it fails below 128 queries where a group has several heads"
    blocks = options.get("fwd_BLOCK_M"), options.get("fwd_BLOCK_N")
    if dtype == torch.float32 or (size > 128 and size != 256):
        assert all(BLOCK % b == 0 for b in blocks), "blocks must divide those of the mask"
        # Queries, and as many keys and values as are loaded ahead: what one multiprocessor of a Hopper GPU has.
        filled = 1 << (size - 1).bit_length()
        held = options["fwd_BLOCK_M"] + 2 * options["fwd_num_stages"] * options["fwd_BLOCK_N"]
        assert held * filled * dtype.itemsize <= 232_448
    else:
        assert blocks == (None, None), "FlexAttention's own are known to do"
    assert set(options) <= _known_options()


def _known_options() -> set[str]:
    names = FlexKernelOptions.__annotations__
    return set(names) | {f"{side}_{name}" for side in ("fwd", "bwd") for name in names}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_compiled_forward_equals_the_reference(monkeypatch):
    # Static: the C++ that inductor of torch 2.13 writes for dynamic lengths does not compile on every CPU.
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex.flex_attention, dynamic=False))
    rng = np.random.default_rng(4)
    for rows in (20, 50):
        check_forward(bushy_rows(rng, rows=rows, segment=12, levels=4), 2)
