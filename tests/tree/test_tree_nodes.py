import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_of_dicts import check_tree

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.tree import Node, NodeTrajectory, TokenTree, build_tree, tree_stats

ARRAYS = (
    "tokens",
    "parent",
    "depth",
    "end",
    "segment_start",
    "segment_parent",
    "trajectory_last",
    "trajectory_length",
)
IDS = st.lists(st.integers(0, 1), max_size=4)


def same_tree(one: TokenTree, other: TokenTree) -> None:
    for name in ARRAYS:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name


@st.composite
def node_trees(draw) -> tuple[list[Node], list[int]]:
    """Nodes in a shuffled order (parents after children too), weights random, every leaf on a trajectory."""
    count = draw(st.integers(1, 10))
    number = draw(st.permutations(range(count)))
    nodes: list[Node] = [Node(None, [])] * count
    with_children = set()
    for i in range(count):
        above = draw(st.integers(-1, i - 1))
        ids = draw(IDS)
        weights = draw(st.none() | st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=len(ids), max_size=len(ids)))
        nodes[number[i]] = Node(None if above < 0 else number[above], ids, loss_weights=weights)
        with_children.add(number[above] if above >= 0 else -1)
    ends = [i for i in range(count) if i not in with_children]
    return nodes, draw(st.permutations(ends + draw(st.lists(st.integers(0, count - 1), max_size=3))))


@settings(max_examples=100, deadline=None)
@given(node_trees())
def test_nodes_and_rows_of_the_same_rollouts_give_the_same_tree(case):
    nodes, ends = case
    tree = TokenTree.from_nodes(nodes, ends)
    check_tree(tree)
    rows = list(tree.trajectories)
    same_tree(tree, build_tree(rows))
    for end, row in zip(ends, rows):
        ids, weights = [], []
        while end is not None:
            ids = list(nodes[end].ids) + ids
            own = nodes[end].loss_weights
            weights = list([1.0] * len(nodes[end].ids) if own is None else own) + weights
            end = nodes[end].parent
        assert row.ids.tolist() == ids
        assert row.weights[1:].tolist() == weights[1:]


@settings(max_examples=50, deadline=None)
@given(node_trees())
def test_trained_edges_counted_on_nodes_are_those_of_the_flat_rows(case):
    tree = TokenTree.from_nodes(*case)
    flat = build_tree(list(tree.trajectories))
    for counted, expected in zip(tree.trained_edges(), flat.trained_edges()):
        assert counted.tolist() == expected.tolist()


def test_siblings_of_different_key_are_kept_apart():
    nodes = [Node(None, [1, 2]), Node(0, [3, 4], key="a"), Node(0, [3, 5], key="b"), Node(0, [3, 6], key="a")]
    tree = TokenTree.from_nodes(nodes, [1, 2, 3])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 6, 3, 5]
    assert [t.key for t in tree.trajectories] == ["a", "b", "a"]


def test_another_key_does_not_continue_a_run_that_goes_on_with_the_same_token():
    nodes = [Node(None, [1, 2, 3]), Node(None, [1]), Node(1, [2, 4], key="b")]
    tree = TokenTree.from_nodes(nodes, [0, 2])
    assert tree.tokens.tolist() == [1, 2, 3, 2, 4]
    assert tree.end.tolist() == [5, 3, 3, 5, 5]


def test_a_node_without_a_key_keeps_its_parents():
    nodes = [Node(None, [1], key="a"), Node(0, [2]), Node(None, [1], key="b"), Node(2, [2])]
    tree = TokenTree.from_nodes(nodes, [1, 3])
    same_tree(tree, build_tree([Trajectory([1, 2], key="a"), Trajectory([1, 2], key="b")]))
    assert [t.key for t in tree.trajectories] == ["a", "b"]


