"""Hooks on parameters: called once per backward with the whole gradient, however many parts it took."""

import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from treetrain.check import linear
from treetrain.check.forests import with_random_facts

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9], [1, 9], [9, 8, 7], [9, 8, 7, 7, 2]]
ROWS = [row.replace(loss_weights=None) for row in with_random_facts(IDS, 3)]


def engine(model: nn.Module, budget: int | None) -> None:
    tt.TreeEngine(model, budget=budget).forward_backward(ROWS, tt.losses.sft())


def primitive(model: nn.Module, budget: int | None) -> None:
    rows = tt.logprobs(model, IDS, budget=budget)
    (-torch.cat(rows).sum() / sum(len(row) for row in rows)).backward()


every_way = pytest.mark.parametrize("way", [engine, primitive])
every_budget = pytest.mark.parametrize("budget", [None, 4, 2])


def model_and_gradient(tied: bool) -> tuple[nn.Module, torch.Tensor]:
    model = make_model("qwen2", dtype=torch.float64, tie_word_embeddings=tied)
    engine(model, None)
    gradient = linear.gradients(model)
    model.zero_grad()
    return model, gradient


@pytest.mark.few(1)
@every_way
@every_budget
@pytest.mark.parametrize("tied", [True, False])
def test_a_hook_that_changes_gradients_changes_each_once(way, budget, tied):
    model, expected = model_and_gradient(tied)
    calls = []
    for p in model.parameters():
        p.register_hook(lambda grad: calls.append(1) or grad * 0.5)
    way(model, budget)
    assert linear.relative_error(linear.gradients(model), 0.5 * expected) <= 1e-6
    assert len(calls) == len(list(model.parameters()))


@every_way
@every_budget
def test_an_optimiser_in_backward_steps_once_with_the_whole_gradient(way, budget):
    model, expected = model_and_gradient(True)
    before = [p.detach().clone() for p in model.parameters()]

    def step(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    way(model, budget)
    moved = torch.cat([(old - p.detach()).flatten() for old, p in zip(before, model.parameters())])
    assert linear.relative_error(moved, expected) <= 1e-6
    assert all(p.grad is None for p in model.parameters())


@every_budget
def test_hooked_parameters_accumulate_over_calls(budget):
    model, expected = model_and_gradient(True)
    for p in model.parameters():
        p.register_hook(lambda grad: grad)
    engine(model, budget)
    engine(model, budget)
    assert linear.relative_error(linear.gradients(model), 2 * expected) <= 1e-6


class Fails:
    """A user's loss that fails in the middle of the batch."""

    scope = "trajectory"

    def __init__(self) -> None:
        self.calls = 0

    def normaliser(self, rows) -> float:
        return 1.0

    def __call__(self, logprobs, entropies, row):
        self.calls += 1
        if self.calls == 4:
            raise KeyError("the user's own")
        return logprobs.sum(), {}


@pytest.mark.parametrize("hooked", [False, True])
def test_a_loss_that_fails_leaves_no_gradients_behind(hooked):
    model = make_model("qwen2")
    if hooked:
        model.lm_head.weight.register_hook(lambda grad: grad)
    with pytest.raises(KeyError, match="own"):
        tt.TreeEngine(model, budget=2).forward_backward(ROWS, Fails())
    assert all(p.grad is None for p in model.parameters())
    engine(model, 2)
    with pytest.raises(KeyError) as found:
        tt.TreeEngine(model, budget=2).forward_backward(ROWS, Fails())
    assert "incomplete" in found.value.__notes__[0]


@every_budget
def test_a_hook_that_is_registered_between_score_and_backward_sees_the_whole_gradient(budget):
    model = make_model("qwen2")
    scored = tt.TreeEngine(model, budget=budget).score(IDS)
    calls = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    assert len(calls) == len(list(model.parameters()))
