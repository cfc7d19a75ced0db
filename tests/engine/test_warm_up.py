"""Compiled layers: a warm-up compiles all that steps need, and the planner knows what compiled layers save."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import treetrain as tt
from support.models import make_model
from treetrain.models import tree_mode

_compile = torch.compile


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs that layers are compiled to, as they would be on a GPU, but for the kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(tree_mode.torch, "compile", functools.partial(_compile, backend=counter))
    yield counter
    torch._dynamo.reset()


def rows(trunk: int, leaf: int, count: int = 3) -> list[tt.Trajectory]:
    rng = np.random.default_rng(trunk)
    shared = rng.integers(1, 30, trunk).tolist()
    return [tt.Trajectory([*shared, *rng.integers(1, 30, leaf + k).tolist()]) for k in range(count)]


def saved_by_token(engine, batch) -> float:
    """Bytes that a step in one part saves for backward, by token, without what does not grow with its tokens."""

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


def test_the_warm_up_compiles_all_that_steps_need(counter):
    model = make_model("qwen3")
    engine, in_parts = tt.TreeEngine(model, compile_layers=True), tt.TreeEngine(model, compile_layers=True, budget=12)
    assert engine.warm_up() > 0
    graphs = counter.frame_count
    assert graphs == 8, "before attention and after it, of the first layer and of others; with gradient and without"
    for trunk, leaf in ((20, 5), (33, 8), (64, 2)):
        engine.forward_backward(rows(trunk, leaf), tt.losses.sft())
        in_parts.forward_backward(rows(trunk, leaf), tt.losses.sft())
        engine.logprobs(rows(trunk, leaf))
    assert counter.frame_count == graphs
