"""Attention over parts that hand on keys, values and gradients, against the reference over the whole tree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts_by_hand import PartsByHand, Tensors

from support.passes import cache_bytes
from support.plans import KEEPS, one_segment_per_part, uniform
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.check.linear import relative_error, rms
from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.reference import reference_attention
from treetrain.core.attention.schedule import Forest
from treetrain.core.device_arrays import rows_on
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import build_tree

SCALE = 0.4
LAYERS = 2
NAMES = ("out", "dq", "dk", "dv")


def layout_of(rows) -> PackedLayout:
    return pack(build_tree(rows), trim=False)


def inputs(tokens: int, *, heads=4, groups=2, size=8, dtype=torch.float64, seed=0) -> list[Tensors]:
    """Query, key, value and the output's gradient of every layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, size), (tokens, groups, size), (tokens, groups, size), (tokens, heads, size)]
    # Rounded to bfloat16 first: the same numbers in every dtype.
    return [[torch.randn(s, generator=generator).bfloat16().to(dtype) for s in shapes] for _ in range(LAYERS)]


def whole(layout: PackedLayout, tensors: Tensors) -> Tensors:
    """Output and gradients of the reference over the whole tree."""
    ends = torch.from_numpy(layout.ends)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = reference_attention(*leaves, ends, SCALE)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def rectangles(layout: PackedLayout, view):
    return RectangleAttention(Forest.of(layout), cache=view)


def errors(plan: Plan, tensors: list[Tensors], order: np.ndarray) -> list[float]:
    """Worst error over the layers of the output and each gradient."""
    got = PartsByHand(plan, tensors, rectangles, order, SCALE).run()
    expected = [whole(plan.layout, [t.double() for t in layer]) for layer in tensors]
    return [max(relative_error(a[i], b[i]) for a, b in zip(got, expected)) for i in range(4)]


def consecutive(plan: Plan, seed: int = 0) -> np.ndarray:
    return np.arange(int(plan.exported.sum()))


