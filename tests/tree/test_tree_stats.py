import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.core.tree.layout import FULL
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.models.work import cheapest_rows, distinct_rows, linear_work, tree_stats, tree_work


@st.composite
def weighted_rows(draw) -> list[Trajectory]:
    rows = []
    for ids in draw(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=9)):
        weights = draw(st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(ids), max_size=len(ids)))
        rows.append(Trajectory(ids, loss_weights=weights))
    return rows


class Count:
    """A model whose tokens, pairs and head rows cost so much each."""

    attention_ranges = (FULL,)

    def __init__(self, *prices: float) -> None:
        self.prices = prices

    def flops(self, tokens: int, pairs: dict, head_rows: int) -> float:
        return float(np.dot(self.prices, (tokens, pairs[FULL], head_rows)))


def brute_force_work(rows: list[Trajectory]):
    """Work of the tree and of the rows, from sets of prefixes."""
    needed, heads, linear = set(), set(), [0, 0, 0]
    for row in rows:
        ids, used = tuple(row.ids.tolist()), np.flatnonzero(row.weights)
        length = int(used.max(initial=0))
        linear = [linear[0] + length, linear[1] + length * (length + 1) // 2, linear[2] + len(used)]
        needed |= {ids[:n] for n in range(1, length + 1)}
        heads |= {ids[:t] for t in used}
    return (len(needed), {FULL: sum(map(len, needed))}, len(heads)), (linear[0], {FULL: linear[1]}, linear[2])


@settings(max_examples=40, deadline=None)
@given(weighted_rows())
def test_tree_and_linear_work_are_counted_over_sets_of_prefixes(rows):
    tree = build_tree(rows)
    ours, linear = brute_force_work(rows)
    assert tree_work(tree) == ours
    assert linear_work(tree) == linear
    best: dict[tuple, Trajectory] = {}
    for row in rows:
        name = tuple(row.ids.tolist())
        if name not in best or np.flatnonzero(row.weights).max(initial=0) > np.flatnonzero(best[name].weights).max(
            initial=0
        ):
            best[name] = row
    assert linear_work(tree, rows=distinct_rows(tree)) == brute_force_work(list(best.values()))[1]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(weighted_rows())
def test_the_cheapest_rows_are_those_that_no_other_extends_and_train_every_token_as_often(rows):
    found = [(tuple(row.ids.tolist()), row.weights) for row in cheapest_rows(build_tree(rows))]
    ids = {tuple(row.ids.tolist()) for row in rows}
    assert sorted(one for one, _ in found) == sorted(
        one for one in ids if one and not any(other[: len(one)] == one != other for other in ids)
    )

    def trained(rows):
        sums: dict[tuple, float] = {}
        for one, weights in rows:
            for t in np.flatnonzero(weights):
                sums[one[: t + 1]] = sums.get(one[: t + 1], 0.0) + weights[t]
        return sums

    assert trained(found) == trained((tuple(row.ids.tolist()), row.weights) for row in rows)


@settings(max_examples=50, deadline=None)
@given(weighted_rows())
def test_stats_agree_with_counts_over_the_rows(rows):
    stats = tree_stats(build_tree(rows))
    ids = [tuple(row.ids.tolist()) for row in rows]
    prefixes = [row[:n] for row in ids for n in range(1, len(row) + 1)]
    unique = set(prefixes)
    trained = {r[: t + 1] for r, row in zip(ids, rows) for t in np.flatnonzero(row.weights)}
    children = {p: len({q for q in unique if q[:-1] == p}) for p in unique}
    assert stats.flat == len(prefixes) and stats.unique == len(unique)
    assert stats.forks == sum(c > 1 for c in children.values())
    assert stats.leaves == sum(c == 0 for c in children.values())
    assert stats.max_out_degree == max(children.values(), default=0)
    assert stats.duplicates == len([r for r in ids if r]) - len({r for r in ids if r})
    assert stats.trained_flat == sum(int((row.weights != 0).sum()) for row in rows)
    assert stats.trained_unique == len(trained)
    assert stats.saved_trained == sum(prefixes.count(p) - 1 for p in trained)
    assert stats.saved_trained + stats.saved_context == stats.flat - stats.unique
    assert stats.trees == len({r[0] for r in ids if r})
    assert stats.longest_path == max(map(len, ids), default=0)
    assert stats.flop_speedup is None


def test_the_flop_speedup_is_a_ratio_of_works_and_counts_repeats_apart():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]]
    stats = tree_stats(build_tree(rows), Count(1, 0, 0))
    assert stats.flop_speedup == 9 / 3
    assert tree_stats(build_tree(rows), Count(0, 1, 0)).flop_speedup == 18 / 6
    assert tree_stats(build_tree(rows), Count(0, 0, 1)).flop_speedup == 9 / 3
    assert tree_stats(build_tree([[1], []]), Count(1, 1, 1)).flop_speedup == 1
    assert tree_stats(build_tree([]), Count(1, 1, 1)).overlap == 0
