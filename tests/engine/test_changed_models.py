"""What changes between a score and its backward: refused by name where the gradients would be of another model."""

import numpy as np
import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from support.plans import planned
from treetrain.engine.deferred import DeferredGradient
from treetrain.errors import UnsupportedModel
from treetrain.testing import linear
from treetrain.testing.contract import PureFloat64

ROWS = [[1, 2, 3, 4, 20, 21], [1, 2, 3, 4, 20, 22, 23], [1, 2, 25], [30, 31]]


@pytest.fixture(autouse=True)
def pure_float64():
    """Norms of transformers that compute in float32 do not."""
    with PureFloat64():
        yield


def recomputing(model, **options):
    """An engine whose parts run again in backward."""

    engine = planned("chunks of 2", "all")(model, **options)
    engine.prepared.plan_keeping_graphs = lambda plan: None
    return engine


def loss_of(logprobs):
    return sum((row.square() * (1 + number)).sum() for number, row in enumerate(logprobs))


def shift_router(model):
    """Moves a router's correction as DeepSeek-V3 does in training: some experts up, as many down."""
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias += 0.5 * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=bias.dtype)


def set_scaling(model):
    model.model.layers[1].self_attn.scaling *= 2


def set_config(model):
    model.config.logits_scaling = 7.0


CHANGES = {
    "a router's buffer": ("deepseek_v3", shift_router, r"e_score_correction_bias of model\.layers\.1\.mlp\.gate has"),
    "a layer's setting": ("qwen3", set_scaling, r"scaling of model\.layers\.1\.self_attn was 0\.35\d* and is 0\.70"),
    "the configuration": ("granite", set_config, r"logits_scaling of GraniteConfig was 3\.0 and is 7\.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_score_and_backward_is_refused_by_name(name):
    family, change, says = CHANGES[name]
    model = make_model(family, dtype=torch.float64)
    scored = recomputing(model).score(ROWS)
    loss_of(scored.logprobs).backward()
    change(model)
    with pytest.raises(RuntimeError, match=rf"switched between TreeEngine\.score and its backward \({says}"):
        scored.backward()
    for p in model.parameters():
        assert p.grad is None or (isinstance(p.grad, DeferredGradient) and p.grad.beneath is None)


def test_a_buffer_of_the_value_head_is_seen_too():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(24, 1)
            self.register_buffer("size", torch.ones(1))

        def forward(self, x):
            return super().forward(x).squeeze(-1) * self.size

    head = Scaled().double()
    scored = recomputing(make_model("qwen3", dtype=torch.float64), value_head=head).score(ROWS, values=True)
    loss_of(scored.values).backward()
    head.size *= 2
    with pytest.raises(RuntimeError, match="size of the value head has other values"):
        scored.backward()


def test_a_score_keeps_its_own_temperature_and_heads_whatever_its_engine_does_later():
    model, head = make_model("qwen3", dtype=torch.float64), nn.Sequential(nn.Linear(24, 1), nn.Flatten(0)).double()
    logprobs = linear.score_rows(model, ROWS, 1.3)[0]
    truth = linear.gradients(model, loss_of(logprobs))
    model.zero_grad()
    engine = recomputing(model, temperature=1.3, value_head=head)
    scored = engine.score(ROWS, values=True)
    engine.temperature = 0.6
    assert not torch.allclose(engine.logprobs(ROWS)[0], logprobs[0])  # without values, at the other temperature
    loss_of(scored.logprobs).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


def test_what_forwards_and_generation_write_is_no_change():
    model = make_model("qwen3", dtype=torch.float64)
    truth = linear.gradients(model, loss_of(linear.score_rows(model, ROWS)[0]))
    model.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
    model.calls = 0

    def count(module, args, kwargs):
        module.calls += 1
        module.tokens_seen += kwargs["input_ids"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    model.zero_grad()
    scored = recomputing(model).score(ROWS)
    model.eval().generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
    model.train().config.use_cache = False
    loss_of(scored.logprobs).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


def test_a_dropout_of_any_kind_is_seen_whenever_it_is_switched_on():
    model = make_model("qwen3", dtype=torch.float64).train()
    mlp = model.model.layers[0].mlp
    mlp.dropout, mlp._drop_rates = np.float64(0.0), {"up": 0.0}
    engine = tt.TreeEngine(model)
    for switch in (
        lambda rate: setattr(mlp, "dropout", np.float64(rate)),
        lambda rate: mlp._drop_rates.update(up=rate),
    ):
        engine.logprobs([[1, 2, 3]])
        switch(0.5)
        with pytest.raises(UnsupportedModel, match=r"dropout 0\.5"):
            engine.logprobs([[1, 2, 3]])
        switch(0.0)
