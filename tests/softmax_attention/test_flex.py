"""The FlexAttention of the benchmarks: its block mask against the truth, its forward against the reference."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.plans import attention_forest, uniform
from treetrain.softmax_attention.attention import BACKENDS
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.softmax_attention.reference import reference_attention, visible
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.tile_lists import keys_of
from treetrain.testing.forests import bushy_rows
from treetrain.testing.linear import relative_error
from treetrain.tree.layout import FULL, AttentionRange, cut, pack
from treetrain.tree.token_tree import build_tree

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def flex():
    """benchmarks/flex_attention.py as a module, whose import adds a backend."""
    path = Path(__file__).parents[2] / "benchmarks" / "flex_attention.py"
    spec = importlib.util.spec_from_file_location("flex_attention_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the tracer looks for it
    spec.loader.exec_module(module)
    assert "flex" in BACKENDS
    yield module
    del BACKENDS["flex"]


@pytest.mark.parametrize("visible_range", [FULL, AttentionRange(window=40), AttentionRange(chunk=40)], ids=str)
@pytest.mark.parametrize("path", [0, 1, 129])
def test_blocks_that_the_mask_leaves_out_hold_no_visible_pair_and_its_rule_is_the_truth(flex, path, visible_range):
    rows = bushy_rows(np.random.default_rng(path), rows=12, segment=30, levels=4)
    forest, block = attention_forest(rows), 16
    keys = keys_of(forest.ends, forest.depth + path, path, visible_range)
    mask, n, kept = flex.block_mask(keys, CPU, block), len(forest.ends), keys.path
    ends = torch.from_numpy(np.concatenate([np.full(path, path + n), forest.ends + path]))
    depth = torch.from_numpy(np.concatenate([np.arange(path), forest.depth + path]))
    truth = visible(ends, depth, visible_range.window, visible_range.chunk)[path:, path - kept :]
    queries, places = torch.meshgrid(torch.arange(n), torch.arange(kept + n), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, queries, places), truth)
    whole, some = torch.zeros_like(truth), torch.zeros_like(truth)
    for grid, count, index in (
        (some, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(index.shape[2]):
            for column in index[0, 0, row, : count[0, 0, row]].tolist():
                grid[row * block : (row + 1) * block, column * block : (column + 1) * block] = True
    assert truth[whole].all() and not truth[~(whole | some)].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spec", [PLAIN_ATTENTION, AttentionSpec(AttentionRange(chunk=16), softcap=0.7)], ids=str)
def test_the_eager_forward_of_parts_equals_the_reference(flex, spec):
    layout = pack(build_tree(bushy_rows(np.random.default_rng(5), rows=8, segment=40, levels=4)), trim=False)
    n = layout.num_tokens
    plan = uniform(layout, -(-n // 4))
    generator = torch.Generator().manual_seed(0)
    q, sinks = torch.randn(n, 4, 16, generator=generator), torch.randn(4, generator=generator)
    k, v = torch.randn(n, 2, 16, generator=generator), torch.randn(n, 2, 8, generator=generator)
    cache, got = KVCache(n, CPU, gradients=False), torch.zeros(n, 4, 8)
    with torch.no_grad():
        for part in range(plan.num_parts):
            tokens, attach = plan.tokens(part), int(plan.attach[part])
            path = plan.path(attach) if attach >= 0 else np.zeros(0, np.int64)
            view = cache.view_of_rows(path, np.where(plan.exported[tokens], tokens, -1))
            attention = flex.FlexTreeAttention(Forest.of(cut(layout, tokens).layout), CPU, cache=view)
            got[tokens] = attention(q[tokens], k[tokens], v[tokens], 0.3, 0, spec, sinks)
    ends, depth = torch.from_numpy(layout.ends), torch.from_numpy(layout.positions)
    seen = {"depth": depth, "window": spec.visible_range.window, "chunk": spec.visible_range.chunk}
    expected = reference_attention(q, k, v, ends, 0.3, **seen, softcap=spec.softcap, sinks=sinks)
    assert relative_error(got, expected) <= 1e-5
