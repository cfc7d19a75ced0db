"""Training on trees of nodes: as on their rows."""

import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.node_trees import ADVANTAGES, random_nodes
from treetrain.testing import linear
from treetrain.testing.contract import PureFloat64

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


@pytest.mark.parametrize(("name", "budget"), [(name, (None, 3)[number % 2]) for number, name in enumerate(LOSSES)])
def test_gradients_of_a_tree_of_nodes_are_those_of_its_rows(name, budget):
    model, loss, checked = make_model("qwen3", dtype=torch.float64), LOSSES[name], 0
    for seed in range(6):
        tree = tt.TokenTree.from_nodes(*random_nodes(seed, ADVANTAGES[seed % 3]))
        rows = list(tree.trajectories)
        if not any(row.weights.any() for row in rows):
            continue
        whole, expected = gradient(model, rows, loss, None)
        got, found = gradient(model, tree, loss, budget)
        assert linear.relative_error(found, expected) <= 1e-12
        assert got.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
        assert got.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)
        checked += expected.norm() > 0
    assert checked >= 4
