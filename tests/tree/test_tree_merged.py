"""Rows merged on the nodes that they share, against the rows put together one by one."""

import time

import numpy as np
import pytest
from trie_of_dicts import check_tree

from support.node_trees import ADVANTAGES, OTHER_FACTS, random_node_tree
from treetrain.errors import DataError
from treetrain.tree import Node, NodeTrajectory, TokenTree, build_tree, tree_stats
from treetrain.tree.nodes import NodeRows

SEEDS = range(60)
both_reductions = pytest.mark.parametrize("reduction", ["token", "trajectory"])


def moments(tokens, shares, facts, size: int) -> np.ndarray:
    """Per tree token, what an affine x on each side of 0 can read: [sides * (1 + facts + advantage * facts), N]."""
    advantages = facts["advantages"]
    others = [np.ones(len(tokens)), *(facts[name] for name in OTHER_FACTS)]
    rows = []
    for side in (advantages < 0, advantages == 0, advantages > 0):
        for other in others:
            rows += [shares * side * other, shares * side * other * advantages]
    return np.array([np.bincount(tokens, weights=row, minlength=size) for row in rows])


def by_rows(tree: TokenTree, reduction: str) -> tuple[np.ndarray, float]:
    """The moments and the normaliser, one row after the other."""
    tokens, shares, facts, normaliser = [], [], {name: [] for name in ("advantages", *OTHER_FACTS)}, 0.0
    for number, row in enumerate(tree.trajectories):
        weights, trained = row.weights, np.flatnonzero(row.weights)
        if len(trained) == 0:
            continue
        normaliser += weights.sum() if reduction == "token" else 1
        tokens.append(tree.path(number)[trained])
        shares.append(weights[trained] / (1 if reduction == "token" else weights.sum()))
        for name, parts in facts.items():
            fact = getattr(row, name)
            parts.append(np.zeros(len(trained)) if fact is None else fact[trained])
    join = lambda parts, dtype=np.float64: np.concatenate([np.zeros(0, dtype), *parts])  # noqa: E731
    joined = {name: join(parts) for name, parts in facts.items()}
    return moments(join(tokens, np.int64), join(shares), joined, tree.num_tokens), normaliser


