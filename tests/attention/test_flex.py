"""FlexAttention's block mask against the truth, and its forward on the CPU against the reference."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import attention_forest, bushy_rows, forests
from support.linear import relative_error
from support.runs import runs
from treetrain.attention import flex
from treetrain.attention.flex import BLOCK, FlexTreeAttention, block_mask
from treetrain.attention.reference import reference_attention, visible


def chosen(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(count [1, 1, B], index [1, 1, B, B]) -> bool [B, B]."""
    blocks = count.shape[-1]
    grid = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        columns = index[0, 0, row, : count[0, 0, row]].long()
        assert len(columns.unique()) == len(columns)
        grid[row, columns] = True
    return grid


def check_blocks(ends: torch.Tensor, block: int) -> None:
    mask = block_mask(ends, block)
    n = len(ends)
    blocks = -(-n // block)
    truth = torch.zeros(blocks * block, blocks * block, dtype=torch.bool)
    truth[:n, :n] = visible(ends)
    tiles = truth.view(blocks, block, blocks, block).transpose(1, 2).flatten(2)
    real = torch.zeros_like(truth)
    real[:n, :n] = True
    hidden = (real & ~truth).view(blocks, block, blocks, block).transpose(1, 2).flatten(2)
    partial = chosen(mask.kv_num_blocks, mask.kv_indices)
    full = chosen(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(partial | full, tiles.any(-1)), "a missing or a useless block"
    assert not hidden[full].any(), "a full block that is not full"
    # A full block that is called partial costs time only; below the diagonal there is none.
    assert not (tiles.all(-1) & partial).tril(-1).any()
    assert mask.seq_lengths == (n, n)
    rows, columns = torch.meshgrid(torch.arange(blocks * block), torch.arange(blocks * block), indexing="ij")
    inside = (rows < n) & (columns < n)
    rule = mask.mask_mod(0, 0, rows, columns)
    assert torch.equal(rule[inside], truth[inside])


@runs(60)
@given(forests(max_rows=12, max_length=30), st.sampled_from([1, 2, 4, 16]))
def test_no_block_is_missing_and_no_full_block_is_not_full(rows, block):
    ends = torch.from_numpy(attention_forest(rows).ends)
    if len(ends):
        check_blocks(ends, block)


@pytest.mark.parametrize("trunk", [1, 127, 128, 129, 300])
def test_blocks_of_the_default_size(trunk):
    rng = np.random.default_rng(trunk)
    rows = [[*(list(range(37)) * 9)[:trunk], i, *rng.integers(0, 37, 150).tolist()] for i in range(4)]
    check_blocks(torch.from_numpy(attention_forest(rows).ends), BLOCK)


def check_forward(rows, groups: int = 2) -> None:
    ends = torch.from_numpy(attention_forest(rows).ends)
    generator = torch.Generator().manual_seed(len(ends))
    q = torch.randn(len(ends), 4, 16, generator=generator)
    k, v = torch.randn(2, len(ends), groups, 16, generator=generator)
    with torch.no_grad():
        got = FlexTreeAttention(ends)(q, k, v, 0.3)
    assert got.shape == q.shape
    assert relative_error(got, reference_attention(q, k, v, ends, 0.3)) <= 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_eager_forward_equals_the_reference(groups):
    check_forward([[1]], groups)
    check_forward([[1, 2, 3], [1, 2, 4], [5]], groups)
    check_forward(bushy_rows(np.random.default_rng(3), rows=30, segment=12, levels=4), groups)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_compiled_forward_equals_the_reference(monkeypatch):
    # Static: the C++ that inductor of torch 2.13 writes for dynamic lengths does not compile on every CPU.
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex.flex_attention, dynamic=False))
    rng = np.random.default_rng(4)
    for rows in (20, 50):
        check_forward(bushy_rows(rng, rows=rows, segment=12, levels=4), 2)
