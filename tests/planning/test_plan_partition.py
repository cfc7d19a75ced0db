import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import LinearPrices, check_plan, layout_of, nested_forks, star, uniform
from treetrain.check.bench import heights
from treetrain.check.forests import forests
from treetrain.core.planning.partition import _NEAR, _Cutter, _groups_taken, pack_bins, partition, whole_trees

RUNS = settings(max_examples=100, deadline=None)
PRICES = st.builds(
    LinearPrices,
    part=st.sampled_from([0.0, 1.0, 10.0, 44.0]),
    again=st.sampled_from([0.0, 0.35, 5.0]),
    prefill=st.sampled_from([0.0, 10.0]),
)


def larger_forest(seed: int, rows: int = 40, length: int = 60) -> list[list[int]]:
    """Rows that leave earlier ones anywhere: deep and bushy."""
    rng = np.random.default_rng(seed)
    out: list[list[int]] = []
    for number in range(rows):
        base = out[rng.integers(len(out))] if number and rng.random() < 0.95 else []
        out.append([*base[: rng.integers(0, len(base) + 1)], *rng.integers(0, 99, rng.integers(1, length)).tolist()])
    return out


@given(forests(max_rows=12, max_length=20), st.integers(1, 40), PRICES)
@RUNS
def test_every_plan_is_a_partition_within_its_budget(rows, budget, prices):
    layout = layout_of(rows)
    plan = partition(layout, budget, prices.seconds)
    check_plan(plan)
    assert plan.peak_tokens <= budget
    assert plan.recomputed_tokens >= int((heights(layout) > budget).sum())


@given(st.integers(0, 10**6), st.floats(0.3, 1.0))
@settings(max_examples=40, deadline=None)
def test_the_largest_small_subtrees_that_let_all_be_kept_are_the_largest(seed, share):
    layout = layout_of(larger_forest(seed, rows=15))
    height = heights(layout)
    budget = max(1, int(share * layout.num_tokens))
    cutter = _Cutter(layout, budget, budget, 0)
    found, below = cutter.largest_small(), layout.ends - np.arange(layout.num_tokens)
    has_forks_below = np.repeat(layout.ends[layout.segment_start[1:] - 1] > layout.segment_start[1:], cutter.length)
    for region, (first, size) in enumerate(zip(cutter.region_start.tolist(), cutter.region_size.tolist())):
        tokens = np.arange(first, first + size)
        assert height[first] <= budget
        if not cutter.is_big[region]:
            continue

        def fits(small: int, tokens: np.ndarray = tokens) -> bool:
            inner = tokens[(below[tokens] > small) & has_forks_below[tokens]]
            return small + (layout.positions[inner] + 1 - layout.positions[tokens[0]]).max(initial=0) <= budget

        assert fits(int(found[region])) and (found[region] == cutter.target or not fits(int(found[region]) + 1))


