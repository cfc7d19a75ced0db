"""Recorded experts are a part of what a token is: equal tokens that went to different experts are not merged."""

import numpy as np
import pytest
from trie_of_dicts import check_tree

import treetrain as tt
from treetrain.core.errors import DataError
from treetrain.layers.experts import recorded
from treetrain.layers.experts.recorded import recorded_experts


def row(ids, first, **facts):
    """Experts [L, 1, 2]: `first` and the one after it, or -1."""
    first = np.array(first)
    return tt.Trajectory(ids, experts=np.stack([first, np.where(first < 0, -1, first + 1)], -1)[:, None], **facts)


def test_tokens_are_merged_as_far_as_ids_and_experts_agree():
    rows = [row([5, 6, 7], [0, 1, 2]), row([5, 6, 7], [0, 1, 2]), row([5, 6, 7], [0, 3, 2]), row([5, 6, 8], [0, 1, 2])]
    tree = tt.build_tree(rows)
    check_tree(tree)
    assert tree.num_tokens == 6
    for number, given in enumerate(rows):
        path = tree.path(number)
        assert tree.tokens[path].tolist() == given.ids.tolist()
        assert (recorded_experts(tree)[path] == given.experts).all()
    assert tree.path(0).tolist() == tree.path(1).tolist()
    assert [len(set(tree.path(0)) & set(tree.path(k))) for k in (2, 3)] == [1, 2]


def test_experts_that_were_not_recorded_are_others_than_any_that_were():
    tree = tt.build_tree([row([5, 6], [0, 1]), row([5, 6, 7], [0, 1, -1]), row([5, 6, 7], [0, -1, -1]), [5, 6]])
    assert tree.num_tokens == 3 + 2 + 2
    assert recorded_experts(tree).shape == (7, 1, 2)
    assert (recorded_experts(tree)[tree.path(3)] == -1).all()


def test_rows_without_experts_make_a_tree_without():
    assert recorded_experts(tt.build_tree([tt.Trajectory([1, 2]), [1, 3]])) is None


def test_equal_experts_merge_as_ids_alone_do():
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 2, rng.integers(0, 9)).tolist() for _ in range(40)]
    plain = tt.build_tree(ids)
    routed = tt.build_tree([row(one, np.zeros(len(one), int)) for one in ids])
    for name in ("tokens", "parent", "depth", "end", "segment_start", "trajectory_last"):
        assert (getattr(plain, name) == getattr(routed, name)).all()


def test_a_collision_of_hashes_merges_nothing_that_differs(monkeypatch):
    class Zeros:
        def integers(self, low, high, size, dtype):
            return np.full(size, -1) // 2  # times 2 plus 1: factors of -1, under which (1, 0) and (0, 1) collide

    monkeypatch.setattr(recorded.np.random, "default_rng", lambda seed: Zeros())
    rows = [row([5, 6], [0, 1]), row([6, 5], [-1, 2]), row([4, 6], [1, 1])]
    tree = tt.build_tree(rows)
    for number, given in enumerate(rows):
        assert tree.tokens[tree.path(number)].tolist() == given.ids.tolist()
        assert (recorded_experts(tree)[tree.path(number)] == given.experts).all()


def test_rows_routed_by_different_models_are_refused():
    other = tt.Trajectory([1, 2], experts=np.zeros((2, 3, 1), int))
    with pytest.raises(DataError, match=r"row 2: experts have 3 layers of 1, row 1 has 1 of 2"):
        tt.build_tree([[1], row([1, 2], [0, 0]), other])


def test_a_negative_id_beside_recorded_experts_is_refused():
    with pytest.raises(DataError, match="row 1: token id -4"):
        tt.build_tree([row([1, 2], [0, 0]), [1, -4]])


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ([[0, 1], [0, 1]], r"shape \(2, 2\), expected \[L, layers, k\]"),
        ([[[0, 1]]], r"shape \(1, 1, 2\).*give -1 for a token whose experts were not recorded"),
        ([[[0.5, 1.0]], [[0.0, 1.0]]], "type float64"),
        ([[[0, 1]], [[1, -2]]], "hold -2"),
        ([[[0, 1]], [[1, 40000]]], "hold 40000"),
        ([[[0, 1]], [[1, 1]]], r"experts\[1\]\[0\] = \[1, 1\]"),
        ([[[0, -1]], [[1, 0]]], r"experts\[0\]\[0\] = \[0, -1\]"),
        ([[[0, 1]], [[1]]], "no .L, layers, k. block"),
    ],
)
def test_experts_that_are_none_are_refused(experts, says):
    with pytest.raises(DataError, match=says):
        tt.Trajectory([1, 2], experts=experts)


def test_a_row_keeps_its_experts_in_a_copy():
    given = row([1, 2], [0, 1])
    assert (given.replace(reward=1.0).experts == given.experts).all()
    assert "experts" in repr(given)
