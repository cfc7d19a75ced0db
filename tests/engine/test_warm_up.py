"""Compiled layers: a warm-up compiles all that steps need, and the planner knows what compiled layers save."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import treetrain as tt
from support.models import make_model
from treetrain.core.hf import tree_mode

_compile = torch.compile


@pytest.fixture
def compiled(monkeypatch):
    """Count the graphs that layers are compiled to; `compiled(name)` says by what."""

    def with_backend(name: str) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(name)
        monkeypatch.setattr(tree_mode.torch, "compile", functools.partial(_compile, backend=counter))
        return counter

    yield with_backend
    torch._dynamo.reset()


def rows(trunk: int, leaf: int, count: int = 3) -> list[tt.Trajectory]:
    rng = np.random.default_rng(trunk)
    shared = rng.integers(1, 30, trunk).tolist()
    made = [[*shared, *rng.integers(1, 30, leaf + k).tolist()] for k in range(count)]
    return [tt.Trajectory(ids, loss_weights=np.arange(len(ids)) >= trunk) for ids in made]


def saved_by_token(engine, batch) -> float:
    """Bytes that a step in one part saves for backward, by token, without what does not grow with its tokens.

    Only the last tokens are predicted, so that the head's share does not grow.
    """

    def total(given) -> tuple[int, int]:
        seen = {}

        def note(x):
            seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            result = engine.forward_backward(given, tt.losses.sft())
        assert result.parts == 1
        return sum(seen.values()), result.computed_tokens

    (less, few), (more, many) = total(batch(40)), total(batch(200))
    return (more - less) / (many - few)


def steps(model, batches, budgets=(None, 12)):
    """Steps, scores with and without gradient, of other trees and plans."""
    for batch, budget in itertools.product(batches, budgets):
        engine = tt.TreeEngine(model, compile_layers=True, budget=budget)
        engine.forward_backward(batch, tt.losses.sft())
        engine.logprobs(batch)
        scored = engine.score(batch)
        sum(row.sum() for row in scored.logprobs).backward()
        scored.backward()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_warm_up_compiles_all_that_steps_of_other_trees_budgets_and_dtypes_need(compiled, checkpointing):
    counter, model = compiled("eager"), make_model("qwen3").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seconds = tt.TreeEngine(model, compile_layers=True).warm_up()
    first = counter.frame_count
    assert seconds > 0 and first > 0
    steps(model, (rows(20, 5), rows(33, 8), rows(64, 2)))
    assert counter.frame_count == first
    with torch.autocast("cpu", torch.bfloat16):
        tt.TreeEngine(model, compile_layers=True).warm_up()
        assert counter.frame_count == 2 * first, "autocast is compiled for anew"
        steps(model, (rows(33, 8),))
        assert counter.frame_count == 2 * first
    tt.TreeEngine(model.bfloat16(), compile_layers=True).warm_up()
    assert counter.frame_count == 3 * first, "and so is a dtype"
    steps(model, (rows(33, 8),))
    assert counter.frame_count == 3 * first


def test_a_warm_up_for_a_plan_compiles_what_that_plan_needs(compiled):
    counter, model, batch = compiled("eager"), make_model("qwen3"), rows(20, 5)
    whole = tt.TreeEngine(model, compile_layers=True)
    whole.warm_up(whole.plan(batch))
    graphs = counter.frame_count
    assert graphs == 4, "shared by all layers: what stands before attention, after it, and around it"
    whole.forward_backward(batch, tt.losses.sft())
    assert counter.frame_count == graphs
    tokens = tt.TreeEngine(model, compile_layers=True, budget=1)
    tokens.warm_up(tokens.plan(batch))
    warm = counter.frame_count
    assert warm > graphs, "passes without gradient, and parts of one token"
    tokens.forward_backward(batch, tt.losses.sft())
    assert counter.frame_count == warm


def test_a_warm_up_leaves_gradients_hooks_and_buffers_alone(compiled):
    compiled("eager")
    model, seen = make_model("qwen3"), []
    weight, layer = model.model.norm.weight, model.model.layers[0]
    weight.grad = torch.ones_like(weight)
    weight.register_hook(lambda grad: seen.append("gradient"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    tt.TreeEngine(model, compile_layers=True).warm_up()
    assert not seen and torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in model.parameters() if p is not weight) and len(layer._forward_hooks) == 1


def test_without_compiled_layers_a_warm_up_does_nothing():
    assert tt.TreeEngine(make_model("qwen3")).warm_up() == 0.0


def test_plans_count_on_what_compiled_layers_save(compiled):
    compiled("aot_eager")
    model = make_model("qwen3")
    eager, engine = tt.TreeEngine(model), tt.TreeEngine(model, compile_layers=True)
    engine.plan(rows(20, 5))
    saved = saved_by_token(engine, lambda size: rows(size, 10))
    assert engine.cost.counts.saved_token == pytest.approx(saved, rel=0.1)
    assert eager.cost.counts.saved_token == pytest.approx(saved_by_token(eager, lambda size: rows(size, 10)), rel=0.1)
    assert engine.cost.counts.saved_token < 0.8 * eager.cost.counts.saved_token