@given(st.integers(0, 10**6), st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_every_way_of_cutting_is_a_partition_within_the_budget(seed, share):
    layout = layout_of(larger_forest(seed, rows=20))
    budget = max(1, int(share * layout.num_tokens))
    cutter = _Cutter(layout, budget, budget, 0)
    rng = np.random.default_rng(seed)
    plan = cutter.plan(rng.integers(0, budget + 1, len(cutter.is_big)), recompute=bool(seed % 3 == 0))
    check_plan(plan)
    assert plan.peak_tokens <= budget


@given(forests(), st.integers(0, 30))
@RUNS
def test_a_tree_within_the_budget_is_one_part(rows, more):
    layout = layout_of(rows)
    plan = partition(layout, max(layout.num_tokens, 1) + more, LinearPrices().seconds)
    assert plan.num_parts == (1 if layout.num_tokens else 0)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_what_is_recomputed_is_never_more_than_what_has_more_below_than_the_budget(seed):
    # Recomputed parts export inner tokens alone, whatever they take in.
    layout = layout_of(larger_forest(seed))
    budget = layout.num_tokens // 5
    plan = partition(layout, budget, LinearPrices(again=0.0).seconds)
    below = layout.ends - np.arange(layout.num_tokens)
    assert plan.recomputed_tokens <= (below > budget).sum()


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_nothing_is_recomputed_where_a_path_and_a_small_subtree_fit_together_and_that_is_expensive(seed):
    layout = layout_of(larger_forest(seed))
    longest = int(heights(layout).max())
    budget = max(layout.num_tokens // 4, longest)
    plan = partition(layout, budget, LinearPrices(again=1e6).seconds)
    assert plan.recomputed_tokens == int((heights(layout) > budget).sum()) == 0


@given(st.integers(0, 10**6), st.floats(0.1, 1.0))
@settings(max_examples=40, deadline=None)
def test_recomputation_reaches_the_least_possible_where_it_is_expensive(seed, share):
    layout = layout_of(larger_forest(seed))
    budget = max(1, int(share * heights(layout).max()))
    plan = partition(layout, budget, LinearPrices(again=1e6).seconds)
    assert plan.recomputed_tokens == int((heights(layout) > budget).sum())


@given(st.integers(0, 10**6), st.floats(0.05, 0.9), PRICES)
@settings(max_examples=40, deadline=None)
def test_a_plan_is_no_slower_than_all_parts_recomputed_but_for_what_less_recomputation_may_cost(seed, share, prices):
    layout = layout_of(larger_forest(seed))
    budget = max(1, int(share * layout.num_tokens))
    found = partition(layout, budget, prices.seconds)
    assert prices.seconds(found) <= (1 + _NEAR) * prices.seconds(uniform(layout, budget)) + 1e-9


def test_small_siblings_share_parts():
    layout = star(100, 20)
    plan = partition(layout, 401, LinearPrices().seconds)
    assert plan.num_parts == 6  # the kept root and five parts of twenty leaves
    assert plan.kept.sum() == 1 and plan.recomputed_tokens == 0


def test_kept_parts_below_one_another_are_joined_where_everything_below_still_fits():
    # A chain of 29 forks with a leg of 50 tokens at each, and one more at its end: all legs are parts.
    layout = layout_of([[*range(fork + 1), 99, *range(49)] for fork in range(30)])
    plan = partition(layout, 80, LinearPrices(again=1e6).seconds)
    assert plan.kept.sum() == 1 and plan.sizes[plan.kept].tolist() == [29]
    assert plan.num_parts == 31 and plan.recomputed_tokens == 0


def test_a_kept_part_leaves_a_child_alone_that_would_take_the_room_of_many_others():
    leaf = [*range(9)]
    rows = [[7, number, *leaf] for number in range(100, 200)]
    rows += [[7, 8, *range(39), number, *leaf] for number in range(10)]
    plan = partition(layout_of(rows), 100, LinearPrices(again=1e6).seconds)
    assert plan.sizes[plan.kept].tolist() == [1, 40]
    assert plan.num_parts == 1 + 12 + 1 + 2


@pytest.mark.parametrize(
    ("owned", "most", "room", "must", "taken"),
    [
        ([2, 3, 4, 500], [2, 3, 4, 100], 150, 0, 3),  # 4 parts below instead of 7
        ([40, 400], [40, 10], 100, 0, 0),  # 7 instead of 5
        ([29, 200], [29, 100], 100, 0, 0),  # the larger ones would not fit any more
        ([2, 3, 4], [2, 3, 4], 100, 95, 2),  # what else is below must fit too
        ([2, 3, 4], [2, 3, 4], 100, 0, 3),
        ([], [], 10, 0, 0),
    ],
)
def test_a_kept_part_takes_in_as_many_small_subtrees_as_save_parts(owned, most, room, must, taken):
    assert _groups_taken(owned, most, room, must, 10**9) == taken


def test_a_recomputed_part_takes_in_subtrees_that_hang_off_it_anywhere():
    layout = nested_forks(400)  # 799 tokens: a leaf at every token of a path
    plan = partition(layout, 100, LinearPrices().seconds)
    assert plan.num_parts <= 9  # 8 are the fewest that hold 799 tokens
    assert plan.recomputed_tokens <= 400 - 50


def test_a_path_longer_than_the_budget_is_cut_into_full_chunks_the_last_a_leaf():
    plan = partition(layout_of([list(range(100))]), 30, LinearPrices().seconds)
    assert sorted(plan.sizes.tolist()) == [10, 30, 30, 30]
    assert plan.sizes[~plan.is_inner].tolist() == [30]
    assert plan.recomputed_tokens == 70


@given(forests(max_rows=12, max_length=20), st.integers(1, 12))
@RUNS
def test_parts_need_not_be_larger_than_asked_where_nothing_is_recomputed_for_it(rows, target):
    layout = layout_of(rows)
    plan = partition(layout, None, LinearPrices().seconds, part_tokens=target)
    check_plan(plan)
    assert plan.recomputed_tokens == 0
    inner = layout.ends - np.arange(layout.num_tokens) > target
    assert plan.peak_tokens <= inner.sum() + max(target, int(heights(layout).max(initial=0)))


def test_a_forest_of_small_trees_is_cut_into_groups_of_whole_trees():
    rng = np.random.default_rng(0)
    rows = [[number, *rng.integers(0, 9, rng.integers(1, 60)).tolist()] for number in range(300)]
    layout = layout_of(rows)
    plan = partition(layout, None, LinearPrices().seconds, part_tokens=500)
    assert (plan.parent == -1).all() and plan.sizes.max() <= 500
    assert plan.num_parts == -(-layout.num_tokens // 500)
    shared = partition(layout_of([[7, 7, *row] for row in rows]), None, LinearPrices().seconds, part_tokens=500)
    assert shared.sizes[shared.kept].tolist() == [2] and shared.recomputed_tokens == 0


def test_the_size_asked_for_gives_way_where_it_would_cost_recomputation():
    layout = layout_of([[*range(50), leaf, *range(39)] for leaf in range(4)])
    prices = LinearPrices()
    plan = partition(layout, 95, prices.seconds, part_tokens=10)
    assert plan.recomputed_tokens == 0  # paths are 90 tokens: leaves stay whole
    tight = partition(layout, 60, prices.seconds, part_tokens=10)
    assert prices.seconds(tight) == prices.seconds(partition(layout, 60, prices.seconds))


@given(forests(max_rows=12), st.integers(1, 40))
@RUNS
def test_groups_of_whole_trees_cut_nothing_and_keep_the_order(rows, target):
    layout = layout_of(rows)
    plan = whole_trees(layout, target)
    check_plan(plan)
    assert (plan.parent == -1).all() and (np.diff(plan.part_of) >= 0).all()
    trees = np.bincount(plan.part_of[layout.parent < 0], minlength=plan.num_parts)
    assert ((plan.sizes <= target) | (trees == 1)).all()
    assert (
        plan.sizes[:-1]
        + np.diff(np.append(np.flatnonzero(layout.parent < 0), layout.num_tokens))[np.cumsum(trees)[:-1]]
        > target
    ).all(), "a group takes the next tree where that fits"


@pytest.mark.parametrize("rows", [[], [[]], [[5]], [[1], [2], [3]], [[1, 2], [1, 3], [4]]], ids=str)
@pytest.mark.parametrize("budget", [1, 2, 100])
def test_empty_and_tiny_batches_have_plans(rows, budget):
    plan = partition(layout_of(rows), budget, LinearPrices().seconds)
    check_plan(plan)
    assert plan.peak_tokens <= budget
    assert plan.num_parts == 0 if not plan.layout.num_tokens else plan.num_parts >= 1


@pytest.mark.parametrize("given", [{"budget_tokens": 0}, {"budget_tokens": None, "part_tokens": 0}])
def test_less_than_a_token_is_refused(given):
    with pytest.raises(ValueError, match="0 tokens"):
        partition(layout_of([[1, 2]]), seconds=LinearPrices().seconds, **given)


@pytest.mark.few(2)
@pytest.mark.parametrize("forks", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [None, 0.2, 0.08, 0.01])
def test_many_nested_forks_are_planned_in_seconds(share, forks):
    layout, budget = nested_forks(forks), share and int(share * forks)
    start = time.process_time()
    plan = partition(layout, budget, LinearPrices().seconds, part_tokens=None if budget else 8_192)
    assert time.process_time() - start < forks / 5_000
    assert plan.peak_tokens <= (budget or layout.num_tokens)
    if budget:
        assert plan.num_parts <= 1.1 * layout.num_tokens / budget + 1
        assert plan.recomputed_tokens <= forks


@pytest.mark.parametrize("size", [1, 20])
@pytest.mark.parametrize("budget", [None, 8_192, 100])
def test_a_star_of_ten_thousand_leaves_is_packed_full(size, budget):
    layout = star(10_000, size)
    start = time.process_time()
    plan = partition(layout, budget, LinearPrices().seconds, part_tokens=None if budget else 8_192)
    assert time.process_time() - start < 5
    room = (budget or 8_192) - (1 if budget else 0)
    assert plan.num_parts <= -(-10_000 // (room // size)) + 1
    assert plan.recomputed_tokens <= 1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.booleans())
@RUNS
def test_bins_hold_every_item_within_the_capacity(sizes, capacity, even):
    bin_of, loads = pack_bins(sizes, capacity, even=even)
    assert loads == (np.bincount(bin_of, sizes, len(loads)).tolist() if sizes else [])
    assert all(load <= capacity or bin_of.count(number) == 1 for number, load in enumerate(loads))
    assert len(loads) == len(pack_bins(sizes, capacity)[1])


def test_few_bins_are_filled_evenly_where_that_is_asked_for():
    assert max(pack_bins([10] * 11, 100, even=True)[1]) == 60
    assert max(pack_bins([10] * 11, 100)[1]) == 100
