"""Rectangle attention against the reference, forward and backward, in every dtype."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.plans import attention_forest
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.check.linear import relative_error, rms
from treetrain.core.attention import schedule as schedule_module
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.reference import reference_attention
from treetrain.core.attention.schedule import Forest

CALL_PAIRS = (0.0, 64.0, 2e3, 1e5, 1e9)
NAMES = ("out", "dq", "dk", "dv")


def inputs(tokens: int, heads=4, groups=2, size=8, dtype=torch.float64, seed=0) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, size), (tokens, groups, size), (tokens, groups, size), (tokens, heads, size)]
    # Rounded to bfloat16 first: the same numbers in every dtype.
    return [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]


def both_ways(attend, tensors) -> list[torch.Tensor]:
    """Output and the gradients of query, key and value."""
    q, k, v, grad = (t.detach().clone() for t in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_reference(forest: Forest, tensors, scale: float) -> list[torch.Tensor]:
    ends = torch.from_numpy(forest.ends)
    return both_ways(lambda q, k, v: reference_attention(q, k, v, ends, scale), tensors)


def by_rectangles(forest: Forest, tensors, scale: float, call_pairs: float | None = None) -> list[torch.Tensor]:
    attention = RectangleAttention(forest, call_pairs=call_pairs)
    return both_ways(lambda q, k, v: attention(q, k, v, scale), tensors)


def check(forest: Forest, tensors, tolerance: float, call_pairs: float | None = None, scale: float = 0.4) -> float:
    expected = by_reference(forest, [t.double() for t in tensors], scale)
    errors = [relative_error(a, b) for a, b in zip(by_rectangles(forest, tensors, scale, call_pairs), expected)]
    assert max(errors) <= tolerance, dict(zip(NAMES, errors))
    return max(errors)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_random_forests_equal_the_reference(dtype, tolerance, record_property):
    worst = [0.0]

    @runs(30)
    @given(forests(max_rows=12, max_length=24), st.sampled_from(CALL_PAIRS), st.integers(0, 99))
    def every_forest(rows, call_pairs, seed):
        forest = attention_forest(rows)
        if len(forest.ends):
            tensors = inputs(len(forest.ends), dtype=dtype, seed=seed)
            worst[0] = max(worst[0], check(forest, tensors, tolerance, call_pairs))

    every_forest()
    record_property("errors", worst[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "path"),
    [
        *((2, 0), (16, 8), (64, 512)),
        (2, 8),
        (2, 512),
        (16, 0),
        (16, 512),
        (64, 0),
        (64, 8),
    ],
)
def test_bushy_forests_equal_the_reference_for_any_tile(monkeypatch, tile, path):
    monkeypatch.setattr(schedule_module, "TILE", tile)
    monkeypatch.setattr(schedule_module, "MAX_TILE_PATH", path)
    rng = np.random.default_rng(tile + path)
    forest = attention_forest(bushy_rows(rng, rows=40, segment=8, levels=4) + rng.integers(0, 9, (9, 40)).tolist())
    for call_pairs in CALL_PAIRS:
        check(forest, inputs(len(forest.ends)), 1e-12, call_pairs)


@pytest.mark.slow
def test_bfloat16_errs_no_more_than_the_reference_run_in_bfloat16(record_property):
    ours: list[list[float]] = []
    theirs: list[list[float]] = []

    @runs(30)
    @given(forests(max_rows=16, max_length=40), st.sampled_from(CALL_PAIRS), st.integers(0, 99))
    def every_forest(rows, call_pairs, seed):
        forest = attention_forest(rows)
        if not len(forest.ends):
            return
        low = inputs(len(forest.ends), size=16, dtype=torch.bfloat16, seed=seed)
        truth = by_reference(forest, [t.float() for t in low], 0.3)
        ours.append([relative_error(a, b) for a, b in zip(by_rectangles(forest, low, 0.3, call_pairs), truth)])
        theirs.append([relative_error(a, b) for a, b in zip(by_plain_bfloat16(forest, low, 0.3), truth)])

    every_forest()
    pooled = {n: (rms(a), rms(b)) for n, a, b in zip(NAMES, zip(*ours), zip(*theirs))}
    record_property("errors", pooled)
    for name, (tree, plain) in pooled.items():
        assert tree <= 1.5 * plain, (name, tree, plain)


def by_plain_bfloat16(forest: Forest, tensors, scale: float) -> list[torch.Tensor]:
    """Stock masked attention in bfloat16: what the rows' own attention rounds."""
    from treetrain.core.attention.reference import visible

    mask = visible(torch.from_numpy(forest.ends))

    def attend(q, k, v):
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    return both_ways(attend, tensors)