@both_reductions
@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_merged_rows_sum_to_what_the_rows_sum_to_on_every_token(advantages, reduction):
    for seed in SEEDS:
        tree = random_node_tree(seed, advantages)
        merged = tree.merged(reduction)
        facts = dict(merged.facts)
        if advantages == "none":
            assert "advantages" not in facts or not len(merged)
            facts["advantages"] = np.zeros(len(merged))
        expected, normaliser = by_rows(tree, reduction)
        found = moments(merged.tokens, merged.shares, facts, tree.num_tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
        assert merged.normaliser == pytest.approx(normaliser, rel=1e-13)


@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_there_is_one_prediction_per_trained_node_token_and_set_of_rows(advantages):
    for seed in SEEDS:
        tree = random_node_tree(seed, advantages)
        merged = tree.merged("token")
        assert isinstance(tree.rows, NodeRows)
        trained = int((tree.rows.weights != 0).sum())
        assert (np.diff(merged.tokens) >= 0).all()
        assert merged.shares.all()
        if advantages in ("of nodes", "none"):
            assert len(merged) == trained
        else:
            assert trained <= len(merged) <= 4 * trained
        assert set(merged.tokens.tolist()) == set(np.flatnonzero(tree.trained_edges()[0]).tolist())


def test_every_prediction_reads_the_edge_of_its_token_also_piece_by_piece():
    for seed in SEEDS:
        tree = random_node_tree(seed, "of some rows")
        merged = tree.merged("token")
        edge_tokens = np.flatnonzero(tree.trained_edges()[0])
        edge_tokens = edge_tokens[np.argsort(tree.parent[edge_tokens], kind="stable")]
        edges, index = merged.reads(edge_tokens)
        assert sorted(index.tolist()) == list(range(len(merged)))
        assert edge_tokens[edges].tolist() == merged.tokens[index].tolist()
        pieces = [merged.reads(tokens) for tokens in np.array_split(edge_tokens, 3)]
        assert np.concatenate([index for _, index in pieces]).tolist() == index.tolist()


def test_no_row_is_put_together(monkeypatch):
    tree = random_node_tree(3, "of some rows")
    monkeypatch.setattr(NodeRows, "__getitem__", lambda *_: pytest.fail("a row was put together"))
    monkeypatch.setattr(TokenTree, "paths", lambda _: pytest.fail("the tree was flattened"))
    assert len(tree.merged("token")) and len(tree.merged("trajectory"))


FORKS = 20_000


@pytest.fixture(scope="module")
def nested() -> TokenTree:
    """Row k: k + 1 tokens of a spine, all but the first trained, and two of its own with weight 1/2 each."""
    nodes, rows, started = [], [], time.process_time()
    for i in range(FORKS):
        nodes.append(Node(2 * i - 2 if i else None, [1]))
        nodes.append(Node(2 * i, [2, 3], loss_weights=0.5))
        rows.append(NodeTrajectory(node=2 * i + 1, advantages=1.0 + i % 2))
    tree = TokenTree.from_nodes(nodes, rows)
    assert time.process_time() - started < 5
    return tree


def test_twenty_thousand_nested_forks_are_checked_and_counted_in_seconds(nested):
    started = time.process_time()
    check_tree(nested)
    stats = tree_stats(nested)
    uses, deepest = nested.trained_edges()
    assert time.process_time() - started < 5
    count = FORKS
    assert stats.flat == nested.num_flat_tokens == count * (count + 1) // 2 + 2 * count
    assert stats.forks == count - 1
    assert uses.sum() == stats.trained_flat == stats.flat - count
    assert deepest.tolist() == list(range(2, count + 2))
    assert stats.max_forks_on_path == count - 1
    assert nested.trajectories[500].ids.tolist() == [1] * 501 + [2, 3]
    assert "_paths" not in vars(nested), "nothing was flattened"


@both_reductions
def test_twenty_thousand_nested_forks_are_merged_in_seconds(nested, reduction):
    started = time.process_time()
    merged = nested.merged(reduction)
    assert time.process_time() - started < 5
    count = FORKS
    assert len(merged) == count - 1 + 2 * count
    numbers = np.arange(count)
    totals = numbers + 1.0
    row_share = np.ones(count) if reduction == "token" else 1 / totals
    own = 1.0 + numbers % 2
    below = lambda x: np.cumsum(x[::-1])[::-1]  # noqa: E731
    spine = merged.tokens[nested.tokens[merged.tokens] == 1]
    at = np.searchsorted(merged.tokens, spine)
    depth = nested.depth[spine]
    np.testing.assert_allclose(merged.shares[at], below(row_share)[depth], rtol=1e-11)
    np.testing.assert_allclose(
        merged.facts["advantages"][at], (below(row_share * own) / below(row_share))[depth], rtol=1e-11
    )
    assert merged.shares.sum() == pytest.approx(totals.sum() if reduction == "token" else count, rel=1e-11)
    assert merged.normaliser == pytest.approx(merged.shares.sum(), rel=1e-11)


def test_a_tree_of_rows_is_not_merged():
    assert build_tree([[1, 2], [1, 3]]).merged("token") is None
    assert build_tree([]).merged("trajectory") is None


@both_reductions
def test_no_nodes_give_no_predictions(reduction):
    for tree in (TokenTree.from_nodes([], []), TokenTree.from_nodes([Node(None, [1]), Node(0, [])], [1, 0])):
        merged = tree.merged(reduction)
        assert (len(merged), merged.normaliser, merged.lacking, merged.negative) == (0, 0.0, {}, None)
        assert merged.facts["advantages"].shape == merged.facts["returns"].shape == merged.shares.shape == (0,)


def test_nodes_on_no_row_do_not_count():
    nodes = [Node(None, [1, 2], advantages=1.0), Node(0, [3], loss_weights=-5.0), Node(0, [4], advantages=2.0)]
    merged = TokenTree.from_nodes(nodes, [2], unused="drop").merged("trajectory")
    assert merged.shares.tolist() == [0.5, 0.5]
    assert merged.facts["advantages"].tolist() == [1.0, 2.0]
    assert "advantages" not in merged.lacking
    assert merged.negative is None


def test_merged_rows_are_kept_per_reduction():
    tree = random_node_tree(3, "of nodes")
    assert tree.merged("token") is tree.merged("token")
    assert tree.merged("token").reduction == "token"
    assert tree.merged("trajectory").reduction == "trajectory"
    with pytest.raises(ValueError, match="reduction is 'mean'; allowed are 'token', 'trajectory'"):
        tree.merged("mean")


def test_a_negative_weight_is_named_and_refused_where_shares_are_of_a_row():
    nodes = [Node(None, [1, 2], loss_weights=[-9, 1]), Node(0, []), Node(1, [3, 4], loss_weights=[1, -0.5])]
    tree = TokenTree.from_nodes(nodes, [2, 2])
    assert tree.merged("token").negative == "node 2: loss_weights[1] = -0.5"
    assert tree.merged("token").shares.tolist() == [2.0, 2.0, -1.0]
    with pytest.raises(DataError, match=r"node 2: loss_weights\[1\] = -0.5, but a mean .* use the reinforce loss"):
        tree.merged("trajectory")


def test_the_first_trained_node_that_lacks_a_fact_is_named():
    nodes = [
        Node(None, [1, 2], loss_weights=0),
        Node(0, [3], values=[1.0]),
        Node(0, [4], ref_logprobs=[-1.0]),
        Node(0, [5], loss_weights=0),
    ]
    merged = TokenTree.from_nodes(nodes, [1, 2, 3]).merged("token")
    assert merged.lacking == {
        "advantages": "node 1",
        "old_logprobs": "node 1",
        "ref_logprobs": "node 1",
        "rollout_logprobs": "node 1",
        "teacher_logprobs": "node 1",
        "values": "node 2",
        "returns": "node 1",
    }
    assert "values" not in merged.facts


def test_a_row_without_advantages_among_rows_with_their_own_is_named_with_its_node():
    nodes = [Node(None, [1, 2], loss_weights=0), Node(0, [3], advantages=0.5), Node(0, [4])]
    rows = [NodeTrajectory(node=1), NodeTrajectory(node=2, advantages=1.0), NodeTrajectory(node=2)]
    merged = TokenTree.from_nodes(nodes, rows).merged("token")
    assert merged.lacking["advantages"] == "node 2 (of trajectory number 2, counted from 0)"
    assert "advantages" not in TokenTree.from_nodes(nodes, rows[:2]).merged("token").lacking


@pytest.mark.parametrize("bad", [float("nan"), "1", [1.0, 2.0]])
def test_a_rows_advantage_is_one_finite_number(bad):
    with pytest.raises(DataError, match=r"trajectory 0: advantages = .* is no finite number"):
        TokenTree.from_nodes([Node(None, [1, 2])], [NodeTrajectory(node=0, advantages=bad)])


def test_a_fact_of_a_node_without_tokens_is_no_fact():
    tree = TokenTree.from_nodes([Node(None, [1, 2]), Node(0, [], advantages=3.0)], [1])
    assert tree.trajectories[0].advantages is None
    assert tree.merged("token").lacking["advantages"] == "node 0"
