"""`from_nodes(count="once")`: every token of a node counts one time, however many trajectories pass through it."""

import numpy as np
import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.node_trees import OTHER_FACTS, random_nodes
from treetrain.testing import linear
from treetrain.testing.contract import PureFloat64

LOSSES = {
    "sft": tt.losses.sft(),
    "reinforce": tt.losses.reinforce(kl=0.2, entropy=0.05),
    "ppo": tt.losses.ppo(clip=0.2, kl=0.1),
    "dapo": tt.losses.dapo(importance_cap=2.0),
    "grpo of tokens": tt.losses.grpo(reduction="token"),
    "distill": tt.losses.distill(estimator="k2"),
}


def prepared(seed: int) -> tuple[list[tt.Node], list[int]]:
    nodes, rows = random_nodes(seed, "of nodes")
    return nodes, [row.node for row in rows]


def node_rows(nodes: list[tt.Node], ends: list[int]) -> list[tt.Trajectory]:
    """For each node on a trajectory a row of its own: its path, on which nothing but the node's tokens is trained."""

    def path(number: int | None) -> list[int]:
        return [] if number is None else [*path(nodes[number].parent), number]

    rows = []
    for number in sorted({inner for end in ends for inner in path(end)}):
        node, above = nodes[number], sum(len(nodes[inner].ids) for inner in path(number)[:-1])
        given = {name: getattr(node, name) for name in ("advantages", *OTHER_FACTS)}
        facts = {name: np.concatenate([np.zeros(above), fact]) for name, fact in given.items() if fact is not None}
        weights = np.ones(len(node.ids)) if node.loss_weights is None else node.loss_weights * np.ones(len(node.ids))
        ids = np.concatenate([nodes[inner].ids for inner in path(number)])
        rows.append(tt.Trajectory(ids, loss_weights=np.concatenate([np.zeros(above), weights]), **facts))
    return rows


def step(model, batch, loss, **options) -> tuple[tt.StepResult, torch.Tensor]:
    model.zero_grad()
    with PureFloat64():
        result = tt.TreeEngine(model, **options).forward_backward(batch, loss)
    return result, linear.gradients(model)


def test_the_mean_over_nodes_tokens_written_out_by_hand():
    model = make_model("qwen3", dtype=torch.float64)
    nodes = [
        tt.Node(None, [1, 2, 3], loss_weights=[0, 0, 1], advantages=0.5),
        tt.Node(0, [4, 5], advantages=2.0),
        tt.Node(0, [6], advantages=-1.0),
        tt.Node(1, [7], loss_weights=0.25, advantages=3.0),
    ]
    tree = tt.TokenTree.from_nodes(nodes, [3, 1, 2, 3], count="once")
    with PureFloat64():
        (a, b), _ = linear.score_rows(model, [[1, 2, 3, 4, 5, 7], [1, 2, 3, 6]])
    tokens = [(a[1], 1.0, 0.5), (a[2], 1.0, 2.0), (a[3], 1.0, 2.0), (b[2], 1.0, -1.0), (a[4], 0.25, 3.0)]
    weights = sum(weight for _, weight, _ in tokens)
    for loss, x in (
        (tt.losses.sft(), lambda logprob, _: -logprob),
        (tt.losses.reinforce(), lambda logprob, advantage: -advantage * logprob),
    ):
        expected = sum(weight * x(logprob, advantage) for logprob, weight, advantage in tokens) / weights
        with PureFloat64():
            gradient = linear.gradients(model, expected, retain_graph=True)
        result, found = step(model, tree, loss)
        assert result.loss == pytest.approx(expected.item(), rel=1e-12)
        assert linear.relative_error(found, gradient) <= 1e-12
        often, _ = step(model, tt.TokenTree.from_nodes(nodes, [3, 1, 2, 3]), loss)
        assert often.loss != pytest.approx(result.loss, rel=1e-3)


@pytest.mark.parametrize(("name", "budget"), [(name, (None, 3)[number % 2]) for number, name in enumerate(LOSSES)])
def test_a_step_is_that_of_one_row_for_each_node(name, budget):
    model, loss, checked = make_model("qwen3", dtype=torch.float64), LOSSES[name], 0
    for seed in range(4):
        nodes, ends = prepared(seed)
        tree, rows = tt.TokenTree.from_nodes(nodes, ends, count="once"), node_rows(nodes, ends)
        if not any(row.weights.any() for row in rows):
            continue
        whole, expected = step(model, rows, loss)
        result, found = step(model, tree, loss, budget=budget)
        assert linear.relative_error(found, expected) <= 1e-12
        assert result.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)
        checked += expected.norm() > 0
    assert checked >= 3


