import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.layouts import LinearPrices, check_plan, layout_of, nested_forks
from treetrain.data.trajectory import Trajectory
from treetrain.planning.balance import dispatch
from treetrain.planning.budget import Bytes
from treetrain.planning.cost import ModelShape
from treetrain.planning.ideal import stats
from treetrain.planning.make import PART_TOKENS, make_plan
from treetrain.planning.partition import partition
from treetrain.planning.price import CostModel
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack
from treetrain.tree.stats import tree_stats

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)


def deep_rows(seed: int, rows: int = 30, length: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    out: list[list[int]] = []
    for number in range(rows):
        base = out[rng.integers(len(out))] if number else []
        out.append([*base[: rng.integers(0, len(base) + 1)], *rng.integers(0, 99, rng.integers(1, length)).tolist()])
    return out


def test_a_budget_in_tokens_is_the_partition_at_that_budget():
    layout, prices = layout_of(deep_rows(0)), LinearPrices()
    for budget in (100, "100", np.int64(100)):
        plan = make_plan(layout, prices, budget=budget)
        assert (plan.part_of == partition(layout, 100, prices.seconds).part_of).all()
        assert plan.peak_tokens <= 100


@given(st.integers(0, 10**6), st.floats(0.01, 1.2))
@settings(max_examples=60, deadline=None)
def test_a_budget_in_bytes_is_held_and_nearly_used(seed, share):
    layout, prices = layout_of(deep_rows(seed)), LinearPrices()
    whole = prices.peak_bytes(partition(layout, layout.num_tokens, prices.seconds))
    smallest = prices.peak_bytes(partition(layout, 1, prices.seconds))  # below it there is nothing to find
    limit = int(max(share * whole, smallest))
    prices.plans = 0
    plan = make_plan(layout, prices, budget=Bytes(limit))
    check_plan(plan)
    assert prices.peak_bytes(plan) <= limit
    if share < 1:
        tokens = plan.explanation()["budget_tokens"]
        more = partition(layout, int(1.1 * tokens) + 2, prices.seconds)
        assert prices.peak_bytes(plan) >= 0.97 * limit or prices.peak_bytes(more) > 0.95 * limit
    elif limit >= whole:
        assert plan.num_parts == 1


def test_a_budget_in_bytes_is_found_with_few_plans():
    layout, prices = layout_of(deep_rows(3, rows=300, length=200)), LinearPrices()
    for share in (0.02, 0.1, 0.5):
        looked_at = []
        prices.peak_bytes = lambda plan, seen=looked_at: seen.append(plan) or 1000.0 * plan.peak_tokens + 5000.0
        make_plan(layout, prices, budget=Bytes(int(share * 1000 * layout.num_tokens)))
        assert len(looked_at) <= 10


@pytest.mark.parametrize("count", [10, 1000, 20_000])
def test_bytes_below_the_smallest_possible_are_refused_with_a_number_that_is_enough(count):
    layout, prices = nested_forks(count), LinearPrices()
    with pytest.raises(ValueError, match=r"budget=17 B.*needs") as caught:
        make_plan(layout, prices, budget="17B")
    needed = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    plan = make_plan(layout, prices, budget=Bytes(needed))
    assert prices.peak_bytes(plan) <= needed
    with pytest.raises(ValueError, match="needs"):
        make_plan(layout, prices, budget=Bytes(needed - 1))


@pytest.mark.parametrize("budget", [0, -1, "0", "none"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ValueError, match=f"budget={budget!r}"):
        make_plan(layout_of([[1, 2]]), LinearPrices(), budget=budget)


@pytest.mark.parametrize("ranks", [0, -2, True, 1.5, None])
def test_a_number_of_ranks_that_is_none_is_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks}"):
        make_plan(layout_of([[1, 2]]), LinearPrices(), ranks=ranks)


def test_without_a_budget_parts_are_large_and_nothing_is_recomputed():
    rng = np.random.default_rng(0)
    layout = layout_of([[7, number, *rng.integers(0, 99, 998).tolist()] for number in range(40)])
    plan = make_plan(layout, LinearPrices())
    assert plan.sizes[plan.kept].tolist() == [1] and plan.num_parts == 6
    assert plan.recomputed_tokens == 0 and plan.peak_tokens <= PART_TOKENS + 1
    assert plan.explanation()["budget_tokens"] is None


def test_what_the_device_has_free_bounds_a_plan_without_a_budget():
    layout, prices = layout_of(deep_rows(1)), LinearPrices()
    roomy = make_plan(layout, prices, free_bytes=10**9)
    assert roomy.num_parts == 1
    tight = make_plan(layout, prices, free_bytes=100_000)
    assert prices.peak_bytes(tight) <= 100_000 and tight.num_parts > 1
    with pytest.raises(ValueError, match="needs"):
        make_plan(layout, prices, free_bytes=3)


def test_a_tree_is_planned_for_its_trained_predictions_and_a_shape_by_formula():
    rows = [
        Trajectory([1, 2, 3, 4], loss_weights=[0, 1, 1, 0]),
        Trajectory([1, 2, 5, 6], loss_weights=[0, 0, 0, 0]),
    ]
    tree = build_tree(rows)
    plan = make_plan(tree, SHAPE, budget=2)
    assert plan.layout.tree_index.tolist() == [0, 1]  # what predicts tokens 2 and 3 of the first row
    assert plan.explanation()["seconds"] == CostModel.from_shape(SHAPE).seconds(plan)
    laid_out = make_plan(pack(tree, tree.trained_edges()[0] > 0), CostModel.from_shape(SHAPE), budget=2)
    assert (laid_out.part_of == plan.part_of).all()


@pytest.mark.parametrize("budget", [None, 1, "1GiB"])
def test_an_empty_batch_has_an_empty_plan(budget):
    plan = make_plan(build_tree([]), SHAPE, budget=budget)
    assert plan.num_parts == 0
    assert plan.explain()


def test_rows_are_planned_and_counted_as_their_tree_is_and_shapes_go_by_their_names():
    rows, shape = deep_rows(3), ModelShape.named("qwen3-8b")
    tree = build_tree(rows)
    expected = make_plan(tree, CostModel.from_shape(shape), budget="8GiB")
    for batch in (rows, [np.array(row) for row in rows], [Trajectory(row) for row in rows], tree):
        for cost in ("qwen3-8b", "Qwen3-8B", shape):
            plan = make_plan(batch, cost, budget="8GiB")
            assert (plan.part_of == expected.part_of).all()
        over = make_plan(batch, "qwen3-8b", ranks=3)
        assert [own.tolist() for own in over.trajectories] == [o.tolist() for o in dispatch(batch, "qwen3-8b", 3)]
        assert stats(batch, "qwen3-8b") == tree_stats(tree, shape) and stats(batch) == tree_stats(tree)


@pytest.mark.parametrize("call", [make_plan, lambda rows, cost: dispatch(rows, cost, 2), stats])
def test_an_unknown_name_of_a_shape_is_refused_with_those_that_there_are(call):
    with pytest.raises(ValueError, match=r"no model shape is named 'qwen9'; there are qwen3-0\.6b, "):
        call([[1, 2], [1, 3]], "qwen9")
