"""FlexAttention: its block mask against the truth, its forward and backward against the reference.

There is no GPU here: PyTorch computes FlexAttention by plain operations, in backward too if its check of the device is
left out.
"""

import functools
import warnings

import numpy as np
import pytest
import torch
from test_varlen import both_ways, expected, inputs
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask

from support.plans import attention_forest
from treetrain.check.forests import bushy_rows
from treetrain.check.linear import relative_error
from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.reference import visible
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec
from treetrain.core.tree.layout import AttentionRange
from treetrain.kernels import flex
from treetrain.kernels.attention_check import _cases, _runs
from treetrain.kernels.flex import FlexTreeAttention, block_mask

CPU = torch.device("cpu")
SCALE = 0.4


@pytest.fixture
def backward_on_a_cpu(monkeypatch):
    monkeypatch.setattr(pytorch, "_validate_device", lambda query, key, value: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def bushy(seed: int, rows=12):
    return attention_forest(bushy_rows(np.random.default_rng(seed), rows=rows, segment=30, levels=4))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_the_mask_leaves_out_hold_no_visible_pair_and_its_rule_is_the_truth(seed):
    forest, block = bushy(seed), 16
    mask, n = block_mask(forest, CPU, block), len(forest.ends)
    truth = visible(torch.from_numpy(forest.ends))
    queries, keys = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, queries, keys), truth)
    tiles = -(-n // block)
    some, whole = (torch.zeros(tiles, tiles, dtype=torch.bool) for _ in range(2))
    for grid, count, index in (
        (some, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(tiles):
            grid[row, index[0, 0, row, : count[0, 0, row]].long()] = True
    by_token = [x.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :n] for x in (whole, some)]
    assert truth[by_token[0]].all() and not truth[~(by_token[0] | by_token[1])].any() and not (whole & some).any()


@pytest.mark.parametrize("seed", range(3))
def test_the_lists_by_key_are_those_that_pytorch_would_make_from_the_lists_by_query(seed):
    mask = block_mask(bushy(seed), CPU, 16)
    theirs = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=16
    )
    for counts, indices in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        count = getattr(mask, counts)
        assert torch.equal(count, getattr(theirs, counts))
        for row, size in enumerate(count[0, 0].tolist()):
            ours, other = (getattr(x, indices)[0, 0, row, :size] for x in (mask, theirs))
            assert torch.equal(ours, other)


@pytest.mark.parametrize("value_size", [8, 16])
def test_output_and_gradients_are_the_references(backward_on_a_cpu, value_size):
    forest = bushy(0, rows=6)
    tensors = inputs(len(forest.ends), size=16, value_size=value_size, dtype=torch.float32)
    attention = FlexTreeAttention(forest, CPU)
    got = both_ways(lambda q, k, v: attention(q, k, v, SCALE), tensors)
    errors = [relative_error(a, b) for a, b in zip(got, expected(forest, [x.double() for x in tensors]))]
    assert max(errors) <= 1e-5


def test_it_passes_its_check_in_16_bits(backward_on_a_cpu):
    def make(forest, cache, device, size):
        return FlexTreeAttention(forest, device, cache=cache)

    found = {}
    for run in _runs(make, (4, 2), (16, 16), torch.bfloat16, CPU, PLAIN_ATTENTION, sinks=False, below_path=False):
        found |= run()
    assert max(found.values()) <= 0.02 and len(found) == 4 * len(list(_cases(0, (4, 2), (16, 16))))


def test_what_a_part_exports_gets_the_gradients_of_the_parts_below(backward_on_a_cpu):
    forest = bushy(1, rows=6)
    count = len(forest.ends)
    tensors, rows = inputs(count, size=16, dtype=torch.float32), np.full(count, -1)
    rows[::3] = np.arange(len(rows[::3]))[::-1]
    cache = KVCache(count, CPU, gradients=True)
    attention = FlexTreeAttention(forest, CPU, cache=cache.view_of_rows(np.zeros(0, np.int64), rows))
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    out = attention(*leaves, SCALE)
    below = cache.view_of_rows(rows[::3], np.full(count, -1))
    key, value = below.read(0, *leaves[1:])
    assert torch.equal(key, tensors[1][::3]) and torch.equal(value, tensors[2][::3])
    added = [torch.randn_like(x) for x in (key, value)]
    below.add_path_gradients(0, *added)
    got = torch.autograd.grad(out, leaves, tensors[3])
    for grad, truth, more in zip(got, expected(forest, tensors)[1:], (None, *added)):
        if more is not None:
            truth[::3] += more
        assert relative_error(grad, truth) <= 1e-5


def test_layers_of_other_kinds_are_left_to_others():
    attention = FlexTreeAttention(bushy(0), CPU)
    narrow = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    assert attention.takes(narrow, narrow, PLAIN_ATTENTION) and not attention.serves_sinks
    for spec in (AttentionSpec(AttentionRange(window=5)), AttentionSpec(softcap=1.5)):
        assert not attention.takes(narrow, narrow, spec)
    assert not attention.takes(narrow.float(), narrow.float(), PLAIN_ATTENTION)
    assert not attention.takes(narrow, torch.zeros(2, 4, 264, dtype=torch.bfloat16), PLAIN_ATTENTION)


def test_all_lengths_share_one_graph(backward_on_a_cpu, monkeypatch):
    """The tracer's part of the compilation, which is the same on every device."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    counts.clear()
    try:
        for seed, rows in enumerate((3, 6, 9, 2)):
            forest = bushy(seed, rows)
            attention = FlexTreeAttention(forest, CPU)
            attention._attend = flex._compiled()
            tensors = inputs(len(forest.ends), size=16, dtype=torch.float32)
            got = both_ways(lambda q, k, v, attend=attention: attend(q, k, v, SCALE), tensors)
            errors = [relative_error(a, b) for a, b in zip(got, expected(forest, [x.double() for x in tensors]))]
            assert max(errors) <= 1e-5
        forest = attention_forest([[1]])  # and one token, where PyTorch likes to compile anew
        attention = FlexTreeAttention(forest, CPU)
        attention._attend = flex._compiled()
        both_ways(lambda q, k, v: attention(q, k, v, SCALE), inputs(1, size=16, dtype=torch.float32))
        assert counts["stats"]["unique_graphs"] <= 2
    finally:
        flex._compiled.cache_clear()
        torch._dynamo.reset()
