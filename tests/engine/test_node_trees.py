"""Training on trees of nodes: as on their rows, and nothing is flattened."""

import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.node_trees import ADVANTAGES, random_node_tree
from treetrain.testing import linear
from treetrain.testing.contract import PureFloat64
from treetrain.tree.nodes import NodeRows
from treetrain.tree.token_tree import TokenTree

LOSSES = {
    "sft per trajectory": tt.losses.sft(reduction="trajectory"),
    "reinforce": tt.losses.reinforce(kl=0.2, kl_estimator="k1"),
    "ppo": tt.losses.ppo(clip=0.2, entropy=0.05),
}


def gradient(model, batch, loss, budget) -> tuple[tt.StepResult, torch.Tensor]:
    model.zero_grad()
    with PureFloat64():
        result = tt.TreeEngine(model, budget=budget).forward_backward(batch, loss)
    return result, linear.gradients(model)


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_tree_of_nodes_are_those_of_its_rows(name, budget):
    model, loss, checked = make_model("qwen3", dtype=torch.float64), LOSSES[name], 0
    for seed in range(6):
        tree = random_node_tree(seed, ADVANTAGES[seed % 3])
        rows = list(tree.trajectories)
        if not any(row.weights.any() for row in rows):
            continue
        whole, expected = gradient(model, rows, loss, None)
        got, merged = gradient(model, tree, loss, budget)
        assert linear.relative_error(merged, expected) <= 1e-12
        assert got.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
        assert got.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)
        checked += expected.norm() > 0
    assert checked >= 4


@pytest.mark.parametrize("budget", [None, 50])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_on_a_tree_of_nodes_flattens_nothing(name, budget, monkeypatch):
    def refuse(*_):
        raise AssertionError("flattened")

    nodes = [tt.Node(None, [1], loss_weights=0.0)]
    for number in range(150):
        facts = {"advantages": 0.5, "old_logprobs": [-3.5], "ref_logprobs": [-3.0]}
        nodes.append(tt.Node(2 * number, [2 + number % 15], **facts))
        nodes.append(tt.Node(2 * number, [20 + number % 15], **facts))
    ends = [*range(1, len(nodes), 2), len(nodes) - 1]
    tree = TokenTree.from_nodes(nodes, ends)
    monkeypatch.setattr(TokenTree, "paths", refuse)
    monkeypatch.setattr(TokenTree, "path", refuse)
    monkeypatch.setattr(NodeRows, "__getitem__", refuse)
    monkeypatch.setattr(NodeRows, "__iter__", refuse)
    result, found = gradient(make_model("qwen3", dtype=torch.float64), tree, LOSSES[name], budget)
    assert found.norm() > 0 and (result.parts > 1) == (budget is not None)
