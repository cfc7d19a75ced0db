import tracemalloc

import numpy as np
import pytest
import trie_of_dicts
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_of_dicts import check_tree

from treetrain.core.errors import DataError
from treetrain.core.tree import token_tree
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.layers.trajectory import Trajectory

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12)
KEYS = st.sampled_from([None, "a", "b"])
FORMS = [list, tuple, np.array, lambda row: np.array(row, np.int32), Trajectory]


def rows_back(tree: TokenTree) -> list[list[int]]:
    return [tree.tokens[tree.path(k)].tolist() for k in range(tree.num_trajectories)]


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_the_tree_is_the_trie_of_dicts_array_for_array(rows):
    tree, expected = build_tree(rows), trie_of_dicts.arrays(rows)
    check_tree(tree)
    for name in ("tokens", "parent", "depth", "end"):
        assert getattr(tree, name).tolist() == expected[name].tolist(), name
    offsets, index = tree.paths()
    assert index.tolist() == expected["paths"].tolist()
    assert np.diff(offsets).tolist() == [len(row) for row in rows]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), KEYS), max_size=9))
def test_rows_of_different_key_share_nothing(pairs):
    rows, keys = [row for row, _ in pairs], [key for _, key in pairs]
    tree = build_tree([Trajectory(row, key=key) for row, key in pairs])
    check_tree(tree)
    expected = trie_of_dicts.arrays(rows, keys)
    for name in ("tokens", "parent", "depth", "end"):
        assert getattr(tree, name).tolist() == expected[name].tolist(), name
    assert tree.paths()[1].tolist() == expected["paths"].tolist()


@pytest.mark.parametrize("thin", [1, 3])
def test_leaves_peeled_in_layers_give_the_same_tree_as_one_piece_at_a_time(thin, monkeypatch):
    rng = np.random.default_rng(thin)
    rows = [rng.integers(0, 3, rng.integers(0, 12)).tolist() for _ in range(300)]
    monkeypatch.setattr(token_tree, "_THIN", 10**9)
    one_by_one = build_tree(rows)
    monkeypatch.setattr(token_tree, "_THIN", thin)
    tree, expected = build_tree(rows), trie_of_dicts.arrays(rows)
    for name in ("tokens", "parent", "depth", "end"):
        assert getattr(tree, name).tolist() == getattr(one_by_one, name).tolist() == expected[name].tolist()


@settings(max_examples=40, deadline=None)
@given(ROWS, st.booleans())
def test_every_trajectory_comes_back_bit_for_bit(rows, merge):
    tree = build_tree(rows, merge=merge)
    assert rows_back(tree) == rows
    offsets, index = tree.paths()
    assert offsets[-1] == len(index)
    assert tree.tokens[index].tolist() == [i for row in rows for i in row]
    assert [t.ids.tolist() for t in tree.trajectories] == rows


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_without_merging_every_row_is_a_tree_of_its_own(rows):
    tree = build_tree(rows, merge=False)
    check_tree(tree)
    assert tree.num_tokens == sum(map(len, rows))
    assert (tree.parent == -1).sum() == sum(1 for row in rows if row) == tree.num_segments


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_the_interval_rule_is_the_ancestor_relation(rows):
    tree = build_tree(rows)
    for i in range(tree.num_tokens):
        ancestors, at = set(), i
        while at >= 0:
            ancestors.add(at)
            at = int(tree.parent[at])
        assert ancestors == {j for j in range(tree.num_tokens) if j <= i < tree.end[j]}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=40))
def test_a_token_meets_at_most_log2_of_the_leaves_light_edges(rows):
    tree = build_tree(rows)
    light = np.zeros(tree.num_tokens, int)
    for i in range(tree.num_tokens):
        if tree.parent[i] >= 0:
            light[i] = light[tree.parent[i]] + (tree.parent[i] != i - 1)
    for root in np.flatnonzero(tree.parent == -1):
        below = slice(root, tree.end[root])
        leaves = int((tree.end[below] == np.arange(root, tree.end[root]) + 1).sum())
        assert light[below].max() <= np.log2(leaves)


