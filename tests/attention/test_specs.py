"""Windows, chunks, caps, sinks and unequal head sizes against the reference: whole trees, and parts with a cache."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts_by_hand import PartsByHand, Tensors
from schedules import errors_of_each

from support.plans import KEEPS, attention_forest, one_segment_per_part, uniform
from treetrain.check.forests import bushy_rows, forests, runs, seeded
from treetrain.check.linear import relative_error, rms
from treetrain.core.attention import rectangles
from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.kv_cache import KVCache, KVCacheView
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.reference import reference_attention, visible
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest, local_schedule
from treetrain.core.tree.layout import FULL, AttentionRange, PackedLayout, pack
from treetrain.core.tree.token_tree import build_tree

SCALE = 0.4
NAMES = ("out", "dq", "dk", "dv", "dsinks")
SIZES = (1, 2, 3, 5, 8, 13, 30, 1000)
SPECS = {
    "full": PLAIN_ATTENTION,
    **{f"window of {w}": AttentionSpec(AttentionRange(window=w)) for w in SIZES},
    **{f"chunks of {c}": AttentionSpec(AttentionRange(chunk=c)) for c in SIZES},
    "cap": AttentionSpec(softcap=1.5),
    "cap in a window": AttentionSpec(AttentionRange(window=5), softcap=0.7),
    "cap in chunks": AttentionSpec(AttentionRange(chunk=4), softcap=50.0),
}


def inputs(
    tokens: int, *, heads=4, groups=2, size=8, value_size=8, sinks=False, dtype=torch.float64, seed=0
) -> Tensors:
    """Query, key, value, the output's gradient, and perhaps sinks."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(tokens, heads, size), (tokens, groups, size), (tokens, groups, value_size)]
    shapes += [(tokens, heads, value_size), *([(heads,)] if sinks else [])]
    # Rounded to bfloat16 first: the same numbers in every dtype.
    return [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]


def both_ways(attend, tensors: Tensors) -> Tensors:
    """Output and the gradients of query, key, value and sinks."""
    leaves = [t.detach().clone().requires_grad_() for i, t in enumerate(tensors) if i != 3]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def by_reference(ends: np.ndarray, depth: np.ndarray, tensors: Tensors, spec: AttentionSpec) -> Tensors:
    def attend(q, k, v, sinks=None):
        return reference_attention(
            q,
            k,
            v,
            torch.from_numpy(ends),
            SCALE,
            depth=torch.from_numpy(depth),
            window=spec.visible_range.window,
            chunk=spec.visible_range.chunk,
            softcap=spec.softcap,
            sinks=sinks,
        )

    return both_ways(attend, tensors)


def whole_errors(forest: Forest, tensors: Tensors, spec: AttentionSpec, call_pairs: float | None) -> list[float]:
    attention = RectangleAttention(forest, call_pairs=call_pairs)
    got = both_ways(lambda q, k, v, sinks=None: attention(q, k, v, SCALE, 0, spec, sinks), tensors)
    expected = by_reference(forest.ends, forest.depth, [t.double() for t in tensors], spec)
    return errors_of_each(got, expected)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_random_forests_equal_the_reference(name, dtype, tolerance):
    @seeded(f"{name} {dtype}")
    @runs(8, derandomize=False)
    @given(forests(max_rows=12, max_length=40), st.sampled_from([0.0, 2e3, 1e9]), st.integers(0, 99), st.booleans())
    def every_forest(rows, call_pairs, seed, sinks):
        forest = attention_forest(rows)
        if len(forest.ends):
            tensors = inputs(len(forest.ends), sinks=sinks, dtype=dtype, seed=seed)
            errors = whole_errors(forest, tensors, SPECS[name], call_pairs)
            assert max(errors) <= tolerance, dict(zip(NAMES, errors))

    every_forest()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("visible_range", "rectangles"), [({"window": 600}, True), ({"window": 90}, False), ({"chunk": 700}, True)], ids=str
)
def test_long_paths_take_rectangles_and_tiles_and_equal_the_reference(visible_range, rectangles):
    visible_range = AttentionRange(**visible_range)
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 37, 1100).tolist()
    rows = [trunk, *[[*trunk[: 1 + 97 * i], 40, *rng.integers(0, 37, 50 * (i % 4)).tolist()] for i in range(10)]]
    rows += [[*trunk[:700], 41, *row] for row in bushy_rows(rng, rows=20, segment=9, levels=4)]
    forest = attention_forest(rows)
    tensors = inputs(len(forest.ends), heads=2, groups=1)
    for call_pairs in (0.0, 1e9):
        assert max(whole_errors(forest, tensors, AttentionSpec(visible_range), call_pairs)) <= 1e-12
    schedule = local_schedule(forest, visible_range, call_pairs=0.0)[0]
    assert schedule.batches and bool(schedule.rectangles) == rectangles