def scattered(plan: Plan, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(int(plan.exported.sum()) + 5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize("rows_of", [consecutive, scattered])
def test_parts_equal_the_whole_tree(rows_of, dtype, tolerance, record_property):
    worst, parts = [0.0], []

    @runs(7)
    @given(forests(max_rows=12, max_length=24), st.integers(1, 12), st.sampled_from(KEEPS), st.integers(0, 99))
    def every_plan(rows, chunk, keep, seed):
        layout = layout_of(rows)
        if not layout.num_tokens:
            return
        for plan in (uniform(layout, chunk, keep), one_segment_per_part(layout, keep)):
            tensors = inputs(layout.num_tokens, dtype=dtype, seed=seed)
            found = errors(plan, tensors, rows_of(plan, seed))
            worst[0] = max(worst[0], *found)
            parts.append(plan.num_parts)
            assert worst[0] <= tolerance, dict(zip(NAMES, found))

    every_plan()
    assert max(parts) > 8
    record_property("errors", worst[0])


TREE = [[*range(12), 20, 21, 22, 30], [*range(12), 20, 21, 23], [*range(12), 24, 25], [*range(6), 26, 27, 28]]
"""A chain of 12 with a fork on it, one at its end, and one below that."""
CUTS = {
    "in two": lambda layout: layout.positions >= 3,
    "in three, one below the other": lambda layout: np.digitize(layout.positions, [3, 5]),
    "in three, two below one": lambda layout: (layout.positions >= 12) + 2 * np.isin(layout.input_ids, [26, 27, 28]),
    "below every child": lambda layout: part_of_children(layout),
}


def part_of_children(layout: PackedLayout) -> np.ndarray:
    """The chain of 12 above, and a part of its own for each piece below it."""
    top = layout.positions < 12
    top &= ~np.isin(layout.input_ids, [26, 27, 28])
    starts = ~top & top[layout.parent]
    return np.where(top, 0, np.cumsum(starts))


@pytest.mark.parametrize("cutting", CUTS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("heads_and_groups", [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_a_tree_that_is_cut_equals_the_whole_for_every_ratio_of_heads(heads_and_groups, keep, cutting):
    heads, groups = heads_and_groups
    layout = layout_of(TREE)
    part_of = np.asarray(CUTS[cutting](layout), np.int64)
    plan = Plan.of_parts(layout, part_of, np.full(int(part_of.max()) + 1, keep))
    assert plan.num_parts == {"in two": 2, "below every child": 4}.get(cutting, 3)
    tensors = inputs(layout.num_tokens, heads=heads, groups=groups, size=16)
    for rows_of in (consecutive, scattered):
        assert max(errors(plan, tensors, rows_of(plan))) <= 1e-12


@pytest.mark.slow
def test_bfloat16_parts_err_no_more_than_the_whole_in_bfloat16():
    parts: list[list[float]] = []
    at_once: list[list[float]] = []
    for seed in range(12):
        layout = layout_of(bushy_rows(np.random.default_rng(seed), rows=12, segment=8, levels=3))
        plan = uniform(layout, 16, KEEPS[seed % 3])
        one = uniform(layout, layout.num_tokens)
        assert plan.num_parts > 4 and one.num_parts == 1
        tensors = inputs(layout.num_tokens, size=16, dtype=torch.bfloat16, seed=seed)
        parts.append(errors(plan, tensors, consecutive(plan)))
        at_once.append(errors(one, tensors, consecutive(one)))
    for name, cut_up, plain in zip(NAMES, zip(*parts), zip(*at_once)):
        assert rms(cut_up) <= 1.5 * rms(plain), name


def test_gradients_are_added_up_in_float32_or_wider():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        cache = KVCache(3, torch.device("cpu"), gradients=True)
        for name, like in (("key", torch.zeros(5, 2, 4, dtype=dtype)), ("value", torch.zeros(5, 2, 8, dtype=dtype))):
            made = cache.buffer((0, name), like)
            assert made.value.shape == made.grad.shape == (3, *like.shape[1:])
            assert (made.value.dtype, made.grad.dtype) == (dtype, wide)
        size, wide_size = torch.finfo(dtype).bits // 8, torch.finfo(wide).bits // 8
        assert cache_bytes(cache) == 3 * 2 * (4 + 8) * (size + wide_size)


def test_a_thousand_small_gradients_are_not_lost_in_bfloat16():
    cache = KVCache(1, torch.device("cpu"), gradients=True)
    like = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    view = cache.view_of_rows(np.array([0]), np.array([-1]))
    view.read(0, like, like)
    for _ in range(1000):
        view.add_path_gradients(0, like + 1, like + 1)
    total = torch.zeros(1, 1, 1)
    cache.view_of_rows(np.zeros(0, np.int64), np.array([0])).collect(0, total, total.clone())
    assert float(total) == 1000.0  # bfloat16 stops at 256


def test_a_carry_without_gradients_has_no_room_for_them():
    cache = KVCache(3, torch.device("cpu"), gradients=False)
    assert cache.buffer(0, torch.zeros(5, 2, 4)).grad is None and cache_bytes(cache) == 3 * 2 * 4 * 4


def test_room_that_is_made_later_keeps_what_is_there():
    cache = KVCache(2, torch.device("cpu"), gradients=True)
    key, value = torch.randn(2, 2, 1, 4)
    view = cache.view_of_rows(np.zeros(0, np.int64), np.array([1, 0]))
    view.write(0, key, value)
    path = cache.view_of_rows(np.array([1, 0]), np.array([-1]))
    path.add_path_gradients(0, key, value)
    before = cache.buffer((0, "key"), key).value
    cache.clear(slice(2, 2))
    assert cache.buffer((0, "key"), key).value is before
    cache.clear(slice(2, 7))
    got = path.read(0, key, value)
    assert torch.equal(got[0], key) and torch.equal(got[1], value)
    grads = torch.zeros_like(key), torch.zeros_like(value)
    view.collect(0, *grads)
    assert torch.equal(grads[0], key) and torch.equal(grads[1], value)
    assert cache_bytes(cache) == 4 * 7 * 4 * 4


def test_rows_are_a_slice_where_they_are_consecutive_and_ascend():
    cpu = torch.device("cpu")
    assert rows_on(cpu, np.array([3, 4, 5])) == slice(3, 6)
    assert rows_on(cpu, np.zeros(0, np.int64)) == slice(0, 0)
    for rows in ([5, 4, 3], [3, 5, 4, 6], [3, 5]):
        got = rows_on(cpu, np.array(rows))
        assert isinstance(got, torch.Tensor) and got.tolist() == rows


def test_rows_given_again_start_without_gradients():
    cache = KVCache(4, torch.device("cpu"), gradients=True)
    key, value = torch.randn(2, 4, 1, 4)
    view = cache.view_of_rows(np.arange(4), np.arange(4))
    view.write(0, key, value)
    view.add_path_gradients(0, key, value)
    cache.clear(slice(1, 3))
    grads = torch.zeros_like(key), torch.zeros_like(value)
    view.collect(0, *grads)
    for grad, given_up in zip(grads, (key, value)):
        assert torch.equal(grad[[0, 3]], given_up[[0, 3]]) and not grad[1:3].any()
