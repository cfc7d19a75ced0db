import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treetrain.check.forests import trajectories
from treetrain.core.planning.cost import CostModel
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.parallel.balance import PASS_TOKENS, Balancer, Dispatch, cut_evenly, dispatch, range_costs
from treetrain.shapes import ModelShape

SHAPE = ModelShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=128, tied=True)
PRICES = CostModel.from_shape(SHAPE)


def layout_of_rank(rows: list[Trajectory], numbers: np.ndarray):
    """The layout that a rank computes, from a tree of its own rows."""
    tree = build_tree([rows[number] for number in numbers])
    return pack(tree, tree.trained_edges()[0] > 0)


def seconds_of(layout, cost: CostModel = PRICES) -> float:
    tokens = cost.token_seconds(layout.positions).sum() + cost.speeds.graph_pass * layout.num_tokens / PASS_TOKENS
    return float(tokens + cost.row_seconds * len(layout.rows))


def balance(tree: TokenTree, cost: CostModel | None, ranks: int, **options) -> Dispatch:
    return Balancer(tree, cost, **options).over(ranks)


@given(trajectories(max_rows=9), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_every_row_has_one_rank_and_the_ranks_tokens_are_those_of_trees_of_their_rows(rows, ranks):
    found = balance(build_tree(rows), PRICES, ranks)
    assert len(found.trajectories) == ranks
    assert sorted(np.concatenate(found.trajectories).tolist()) == list(range(len(rows)))
    layouts = [layout_of_rank(rows, numbers) for numbers in found.trajectories]
    assert found.tokens.tolist() == [layout.num_tokens for layout in layouts]
    assert all((np.diff(numbers) > 0).all() for numbers in found.trajectories)
    for seconds, layout in zip(found.seconds, layouts):  # rows may be used by some between two users: a bound
        assert seconds >= seconds_of(layout) * (1 - 1e-9)
    whole = pack(build_tree(rows), build_tree(rows).trained_edges()[0] > 0)
    assert found.unique == whole.num_tokens


@given(trajectories(max_rows=9), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_where_all_rows_train_all_tokens_the_seconds_are_exact(rows, ranks):
    rows = [row.replace(loss_weights=None) for row in rows]
    found = balance(build_tree(rows), PRICES, ranks)
    for seconds, numbers in zip(found.seconds, found.trajectories):
        assert seconds == pytest.approx(seconds_of(layout_of_rank(rows, numbers)), rel=1e-9)


ROUNDED = [[1, 1, 0], [0, 1, 0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1, 0], [1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
"""Ranges of six tokens, whose shares of the batch come to different last bits when they are added up."""


@given(trajectories(max_rows=7), st.integers(2, 4))
@example([Trajectory(ids) for ids in ROUNDED], 4)
@settings(max_examples=15, deadline=None)
def test_no_cut_of_the_pre_order_has_a_faster_slowest_rank(rows, ranks):
    rows = [row.replace(loss_weights=None) for row in rows if len(row) > 1]
    tree = build_tree(rows)
    found = balance(tree, None, ranks)
    order = np.argsort([path[-2] for path in map(tree.path, range(len(rows)))], kind="stable")
    best = len(pack(tree).parent)
    for cuts in itertools.combinations_with_replacement(range(len(rows) + 1), ranks - 1):
        pieces = np.split(order, cuts)
        best = min(best, max(layout_of_rank(rows, piece).num_tokens for piece in pieces))
    assert found.tokens.max() == best


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_the_costliest_range_is_as_cheap_as_it_can_be(seed, units, ranges):
    rng = np.random.default_rng(seed)
    first, length = rng.integers(0, units, 20), rng.integers(0, 3, 20)
    last, weight = np.minimum(first + length, units - 1), rng.integers(0, 9, 20)
    opened, closed = (np.append(0, np.cumsum(np.bincount(at, weight, units))).astype(int) for at in (first, last))

    def cost(start: int, stop: int) -> int:
        return int(weight[(first < stop) & (last >= start)].sum()) if stop > start else 0

    cuts = [(0, *inner, units) for inner in itertools.combinations_with_replacement(range(units + 1), ranges - 1)]
    best = min(max(cost(*piece) for piece in itertools.pairwise(cut)) for cut in cuts)
    bounds = cut_evenly(opened, closed, ranges)
    assert tuple(bounds.tolist()) in cuts
    costs = range_costs(opened, closed, bounds)
    assert costs.tolist() == [cost(*piece) for piece in itertools.pairwise(bounds.tolist())]
    assert costs.max() == best


def test_a_bound_is_where_the_least_is_paid_twice():
    # Two trees of three and of four rows; every row costs 10, each tree's stem 3. 40 are needed by one range anyway.
    rows = [[7, 7, 7, 100 + row, *range(10)] for row in range(3)] + [
        [8, 8, 8, 200 + row, *range(10)] for row in range(4)
    ]
    found = balance(build_tree(rows), None, 2)
    assert found.tokens.sum() == found.unique and sorted(map(len, found.trajectories)) == [3, 4]


def test_rows_trained_by_one_of_many_cost_the_head_once_over_all_ranks():
    """The calls of a conversation: each row trains its own last tokens and repeats the others as context."""
    rows, text = [], [1]
    for call in range(8):
        text = [*text, *range(10 * call, 10 * call + 10)]
        rows.append(Trajectory(text, loss_weights=[0.0] * (len(text) - 5) + [1.0] * 5))
    head = CostModel.from_shape(SHAPE)
    found = balance(build_tree(rows), head, 3)
    for seconds, numbers in zip(found.seconds, found.trajectories):
        layout = layout_of_rank(rows, numbers)
        assert len(layout.rows) == 5 * len(numbers)
        assert seconds == pytest.approx(seconds_of(layout), rel=1e-9)


def test_a_tree_larger_than_a_share_is_split_and_its_path_is_paid_again():
    rows = [[*range(100), 200 + number, *range(number)] for number in range(40)]
    found = balance(build_tree(rows), None, 4)
    whole = 40 * 41 // 2 + 100 - 39 - 1  # a leaf's last token is not computed
    assert found.unique == whole and found.tokens.sum() == whole + 3 * 100
    assert found.seconds.max() < 1.1 * found.seconds.mean()


def test_ranks_above_the_number_of_trajectories_are_idle_and_untrained_rows_cost_nothing():
    rows = [Trajectory([1, 2, 3]), Trajectory([4, 5, 6], loss_weights=[0, 0, 0]), Trajectory([]), Trajectory([7])]
    found = balance(build_tree(rows), PRICES, 6)
    assert (found.tokens == 0).sum() == 5 and found.tokens.sum() == 2 == found.unique
    assert sorted(np.concatenate(found.trajectories).tolist()) == [0, 1, 2, 3]
    nothing = balance(build_tree(rows[1:]), PRICES, 2)
    assert nothing.seconds.tolist() == [0.0, 0.0] and nothing.unique == 0
    assert [len(numbers) for numbers in nothing.trajectories] == [2, 1]
    assert [len(numbers) for numbers in dispatch(build_tree([]), PRICES, 3)] == [0, 0, 0]


def test_no_rank_is_idle_while_another_has_rows_to_spare():
    found = balance(build_tree([[k, 1, 2] for k in range(12)]), None, 8)
    assert found.tokens.min() > 0 and sorted(map(len, found.trajectories)) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_whole_rows_are_balanced_where_training_needs_little_of_them():
    rows = [Trajectory(range(10 * k, 10 * k + 8), loss_weights=[0, 1] + [0] * 6) for k in range(8)]
    tree = build_tree(rows)
    assert balance(tree, None, 4).unique == 8
    found = balance(tree, None, 4, whole_rows=True)
    assert found.unique == 56 and found.tokens.tolist() == [14] * 4


@pytest.mark.parametrize("ranks", [0, -1, 2.5, True, None])
def test_a_number_of_ranks_that_is_none_is_refused(ranks):
    with pytest.raises(ValueError, match="ranks="):
        dispatch(build_tree([[1, 2]]), PRICES, ranks)