def test_a_window_costs_tokens_times_window_whatever_the_length_of_the_paths():
    length, window = 20_000, 256
    forest = attention_forest([list(range(37)) * (length // 37)])
    schedule = local_schedule(forest, AttentionRange(window=window))[0]
    masks = sum(batch.mask.size for batch in schedule.batches)
    pairs = masks + sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in schedule.rectangles)
    assert pairs <= 1.6 * length * window
    assert len(schedule.rectangles) + len(schedule.batches) <= length / 64


@pytest.mark.parametrize("visible_range", [AttentionRange(window=128), AttentionRange(chunk=128)], ids=str)
def test_a_part_reads_no_more_of_a_deep_path_than_its_tokens_see(visible_range, monkeypatch):
    reads: list[tuple[int | None, int]] = []
    read = KVCacheView.read

    def noting(self, layer, key, value, tail=None):
        found = read(self, layer, key, value, tail)
        reads.append((tail, len(found[0])))
        return found

    monkeypatch.setattr(KVCacheView, "read", noting)
    tokens, pairs = 64, []
    for path in (1000, 4000, 64_100):
        below = attention_forest([list(range(tokens))])
        forest = dataclasses.replace(below, depth=below.depth + path)
        view = KVCache(path + tokens, torch.device("cpu"), gradients=True).view_of_rows(
            np.arange(path), np.full(tokens, -1)
        )
        attention = RectangleAttention(forest, cache=view)
        tensors = [x.requires_grad_() for x in inputs(tokens, heads=2, groups=1)[:3]]
        attention(*tensors, 0.3, 0, AttentionSpec(visible_range)).sum().backward()
        tail, schedule = attention.calls(visible_range).tail, attention.calls(visible_range).schedule
        assert tail is not None and tail < 128
        pairs.append(
            sum(batch.mask.size for batch in schedule.batches)
            + sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in schedule.rectangles)
        )
    # Forward and backward read the same few rows: as many for a path of 64,100 as for one of 1,000.
    assert all(tail is not None and rows <= 127 for tail, rows in reads) and len(reads) == 6
    assert max(pairs) <= 3 * tokens * 128


def test_a_window_that_no_path_outgrows_runs_as_full_attention():
    tree, x = AttentionTree(attention_forest([[1, 2, 3], [1, 4]])), torch.zeros(4, 1, 8)
    for visible_range in (AttentionRange(window=3), AttentionRange(chunk=3), AttentionRange(window=1000)):
        tree(x, x, x, SCALE, spec=AttentionSpec(visible_range))
    attention = tree.backend(x, x, x)
    assert isinstance(attention, RectangleAttention) and list(attention._calls) == [FULL]
    tree(x, x, x, SCALE, spec=AttentionSpec(AttentionRange(window=2)))
    assert list(attention._calls) == [FULL, AttentionRange(window=2)]


@pytest.mark.slow
def test_the_capped_kernel_holds_few_scores_at_a_time(monkeypatch):
    forest = attention_forest(
        [list(range(37)) * 4, [1, 2, 3], *bushy_rows(np.random.default_rng(1), rows=30, segment=6, levels=4)]
    )
    tensors = inputs(len(forest.ends))
    for most in (1, 1000, 1 << 21):
        monkeypatch.setitem(rectangles.SCORES, "cpu", most)
        for call_pairs in (0.0, 2e3, 1e9):
            assert max(whole_errors(forest, tensors, SPECS["cap"], call_pairs)) <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (8, 24), (16, 1)])
