import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import LinearPrices, check_plan, layout_of, nested_forks
from treetrain.check.forests import trajectories
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.make import PART_TOKENS, Bytes, parse_budget
from treetrain.core.planning.partition import partition
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.models.work import stats, tree_stats
from treetrain.parallel.balance import dispatch
from treetrain.shapes import ModelShape, make_plan
from treetrain.simulation.rank_plans import plan_ranks

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)


PRICES = CostModel.from_shape(SHAPE)


def bushy(rows: int = 64, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*range(20), k // 4, *rng.integers(0, 99, 30).tolist()] for k in range(rows)]


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


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0.01, 1.2))
@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("count", [10, 1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_bytes_below_the_smallest_possible_are_refused_with_a_number_that_is_enough(count):
    layout, prices = nested_forks(count), LinearPrices()
    with pytest.raises(ValueError, match=r"budget=17 B.*needs") as caught:
        make_plan(layout, prices, budget="17B")
    needed = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    plan = make_plan(layout, prices, budget=Bytes(needed))
    assert prices.peak_bytes(plan) <= needed
    with pytest.raises(ValueError, match="needs"):
        make_plan(layout, prices, budget=Bytes(needed - 1))


def test_without_a_budget_parts_are_large_and_nothing_is_recomputed():
    rng = np.random.default_rng(0)
    layout = layout_of([[7, number, *rng.integers(0, 99, 998).tolist()] for number in range(40)])
    plan = make_plan(layout, LinearPrices())
    assert plan.sizes[plan.kept].tolist() == [1] and plan.num_parts == 6
    assert plan.recomputed_tokens == 0 and plan.peak_tokens <= PART_TOKENS["cpu"] + 1
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
        assert stats(batch, "qwen3-8b") == tree_stats(tree, shape.counts()) and stats(batch) == tree_stats(tree)


@pytest.mark.parametrize("call", [make_plan, lambda rows, cost: dispatch(rows, cost, 2), stats])
def test_an_unknown_name_of_a_shape_is_refused_with_those_that_there_are(call):
    with pytest.raises(ValueError, match=r"no model shape is named 'qwen9'; known: qwen3-0\.6b, "):
        call([[1, 2], [1, 3]], "qwen9")


@given(trajectories(max_rows=9), st.integers(2, 4), st.integers(2, 30))
@settings(max_examples=40, deadline=None)
def test_every_rank_has_a_plan_of_its_own_trajectories_within_the_budget(rows, ranks, budget):
    found = plan_ranks(build_tree(rows), PRICES, ranks, budget=budget)
    assert len(found.plans) == ranks
    for plan, numbers, tokens in zip(found.plans, found.dispatch.trajectories, found.dispatch.tokens):
        own = build_tree([rows[number] for number in numbers])
        same = make_plan(own, PRICES, budget=budget)
        assert plan.part_of.tolist() == same.part_of.tolist() and plan.layout.num_tokens == tokens
        assert plan.peak_tokens <= budget


def test_a_budget_too_small_for_a_rank_names_the_rank():
    with pytest.raises(ValueError, match=r"rank 0 of 2: budget=1\.0 KiB"):
        plan_ranks(build_tree(bushy()), PRICES, 2, budget="1KiB")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        (1, 1),
        (np.int32(4096), 4096),
        ("4096", 4096),
        (" 17 ", 17),
        ("8GiB", Bytes(8 * 2**30)),
        ("512MiB", Bytes(512 * 2**20)),
        ("1.5GB", Bytes(1_500_000_000)),
        ("900 MB", Bytes(900_000_000)),
        ("2e9B", Bytes(2_000_000_000)),
        ("2E+9 b", Bytes(2_000_000_000)),
        ("3 kib", Bytes(3072)),
        ("3 KB", Bytes(3000)),
        (".5tb", Bytes(500_000_000_000)),
        ("1TiB", Bytes(2**40)),
        (Bytes(7), Bytes(7)),
    ],
    ids=str,
)
def test_a_budget_is_tokens_or_bytes_with_a_unit(given, meant):
    assert parse_budget(given) == meant
    assert type(parse_budget(given)) is type(meant)


@pytest.mark.parametrize(
    "given",
    [
        True,
        0,
        -3,
        1.5,
        np.float64(2),
        "",
        "GiB",
        "1.5",
        "-8GiB",
        "8 GiBs",
        "8XB",
        "0B",
        "0",
        "0.1B",
        [4],
        Bytes(0),
        "1e999B",
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_what_was_given_and_what_is_accepted(given):
    with pytest.raises(ValueError, match="GiB") as caught:
        parse_budget(given)
    assert repr(given) in str(caught.value)
    assert "tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (8 * 2**30, "8.0 GiB"), (5 * 2**50, "5120.0 TiB")],
)
def test_bytes_print_in_the_largest_unit_that_leaves_a_whole(count, text):
    assert str(Bytes(count)) == text