def test_merged_siblings_keep_each_trajectorys_own_facts():
    nodes = [
        Node(None, [1, 2], loss_weights=0),
        Node(0, [3, 4], old_logprobs=[-1.0, -2.0]),
        Node(0, [3, 4, 5], old_logprobs=[-3.0, -4.0, -5.0], loss_weights=[1, 0, 1]),
    ]
    tree = TokenTree.from_nodes(nodes, [NodeTrajectory(node=1, advantages=2.0, group="g"), 2])
    assert tree.num_tokens == 5
    first, second = tree.trajectories
    assert first.old_logprobs.tolist() == [0, 0, -1, -2]
    assert second.old_logprobs.tolist() == [0, 0, -3, -4, -5]
    assert second.weights.tolist() == [0, 0, 1, 0, 1]
    assert first.advantages.tolist() == [2.0] * 4 and first.group == "g"
    assert second.advantages is None


def test_nodes_that_split_the_same_tokens_differently_are_merged():
    nodes = [
        Node(None, [1, 2, 3]),
        Node(0, [4]),
        Node(None, [1, 2]),
        Node(2, [3, 5]),
        Node(2, []),
        Node(4, [3, 4]),
    ]
    tree = TokenTree.from_nodes(nodes, [1, 3, 5])
    same_tree(tree, build_tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]]))


@pytest.mark.parametrize(
    ("nodes", "ends", "says"),
    [
        ([Node(None, [1]), Node(7, [2])], [1], "node 1: parent 7 is no node; 2 were given"),
        ([Node(None, [1]), Node(2, [2]), Node(1, [3])], [0, 1], "node 1: its parents form a cycle"),
        ([Node(0, [1])], [0], "node 0: its parents form a cycle"),
        ([Node(None, [1])], [1], "trajectory 0: node 1 is no node"),
        ([Node(None, [-1])], [0], r"'node 0': ids\[0\] = -1 is negative"),
        ([Node(None, [1, 2], values=[1.0])], [0], "'node 0': values has 1 entries, but there are 2 token ids"),
    ],
)
def test_bad_nodes_are_refused_by_number(nodes, ends, says):
    with pytest.raises(DataError, match=says):
        TokenTree.from_nodes(nodes, ends)


def test_a_trajectory_has_no_fact_that_one_of_its_trained_nodes_lacks():
    nodes = [Node(None, [1, 2], values=[1.0, 2.0]), Node(0, [3]), Node(0, [4], loss_weights=0)]
    lacks, has = TokenTree.from_nodes(nodes, [1, 2]).trajectories
    assert lacks.values is None and has.values.tolist() == [1.0, 2.0, 0.0]
    once = TokenTree.from_nodes([*nodes, Node(1, [5], values=[3.0])], [1, 2, 3], count="once").trajectories
    assert once[0].values is None and once[2].values.tolist() == [1.0, 2.0, 0.0, 3.0]


def test_nodes_on_no_trajectory_are_left_out():
    nodes = [Node(None, [1]), Node(0, [2]), Node(0, [3]), Node(2, [4])]
    with pytest.warns(UserWarning, match="2 of 4 nodes are on no trajectory"):
        tree = TokenTree.from_nodes(nodes, [1])
    same_tree(tree, build_tree([[1, 2]]))
    assert np.array_equal(tree.trained_edges()[0], [0, 1])


def test_no_nodes_and_empty_paths():
    same_tree(TokenTree.from_nodes([], []), build_tree([]))
    same_tree(TokenTree.from_nodes([Node(None, []), Node(0, [])], [1, 0]), build_tree([[], []]))


FORKS = 20_000


def test_twenty_thousand_nested_forks_are_checked_and_counted_in_seconds():
    nodes, started = [], time.process_time()
    for i in range(FORKS):
        nodes += [Node(2 * i - 2 if i else None, [1]), Node(2 * i, [2, 3], loss_weights=0.5)]
    tree = TokenTree.from_nodes(nodes, range(1, 2 * FORKS, 2))
    check_tree(tree)
    stats = tree_stats(tree)
    uses, deepest = tree.trained_edges()
    assert time.process_time() - started < 10
    assert stats.flat == tree.num_flat_tokens == FORKS * (FORKS + 1) // 2 + 2 * FORKS
    assert stats.forks == FORKS - 1
    assert uses.sum() == stats.trained_flat == stats.flat - FORKS
    assert deepest.tolist() == list(range(2, FORKS + 2))
    assert tree.trajectories[500].ids.tolist() == [1] * 501 + [2, 3]
    assert "_paths" not in vars(tree), "nothing was flattened"
