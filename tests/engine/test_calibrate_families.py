"""What formulas say about the memory of families beside what their tensors take."""

import dataclasses

import numpy as np
import pytest
import torch

import treetrain as tt
from support.families import FAMILIES, MAMBA
from support.hybrids import make_hybrid
from treetrain.engine.batch import Batch
from treetrain.engine.calibrate import _Bench, _gradients_aside, _memory, model_shape
from treetrain.engine.executor import Executor
from treetrain.engine.formula import formula_constants
from treetrain.engine.gradients import gradient_buffers
from treetrain.engine.loss_gradients import KnownGradients, ScoreTable
from treetrain.engine.memory import live_bytes
from treetrain.models.capability import check_model
from treetrain.planning.partition import partition
from treetrain.planning.price import CostModel

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128}
FAR = {  # LayerNorms keep less than the RMS norms of the formula, and no queries are normed: it is on the safe side
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "phi", "starcoder2"), 1.1),
    **dict.fromkeys(("gpt_oss", "gemma2", "gemma3_text", "cohere", "cohere2", "olmo2", "mistral_window"), 0.3),
}
"""Relative error of the formula where it is more than 0.2."""


def sized(name: str, dtype: torch.dtype = torch.float32):
    changes = {"gpt2": {}, "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}}.get(name, SIZES)
    return make_hybrid(name, dtype=dtype, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in MAMBA), "olmo_hybrid", "lfm2"])
def test_the_formula_knows_about_what_a_family_saves_for_backward(name, dtype):
    model = sized(name, dtype)
    capabilities, shape = check_model(model), model_shape(model)
    formula = formula_constants(model, capabilities, shape)
    with _gradients_aside(model), gradient_buffers(model) as buffers:
        bench = _Bench(model, capabilities, buffers)
        bench.graph(64, 1)
        found = _memory(bench, formula, shape, 64, 256)
    assert formula.saved_token == pytest.approx(found["saved_token"], rel=FAR.get(name, 0.2))


@pytest.mark.parametrize("budget", [pytest.param(10_000, marks=pytest.mark.slow), 60, 20])
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2", "deepseek_v3", "qwen3_5_text", "lfm2", "llama4_text"])
def test_what_the_carry_takes_is_known_exactly_and_the_peak_within_a_fifth(name, budget):
    model = sized(name)
    capabilities, shape = check_model(model), model_shape(model)
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 37, 100).tolist()
    rows = [tt.Trajectory(trunk[: 30 * (1 + k % 3)] + rng.integers(0, 37, 50).tolist()) for k in range(4)]
    layout = Batch.of(tt.build_tree(rows), weighted=True).layout
    formula = formula_constants(model, capabilities, shape)
    with _gradients_aside(model), gradient_buffers(model) as buffers:
        bench = _Bench(model, capabilities, buffers)
        bench.graph(64, 1)
        measured = _memory(bench, formula, shape, 64, 256)
    cost = CostModel(shape=shape, constants=dataclasses.replace(formula, **measured, slack=1.0, slack_bytes=0.0))
    plan = partition(layout, budget, cost.seconds)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with live_bytes(CPU) as meter:
        table = ScoreTable(layout.num_edges, len(layout.rows), torch.float32, CPU, entropy=False)
        executor = Executor(model, capabilities, plan, temperature=1.0, gradients=True)
        executor.train(KnownGradients(table, torch.ones(layout.num_edges)))
    held = executor._cache.num_bytes + executor._states.num_bytes
    assert held == pytest.approx(cost.bytes_by(plan)["carry"], rel=1e-9)
    assert meter.peak == pytest.approx(cost.peak_bytes(plan), rel=0.2)
