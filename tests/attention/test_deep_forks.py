"""Chains with small subtrees at many forks: few calls, every pair once, in seconds."""

import time
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedules import (
    calls,
    check,
    comb,
    combs,
    errors_of_each,
    first_pass,
    forest_from_parents,
    pairs_computed,
    random_comb,
    regular_comb,
    star,
    straight,
)

from treetrain.check.forests import runs, seeded
from treetrain.core.attention import schedule as schedule_module
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.reference import reference_attention
from treetrain.core.attention.schedule import Forest, ForkBlocks, Schedule, fork_blocks, make_schedule, path_tops

CALL_PAIRS = (0.0, 64.0, 2e3, 1e5)


@pytest.fixture
def small_bounds(monkeypatch):
    """Sets the sizes of tiles and blocks, so that small trees reach every decision."""

    def bounds(tile: int, block_path: int, tile_path: int) -> None:
        monkeypatch.setattr(schedule_module, "TILE", tile)
        monkeypatch.setattr(schedule_module, "MAX_TILE_PATH", tile_path)
        monkeypatch.setattr(schedule_module, "MAX_BLOCK_PATH", block_path)

    return bounds


def blocks_in(forest: Forest, schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """The rectangles whose queries hang off several tokens of the chain."""
    parent = parents(forest)
    found = []
    for q0, q1, k0, k1 in schedule.rectangles:
        outside = parent[q0:q1][parent[q0:q1] < q0]
        if len(np.unique(outside)) > 1:
            found.append((q0, q1, k0, k1))
    return found


def parents(forest: Forest) -> np.ndarray:
    """Each token's parent, -1 at roots."""
    parent = np.arange(-1, len(forest.ends) - 1)
    above = forest.segment_parent
    parent[forest.segment_start[:-1]] = np.where(above >= 0, forest.segment_start[above + 1] - 1, -1)
    return parent


@pytest.mark.few(2)
@pytest.mark.parametrize("tile", [1, 3, 8])
@pytest.mark.parametrize(("block_path", "tile_path"), [(0, 0), (5, 0), (30, 8), (512, 1024)])
def test_every_visible_pair_of_a_comb_is_in_exactly_one_call(small_bounds, tile, block_path, tile_path):
    small_bounds(tile, block_path, tile_path)
    blocks = [0]

    @seeded(f"{tile} {block_path}")
    @runs(15, derandomize=False)
    @given(combs(), st.sampled_from(CALL_PAIRS))
    def every_comb(forest, call_pairs):
        schedule = make_schedule(forest, call_pairs=call_pairs)
        check(forest, schedule)
        blocks[0] += len(blocks_in(forest, schedule))

    every_comb()
    if block_path == 0:
        assert blocks[0] == 0
    elif tile_path <= 8:  # paths that no region may have: blocks are the way to save calls
        assert blocks[0] > 0


def by_hand(forest: Forest, tile: int, lengths: tuple[int, ...], bound: int) -> set[tuple[int, int, float]]:
    """(first fork, last fork, cost) of the blocks, found by trying every first fork of every last one."""
    start, parent, end = forest.segment_start, forest.segment_parent, forest.ends[forest.segment_start[:-1]]
    found = set()
    for last in range(len(parent) - 1):
        above = [last]  # forks from the last one up its chain, as long as the paths below stay within the bound
        while parent[above[-1]] == above[-1] - 1 and parent[above[-1]] >= 0:
            above.append(above[-1] - 1)
        if parent[last + 1] != last:
            continue
        for length in lengths:
            fit = []
            for first in above:
                tokens = np.arange(end[last + 1], end[first])
                base = forest.depth[start[first + 1]]
                if len(tokens) > length * tile or max(forest.depth[tokens] - base) >= bound:
                    break
                fit.append(first)
            if fit and fit[-1] < last:
                found.add((fit[-1], last, cost_by_hand(forest, fit[-1], last, above[-1], tile)))
    return found


def cost_by_hand(forest: Forest, first: int, last: int, top: int, tile: int) -> float:
    start, end = forest.segment_start, forest.ends[forest.segment_start[:-1]]
    tokens = np.arange(end[last + 1], end[first])
    base = forest.depth[start[first + 1]]
    pieces = -(-len(tokens) // tile)
    path = float((forest.depth[tokens] - base).mean()) + (forest.depth[start[last + 1]] - base) / (2 * pieces)
    return round(1000.0 * len(tokens) * (start[first + 1] - start[top]) + pieces * tile * path, 6)


def blocks_of(forest: Forest) -> ForkBlocks:
    deepest = [forest.depth[s : forest.ends[s]].max() for s in forest.segment_start[:-1]]
    return fork_blocks(
        start=forest.segment_start,
        parent=forest.segment_parent,
        end=forest.ends[forest.segment_start[:-1]],
        depth=forest.depth,
        max_depth=np.array(deepest),
        rectangle_cost=lambda queries, keys: 1000.0 * queries * keys,
        tiles_cost=lambda slots, path: slots * path,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("bound", [3, 12, 100])
def test_blocks_are_the_longest_that_fill_their_tiles_with_paths_below_the_bound(monkeypatch, bound):
    monkeypatch.setattr(schedule_module, "MAX_BLOCK_PATH", bound)
    monkeypatch.setattr(schedule_module, "BLOCK_TILES", (1, 2, 5))
    found_any = [0]

    @seeded(str(bound))
    @runs(30, derandomize=False)
    @given(combs(max_chain=25, max_leg=4), st.sampled_from([2, 5]))
    def every_comb(forest, tile):
        with mock.patch.object(schedule_module, "TILE", tile):
            blocks = blocks_of(forest)
        found = {
            (blocks.first[b], last, round(blocks.cost[b], 6))
            for last in range(len(forest.segment_parent))
            for b in range(blocks.offset[last], blocks.offset[last + 1])
        }
        assert found == by_hand(forest, tile, (1, 2, 5), bound)
        assert len(found) == len(blocks.first)
        found_any[0] += len(found)

    every_comb()
    assert found_any[0] > 0


def test_the_top_of_a_path_of_first_children():
    #                                 0   1  2  3  4   5  6
    assert path_tops(np.array([-1, 0, 1, 1, 0, -1, 5])).tolist() == [0, 0, 0, 3, 4, 5, 5]


def test_a_large_leg_gets_calls_of_its_own_and_the_small_ones_beside_it_share_theirs():
    legs = {i: [straight(1)] for i in range(1500, 3900)}
    legs[2500] = [straight(2500), straight(1)]
    forest = forest_from_parents(np.array(comb(4000, legs)))
    schedule = make_schedule(forest, call_pairs=8e3)
    assert pairs_computed(schedule) == int((forest.depth + 1).sum())
    assert (first_pass(schedule) == 1).all()
    assert 2500 in [stop - start for start, stop in schedule.chains]
    assert len(blocks_in(forest, schedule)) >= 2 and calls(schedule) < 40
    large = int(forest.segment_start[int(np.argmax(np.diff(forest.segment_start) == 2500))])
    owners = [(q0, q1) for q0, q1, _, _ in schedule.rectangles if q0 <= large < q1]
    assert owners == [(large, large + 2501)]  # with its sibling, and with no other fork's


def outputs(forest: Forest, dtype: torch.dtype, call_pairs: float) -> list[float]:
    """Relative errors of the output and the three gradients against the dense reference in float64."""
    tokens, generator = len(forest.ends), torch.Generator().manual_seed(3)
    exact = [torch.randn(tokens, heads, 8, generator=generator).double() for heads in (2, 1, 1, 2)]
    ends = torch.from_numpy(forest.ends)
    attention = RectangleAttention(forest, call_pairs=call_pairs)

    def both_ways(attend, tensors):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    expected = both_ways(lambda q, k, v: reference_attention(q, k, v, ends, 0.4), exact)
    got = both_ways(lambda q, k, v: attention(q, k, v, 0.4), [x.to(dtype) for x in exact])
    return errors_of_each(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_random_combs_equal_the_reference(small_bounds, dtype, tolerance):
    small_bounds(4, 20, 8)

    @runs(20)
    @given(combs(max_chain=50), st.sampled_from(CALL_PAIRS))
    def every_comb(forest, call_pairs):
        assert max(outputs(forest, dtype, call_pairs)) <= tolerance

    every_comb()


@pytest.mark.slow
@pytest.mark.parametrize(
    "forest",
    [
        forest_from_parents(np.array(random_comb(np.random.default_rng(4), 1200, 0.1, 20))),
        regular_comb(1400, 1, 1),
        regular_comb(1500, 10, 5),
    ],
    ids=["random", "of single tokens", "of segments"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_a_comb_deeper_than_any_tile_equals_the_reference(forest, dtype, tolerance):
    assert blocks_in(forest, make_schedule(forest, call_pairs=8e3))
    assert max(outputs(forest, dtype, 8e3)) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("call_pairs", [2e3, 0.0, 1e5])
def test_a_hundred_thousand_nested_forks_take_seconds_to_schedule_and_few_calls(call_pairs):
    forest = regular_comb(100_001, 1, 1)
    started = time.process_time()
    schedule = make_schedule(forest, call_pairs=call_pairs)
    assert time.process_time() - started < 10
    assert pairs_computed(schedule) == int((forest.depth + 1).sum())
    assert (first_pass(schedule) == 1).all()
    assert call_pairs == 0.0 or calls(schedule) <= 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forest", "most"),
    [
        (regular_comb(40_001, 1, 5), 250),
        (star(10, 10_000, 1), 4),
        (star(10, 10_000, 20), 5),
        (star(3000, 10_000, 1), 4),
    ],
    ids=["caterpillar of 5-token legs", "star of tokens", "star of rows", "star on a long stem"],
)
def test_caterpillars_and_stars_take_seconds_to_schedule_and_few_calls(forest, most):
    started = time.process_time()
    schedule = make_schedule(forest, call_pairs=8e3)
    assert time.process_time() - started < 10
    assert pairs_computed(schedule) == int((forest.depth + 1).sum())
    assert (first_pass(schedule) == 1).all()
    assert calls(schedule) <= most


def test_masks_stay_small_on_deep_combs():
    forest = regular_comb(20_001, 1, 1)
    schedule = make_schedule(forest, call_pairs=1e5)
    scores = sum(batch.mask.size for batch in schedule.batches)
    assert scores <= 2 * len(forest.ends) * (schedule_module.TILE + schedule_module.MAX_BLOCK_PATH / 2)


def test_small_regions_side_by_side_share_tiles():
    fork = [-1, 0, 0]
    forest = forest_from_parents(np.array(comb(100, {99: [straight(1500)] + [fork] * 200})))
    schedule = make_schedule(forest, call_pairs=8e3)
    check(forest, schedule)
    assert sum(len(batch.query_length) for batch in schedule.batches) <= 1 + 600 // 64