def test_a_critic_learns_from_every_state_once():
    model, head = make_model("qwen3", dtype=torch.float64), torch.nn.Linear(24, 1, dtype=torch.float64)
    for loss in (tt.losses.value(), tt.losses.ppo(value_coefficient=0.5)):
        nodes, ends = prepared(4)
        tree = tt.TokenTree.from_nodes(nodes, ends, count="once")
        whole, expected = step(model, node_rows(nodes, ends), loss, value_head=head)
        result, found = step(model, tree, loss, value_head=head)
        assert linear.relative_error(found, expected) <= 1e-12 and expected.norm() > 0
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)


def test_its_rows_train_each_token_once_and_agree_with_what_the_tree_counts():
    for seed in range(30):
        nodes, ends = prepared(seed)
        tree = tt.TokenTree.from_nodes(nodes, ends, count="once")
        often = tt.TokenTree.from_nodes(nodes, ends)
        uses = np.zeros(tree.num_tokens, np.int64)
        for number, row in enumerate(tree.trajectories):
            np.add.at(uses, tree.path(number)[row.weights != 0], 1)
            other = often.trajectories[number]
            assert (row.ids == other.ids).all() and set(row.weights) <= {0.0, *other.weights}
            deepest = np.flatnonzero(row.weights).max(initial=0)
            assert tree.trained_edges()[1][number] == deepest
        assert (uses == tree.trained_edges()[0]).all()
        # Equal siblings are nodes of their own, so a token of the tree may count for both.
        assert ((uses > 0) == (often.trained_edges()[0] > 0)).all()
        assert tree.count == "once" and often.count == "per trajectory"


def test_half_the_rows_count_what_is_theirs():
    nodes, ends = prepared(7)
    tree = tt.TokenTree.from_nodes(nodes, ends, count="once")
    half = np.arange(len(ends)) % 2 == 0
    parts = [tree.trained_edges(rows) for rows in (half, ~half)]
    assert (parts[0][0] + parts[1][0] == tree.trained_edges()[0]).all()
    assert (parts[0][1] + parts[1][1] == tree.trained_edges()[1]).all()


class OwnLoss:
    def normaliser(self, trajectories):
        return sum(row.weights.sum() for row in trajectories)

    def __call__(self, logprobs, entropies, trajectory):
        return -(torch.as_tensor(trajectory.weights[1:], dtype=logprobs.dtype) * logprobs).sum(), {}


REFUSED = {
    "sft": tt.losses.sft(reduction="trajectory"),
    "grpo": tt.losses.grpo(),
    "gspo": tt.losses.gspo(),
    "dr_grpo": tt.losses.dr_grpo(length=8),
    "dpo": tt.losses.dpo(),
    "reinforce": tt.losses.reinforce(importance_cap=2.0, importance_mode="sequence_mask"),
    "actor_critic": tt.losses.grpo(value_coefficient=0.5),
    "OwnLoss": OwnLoss(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_sum_over_tokens_is_refused_by_name(name):
    tree = tt.TokenTree.from_nodes(*prepared(4), count="once")
    head = torch.nn.Linear(24, 1) if name == "actor_critic" else None
    kind = type(REFUSED[name]).__name__
    with pytest.raises(ValueError, match=f"{kind} is no sum over tokens .*count='per trajectory'"):
        tt.TreeEngine(make_model("qwen3"), value_head=head).forward_backward(tree, REFUSED[name])


def test_a_loss_of_ones_own_is_taken_when_it_says_that_it_sums_tokens():
    model, (nodes, ends) = make_model("qwen3", dtype=torch.float64), prepared(4)
    tree = tt.TokenTree.from_nodes(nodes, ends, count="once")
    own = OwnLoss()
    own.sums_tokens = True
    expected, found = (step(model, tree, loss)[1] for loss in (tt.losses.sft(), own))
    assert linear.relative_error(found, expected) <= 1e-12 and expected.norm() > 0
    assert tt.verify(model.float(), tree, loss=own).passed


def test_what_cannot_count_once_is_refused_when_the_tree_is_made():
    nodes = [tt.Node(None, [1, 2]), tt.Node(0, [3]), tt.Node(0, [4])]
    with pytest.raises(tt.DataError, match="trajectory 1: count='once' takes no advantages of rows; give them"):
        tt.TokenTree.from_nodes(nodes, [1, tt.NodeTrajectory(node=2, advantages=0.5)], count="once")
    with pytest.raises(ValueError, match="count='twice' is neither"):
        tt.TokenTree.from_nodes(nodes, [1, 2], count="twice")