@pytest.mark.parametrize("groups", [4, 1])
def test_head_sizes_may_differ(size, value_size, groups):
    forest = attention_forest(bushy_rows(np.random.default_rng(1), rows=20, segment=6, levels=4))
    tensors = inputs(len(forest.ends), groups=groups, size=size, value_size=value_size, sinks=True)
    for spec in (PLAIN_ATTENTION, SPECS["window of 5"], SPECS["cap"]):
        for call_pairs in (0.0, 2e3, 1e9):
            assert max(whole_errors(forest, tensors, spec, call_pairs)) <= 1e-12


# ---- parts


def layout_of(rows) -> PackedLayout:
    return pack(build_tree(rows), trim=False)


def parts_errors(plan, tensors: list[Tensors], specs: list[AttentionSpec], order: np.ndarray) -> list[float]:
    def backend(layout, view):
        return RectangleAttention(Forest.of(layout), cache=view, call_pairs=2e3)

    got = PartsByHand(plan, tensors, backend, order, SCALE, specs).run()
    layout, worst = plan.layout, [0.0] * len(NAMES)
    for spec, layer, found in zip(specs, tensors, got):
        expected = by_reference(layout.ends, layout.positions, [t.double() for t in layer], spec)
        worst = [max(a, b) for a, b in zip(worst, map(relative_error, found, expected))]
    return worst


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "full"])
def test_parts_equal_the_whole_tree(name):
    parts = []

    @seeded(name)
    @runs(4, derandomize=False)
    @given(forests(max_rows=12, max_length=40), st.integers(1, 12), st.sampled_from(KEEPS), st.integers(0, 99))
    def every_plan(rows, chunk, keep, seed):
        layout = layout_of(rows)
        if not layout.num_tokens:
            return
        # Two layers that ask different things of one cache.
        specs = [SPECS[name], SPECS["window of 3"]]
        tensors = [inputs(layout.num_tokens, value_size=5, sinks=layer == 0, seed=seed + layer) for layer in range(2)]
        for plan in (uniform(layout, chunk, keep), one_segment_per_part(layout, keep)):
            rows_given = int(plan.exported.sum())
            orders = np.arange(rows_given), np.random.default_rng(seed).permutation(rows_given + 5)
            errors = parts_errors(plan, tensors, specs, orders[seed % 2])
            parts.append(plan.num_parts)
            assert max(errors) <= 1e-12, dict(zip(NAMES, errors))

    every_plan()
    assert max(parts) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window of 5", "chunks of 5", "cap in a window"])
def test_bfloat16_errs_no_more_than_the_reference_run_in_bfloat16(name):
    spec = SPECS[name]
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for seed in range(10):
        layout = layout_of(bushy_rows(np.random.default_rng(seed), rows=12, segment=8, levels=3))
        tensors = inputs(layout.num_tokens, size=16, value_size=16, sinks=True, dtype=torch.bfloat16, seed=seed)
        truth = by_reference(layout.ends, layout.positions, [t.double() for t in tensors], spec)
        plan = uniform(layout, 16, KEEPS[seed % 3])
        # Sinks in float32, as models keep them: the parts' sum of a bfloat16 parameter's gradient is not attention's.
        wide = [*tensors[:4], tensors[4].float()]
        ours.append(parts_errors(plan, [wide], [spec], np.arange(int(plan.exported.sum()))))
        plain = both_ways(lambda *leaves: plain_bfloat16(layout, spec, *leaves), tensors)  # noqa: B023
        theirs.append([relative_error(a, b) for a, b in zip(plain, truth)])
    for part, tree, plain in zip(NAMES, zip(*ours), zip(*theirs)):
        assert rms(tree) <= 1.5 * rms(plain), part


def plain_bfloat16(layout: PackedLayout, spec: AttentionSpec, q, k, v, sinks):
    """Attention that rounds as a model's own eager attention does."""
    mask = visible(
        *map(torch.from_numpy, (layout.ends, layout.positions)), spec.visible_range.window, spec.visible_range.chunk
    )
    key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, key) * SCALE
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    scores = torch.cat([scores.masked_fill(~mask, float("-inf")), sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :-1], value)


def test_a_sight_has_one_size_of_at_least_one():
    for sizes in ({"window": 0}, {"chunk": -1}, {"window": 2, "chunk": 2}):
        with pytest.raises(ValueError, match="one size"):
            AttentionRange(**sizes)
