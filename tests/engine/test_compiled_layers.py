"""Decoder layers that run compiled give the same gradients, and one compilation serves all lengths and parts."""

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import treetrain as tt
from support.models import make_model
from treetrain.check.linear import gradients, relative_error
from treetrain.kernels import compiled as compiled_module

_compile = torch.compile


@pytest.fixture
def compiled(monkeypatch):
    """Count the graphs that layers are compiled to; `with_backend` says by what."""

    def with_backend(name: str) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(name)
        monkeypatch.setattr(compiled_module.torch, "compile", functools.partial(_compile, backend=counter))
        return counter

    yield with_backend
    torch._dynamo.reset()


def rows(trunk: int, leaf: int) -> list[tt.Trajectory]:
    rng = np.random.default_rng(trunk)
    shared = rng.integers(1, 30, trunk).tolist()
    return [tt.Trajectory([*shared, *rng.integers(1, 30, leaf + k).tolist()]) for k in range(3)]


def step(model, batch, **options) -> torch.Tensor:
    model.zero_grad()
    tt.TreeEngine(model, **options).forward_backward(batch, tt.losses.sft())
    return gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_compilation_serves_all_layers_lengths_and_parts(compiled, checkpointing):
    counter, model, found = compiled("eager"), make_model("qwen3"), []
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for batch in (rows(20, 5), rows(33, 8), rows(64, 2)):
        for budget in (None, 12):
            options = {"budget": budget}
            truth = step(model, batch, **options, compile_layers=False)
            assert relative_error(step(model, batch, **options, compile_layers=True), truth) <= 1e-6
            found.append(counter.frame_count)
    assert 0 < found[0] <= 6, "norm and products before attention, output, residuals and MLP: shared by the layers"
    assert found[1] == found[-1] <= 3 * found[0], "compiled again for passes without graph and for single tokens alone"
    assert all(module._compiled_call_impl is None for module in model.modules()), "the model is as it was"


def test_checkpointed_layers_are_exact_beside_compiled_modules(compiled):
    counter, model, batch = compiled("eager"), make_model("qwen3"), rows(20, 5)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    truth = step(model, batch, compile_layers=False)
    assert relative_error(step(model, batch, compile_layers=True), truth) <= 1e-6
    assert counter.frame_count > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_routers_windows_sinks_and_recurrences_are_exact_beside_compiled_modules(compiled, family):
    counter, model = compiled("eager"), make_model(family)
    for batch in (rows(20, 5), rows(33, 8)):
        for budget in (None, 12):
            truth = step(model, batch, budget=budget, compile_layers=False)
            assert relative_error(step(model, batch, budget=budget, compile_layers=True), truth) <= 1e-6
    assert counter.frame_count > 0


@pytest.mark.slow
def test_layers_compiled_by_inductor_hold_the_numerics_contract(compiled):
    counter, model, batch = compiled("inductor"), make_model("qwen3"), rows(40, 9)
    truth = step(model, batch, compile_layers=False)
    assert 0 < relative_error(step(model, batch, compile_layers=True), truth) <= 1e-5
    assert relative_error(step(model, batch, budget=20, compile_layers=True), truth) <= 1e-5
    model.bfloat16()
    own = relative_error(step(model, batch, compile_layers=False), truth)
    assert relative_error(step(model, batch, compile_layers=True), truth) <= 1.5 * own
    assert counter.frame_count > 0


def compiles(engine):
    feature = next(x for x in engine.prepared.registry.features if isinstance(x, compiled_module.CompiledFeature))
    return feature.runs(engine.prepared)


def test_layers_are_compiled_on_a_gpu_by_default_and_never_under_a_users_hook(monkeypatch):
    model = make_model("qwen3")
    assert not compiles(tt.TreeEngine(model)) and compiles(tt.TreeEngine(model, compile_layers=True))
    monkeypatch.setattr("treetrain.core.engine.engine_model.model_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr("treetrain.core.engine.engine_model.free_bytes", lambda device: 1e9)
    assert compiles(tt.TreeEngine(model)) and not compiles(tt.TreeEngine(model, compile_layers=False))
    layer = model.model.layers[0]
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    with compiled_module.compiled_layers(model, {}):
        assert layer._compiled_call_impl is None and layer.mlp._compiled_call_impl is None
        assert layer.self_attn._compiled_call_impl is not None
        assert model.model.layers[1]._compiled_call_impl is not None
    handle.remove()