@pytest.mark.parametrize(
    "rows",
    [[], [[]], [[], []], [[5]], [[5], [5], []], [[1, 2, 3], [1, 2]], [[1, 2], [1, 2, 3], [1]], [[0] * 9] * 9],
    ids=repr,
)
def test_small_extremes(rows):
    tree = build_tree(rows)
    check_tree(tree)
    assert rows_back(tree) == rows
    assert tree.paths()[1].tolist() == trie_of_dicts.arrays(rows)["paths"].tolist()


def test_a_row_that_ends_inside_a_run_does_not_split_the_segment():
    tree = build_tree([[1, 2], [1, 2, 3, 4], [1, 2, 3]])
    assert tree.segment_start.tolist() == [0, 4]
    assert tree.trajectory_last.tolist() == [1, 3, 2]


@pytest.mark.slow
def test_five_thousand_nested_forks_through_rows():
    rows = [np.append(np.zeros(k, np.int32), np.int32(7)) for k in range(5000)]
    tree = build_tree(rows)
    check_tree(tree)
    # The last row's 7 closes the chain: 4,999 zeros, each but the last a fork between 0 and 7.
    assert tree.num_tokens == 4999 + 5000
    offsets, index = tree.paths()
    assert (tree.tokens[index[offsets[1:] - 1]] == 7).all()
    assert np.array_equal(tree.tokens[tree.path(3210)], rows[3210])


def test_long_rows_are_compared_across_blocks():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 5, 700_000, dtype=np.int32)
    other = base.copy()
    other[600_000] += 1
    tree = build_tree([base, other, base[:500_000]])
    check_tree(tree)
    assert tree.num_tokens == 800_000
    assert tree.segment_start.tolist() == [0, 600_000, 700_000, 800_000]


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_row_gives_the_same_tree(form):
    rows = [[3, 4, 5], [3, 4], [], [3, 9, 1]]
    tree = build_tree([form(row) for row in rows])
    assert rows_back(tree) == rows


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[1], [2, -3]], "row 1: token id -3"),
        ([[1], [2**31]], "row 1: token id 2147483648"),
        ([np.array([1]), np.array([1, 2**40])], "row 1: token id 1099511627776"),
        ([np.array([-1])], "row 0: token id -1"),
        ([np.array([1]), np.array([2, -(2**32) + 5])], "row 1: token id -4294967291"),
        ([[1], [1.5]], "row 1: token id 1.5 is no whole number"),
        ([[1], [None]], "row 1: token id None is no whole number"),
        ([[[1, 2]]], r"row 0: token id \[1, 2\] is no whole number"),
        ([np.zeros((2, 2), int)], r"row 0: .* found shape \(2, 2\)"),
        ([np.array([0.5])], "row 0: .* of float64"),
    ],
)
def test_bad_ids_are_refused_by_row(rows, says):
    with pytest.raises(DataError, match=says):
        build_tree(rows)


def test_memory_is_linear_in_flat_tokens():
    def peak(rows: int) -> float:
        data = np.random.default_rng(0).integers(0, 50, (rows, 64), dtype=np.int32)
        sequences = list(data)
        tracemalloc.start()
        build_tree(sequences)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used / data.size

    small, large = peak(2_000), peak(16_000)
    assert large < 1.3 * small
    assert large < 90  # bytes per flat token


def test_rows_apart_share_nothing_whatever_their_keys():
    rows = [Trajectory([1, 2, 3], key=key) for key in (None, "a", None, "a", None)]
    apart = np.array([0, 0, 1, 1, 0])
    tree = build_tree(rows, apart=apart)
    assert tree.num_tokens == 4 * 3 and len({*tree.trajectory_last.tolist()}) == 4
    assert tree.trajectory_last[0] == tree.trajectory_last[4]
    bare = build_tree([[1, 2, 3]] * 5, apart=apart)
    assert bare.num_tokens == 2 * 3 and (bare.trajectory_last[apart == 0] == bare.trajectory_last[0]).all()
