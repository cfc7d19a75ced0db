"""Speeds measured by two passes: that they tell the time of a pass, and that measuring leaves no trace."""

import dataclasses

import pytest
import torch

import treetrain as tt
from support.models import make_model
from treetrain.engine.costs import cost_of
from treetrain.models.loading import load_model
from treetrain.verification import measure
from treetrain.verification.measure import measured_cost


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measure, "TOKENS", {"cpu": (16, 64)})
    monkeypatch.setattr(measure, "REPEATS", 2)


def test_two_passes_give_seconds_of_a_flop_and_of_a_pass(monkeypatch):
    """As on a device that is three times as slow as described, with passes that cost twice as much."""
    model = load_model("tiny")
    cost = cost_of(model)
    described = cost.speeds.graph_pass
    monkeypatch.setattr(measure, "_seconds", lambda _model, _found, layout: 3 * seconds_of(layout) + 2 * described)

    def seconds_of(layout) -> float:
        return cost.seconds(tt.make_plan(layout, cost)) - described

    found = measured_cost(model).speeds
    for name in ("layers", "attention", "head"):
        assert getattr(found, name) == pytest.approx(getattr(cost.speeds, name) / 3)
    assert found.graph_pass == pytest.approx(2 * described)
    assert found.forward_pass / found.graph_pass == pytest.approx(cost.speeds.forward_pass / described)
    assert measured_cost(model).counts == cost.counts and "passes of 16 and 64 tokens" in found.source


def test_what_is_measured_predicts_another_pass():
    model = load_model("tiny")
    cost = measured_cost(model)
    layout = measure._chain(40, 2048)
    measured = measure._seconds(model, tt.TreeEngine(model).capabilities, layout)
    predicted = cost.seconds(tt.make_plan(layout, cost))
    assert measured / 4 < predicted < 4 * measured  # other work on the machine takes its share


def test_measuring_leaves_gradients_weights_mode_and_random_state_as_they_were():
    model = make_model("qwen3").train()
    some, *rest = model.parameters()
    some.grad = torch.full_like(some, 3.0)
    rest[0].requires_grad_(False)
    before = some.grad
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    assert measured_cost(model).speeds.source.startswith("measured on")
    assert some.grad is before and (before == 3.0).all() and all(p.grad is None for p in rest)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_come_back_when_measuring_fails(monkeypatch):
    model = make_model("qwen3")
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    monkeypatch.setattr(measure, "_seconds", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured_cost(model)
    assert first.grad is not None and not first._post_accumulate_grad_hooks


def test_a_model_that_cannot_be_measured_keeps_described_speeds_and_says_why(monkeypatch):
    model = make_model("qwen3")
    calls = []
    handle = next(model.parameters()).register_post_accumulate_grad_hook(calls.append)
    hooked = measured_cost(model)
    handle.remove()
    frozen = measured_cost(make_model("qwen3").requires_grad_(False))

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_seconds", out_of_memory)
    full = measured_cost(model)
    assert not calls and all(p.grad is None for p in model.parameters())
    for found, why in ((hooked, "hooks"), (frozen, "nothing is trained"), (full, "too little memory")):
        assert why in found.speeds.source
        described = dataclasses.replace(found.speeds, source="")
        assert described == dataclasses.replace(cost_of(model).speeds, source="")