SIZES, RATIOS = (8, 24, 64, 80, 128), (1, 2, 4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "ratio"),
    [
        pytest.param(size, ratio, marks=() if number % 3 == at else pytest.mark.slow)
        for number, size in enumerate(SIZES)
        for at, ratio in enumerate(RATIOS)
    ],
)
def test_head_ratios_and_sizes(ratio, size):
    rng = np.random.default_rng(size)
    forest = attention_forest([*bushy_rows(rng, rows=20, segment=9, levels=4), [5] * 70])
    for call_pairs in (0.0, 2e3, 1e9):
        tensors = inputs(len(forest.ends), heads=4, groups=4 // ratio, size=size)
        check(forest, tensors, 1e-12, call_pairs, scale=size**-0.5)
        check(forest, [t.float() for t in tensors], 2e-6, call_pairs, scale=size**-0.5)


def test_inputs_and_gradients_need_not_be_contiguous():
    rng = np.random.default_rng(0)
    forest = attention_forest(bushy_rows(rng, rows=20, segment=6, levels=4))
    n = len(forest.ends)
    q, k, v, grad = inputs(n)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, grad)]
    expanded = [*strided[:3], grad[:1, :1, :1].expand(n, 4, 8)]
    assert not any(x.is_contiguous() for x in expanded)
    for call_pairs in CALL_PAIRS:
        attention = RectangleAttention(forest, call_pairs=call_pairs)
        for tensors in (strided, expanded):
            expected = by_reference(forest, tensors, 0.4)
            leaves = [x.detach().requires_grad_() for x in tensors[:3]]
            out = attention(*leaves, 0.4)
            got = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
            assert max(relative_error(a, b) for a, b in zip(got, expected)) <= 1e-12


def test_scores_of_very_different_size_merge_without_overflow():
    forest = attention_forest([[1] * 40 + [2] * 30, [1] * 40 + [3] * 30, [1] * 20 + [4] * 10])
    for factor in (0.0, 1e-3, 30.0):
        q, k, v, grad = inputs(len(forest.ends))
        k[::3] *= 20
        for call_pairs in CALL_PAIRS:
            # Scores of thousands: one rounding of a score is that many of its exponential.
            check(forest, [q * factor, k, v, grad], 1e-10, call_pairs, scale=1.0)


def test_gradients_only_of_what_needs_them():
    forest = attention_forest([[1, 2, 3, 4], [1, 2, 5, 6]])
    q, k, v, grad = inputs(len(forest.ends))
    attention = RectangleAttention(forest, call_pairs=0.0)
    expected = by_reference(forest, (q, k, v, grad), 0.4)
    for needed in range(3):
        leaves = [x.detach().clone().requires_grad_(i == needed) for i, x in enumerate((q, k, v))]
        got = torch.autograd.grad(attention(*leaves, 0.4), leaves[needed], grad)[0]
        assert relative_error(got, expected[needed + 1]) <= 1e-12


def test_one_attention_serves_several_layers_and_dtypes():
    forest = attention_forest([[1, 2, 3, 4], [1, 2, 5, 6], [7], [1, 8, 8]])
    attention = RectangleAttention(forest, call_pairs=1e5)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12), (torch.float32, 2e-6)):
        for seed in (0, 1):
            tensors = inputs(len(forest.ends), dtype=dtype, seed=seed)
            got = both_ways(lambda q, k, v: attention(q, k, v, 0.5), tensors)
            expected = by_reference(forest, [t.double() for t in tensors], 0.5)
            assert max(relative_error(a, b) for a, b in zip(got, expected)) <= tolerance


def test_deep_chains_and_wide_stars_equal_the_reference():
    trunk = list(range(30)) * 20
    comb = [[*trunk[: 12 * i + 1], 36] for i in range(50)] + [trunk]
    star = [[*trunk[:40], i % 37, i // 37, 5] for i in range(120)]
    for rows in (comb, star, [[i] for i in range(37)], [[1]]):
        forest = attention_forest(rows)
        for call_pairs in (None, 0.0, 1e9):
            check(forest, inputs(len(forest.ends), heads=2, groups=1), 1e-12, call_pairs)
