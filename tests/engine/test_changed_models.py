"""What changes between a score and its backward: refused by name where the gradients would be of another model."""

import numpy as np
import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from support.plans import calls_answer, planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.core.engine.deferred import DeferredGradient
from treetrain.core.engine.model_state import _checksum
from treetrain.core.errors import UnsupportedModel

ROWS = [[1, 2, 3, 4, 20, 21], [1, 2, 3, 4, 20, 22, 23], [1, 2, 25], [30, 31]]


@pytest.fixture(autouse=True)
def pure_float64():
    """Norms of transformers that compute in float32 do not."""
    with PureFloat64():
        yield


def recomputing(model, **options):
    """An engine whose parts run again in backward."""

    engine = planned("chunks of 2", "all")(model, **options)
    calls_answer(engine, plan_keeping_graphs=lambda plan: None)
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


def mlp_of(model):
    return model.model.layers[1].mlp


def steer(model):
    mlp_of(model).register_forward_hook(lambda module, args, output: 2 * output)


def wrap(model):
    mlp = mlp_of(model)
    plain = mlp.forward
    mlp.forward = lambda x: 2 * plain(x)


def set_activation(model):
    mlp_of(model).act_fn = nn.Identity()


def set_class(model):
    kind = type(mlp_of(model))
    mlp_of(model).__class__ = type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


def set_list(model):
    model.model.layers[1].scales[0] = 3.0


def set_tensor(model):
    model.model.layers[1].direction.mul_(2)


def set_function(model):
    model.model.layers[1].scale = torch.neg


def hook_gradients(model):
    mlp_of(model).register_full_backward_hook(lambda module, given, output: tuple(2 * g for g in given))


CHANGES = {
    "a router's buffer": ("deepseek_v3", shift_router, r"e_score_correction_bias of model\.layers\.1\.mlp\.gate has"),
    "a layer's setting": ("qwen3", set_scaling, r"scaling of model\.layers\.1\.self_attn was 0\.35\d* and is 0\.70"),
    "the configuration": ("granite", set_config, r"logits_scaling of GraniteConfig was 3\.0 and is 7\.0"),
    "a hook": ("qwen3", steer, r"hooks of model\.layers\.1\.mlp have changed"),
    "a hook of gradients": ("qwen3", hook_gradients, r"hooks of model\.layers\.1\.mlp have changed"),
    "a forward": ("qwen3", wrap, r"forward of model\.layers\.1\.mlp has changed"),
    "an activation": ("qwen3", set_activation, r"submodules of model\.layers\.1\.mlp have changed"),
    "a class": ("qwen3", set_class, r"class of model\.layers\.1\.mlp has changed"),
    "a function": ("qwen3", set_function, r"scale of model\.layers\.1 has changed"),
    "a value in a list": ("qwen3", set_list, r"scales of model\.layers\.1 was \(1\.0, 2\.0\) and is \(3\.0, 2\.0\)"),
    "a tensor that is no buffer": ("qwen3", set_tensor, r"direction of model\.layers\.1 has other values"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_score_and_backward_is_refused_by_name(name):
    family, change, says = CHANGES[name]
    model = make_model(family, dtype=torch.float64)
    layer = model.model.layers[1]
    layer.scales, layer.direction, layer.scale = [1.0, 2.0], torch.ones(3), torch.abs
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


def test_a_hook_that_is_on_around_the_score_alone_is_refused_where_parts_run_again_and_right_where_graphs_are_kept():
    model = make_model("qwen3", dtype=torch.float64)

    def scored_while_steered(engine, rows=ROWS):
        hook = mlp_of(model).register_forward_hook(lambda module, args, output: 2 * output)
        try:
            return engine.score(rows)
        finally:
            hook.remove()

    hook = mlp_of(model).register_forward_hook(lambda module, args, output: 2 * output)
    truth = linear.gradients(model, loss_of(linear.score_rows(model, ROWS)[0]))
    hook.remove()
    kept = scored_while_steered(tt.TreeEngine(model))
    loss_of(kept.logprobs).backward()
    kept.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
    model.zero_grad()
    again = scored_while_steered(recomputing(model))
    loss_of(again.logprobs).backward()
    with pytest.raises(RuntimeError, match=r"hooks of model\.layers\.1\.mlp have changed"):
        again.backward()


PLACES = {
    "rows reversed": lambda p: p.data.copy_(p.data.flip(0)),
    "rows rolled": lambda p: p.data.copy_(p.data.roll(1, 0)),
    "columns rolled": lambda p: p.data.copy_(p.data.roll(1, 1)),
    "halves exchanged": lambda p: p.data.copy_(p.data.roll(len(p) // 2, 0)),
    "negated": lambda p: p.data.neg_(),
    "a row negated": lambda p: p.data[2].neg_(),
}


@pytest.mark.parametrize("name", PLACES)
def test_weights_that_change_places_or_signs_are_other_weights(name):
    model = make_model("qwen3", dtype=torch.float64)
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored.logprobs).backward()
    PLACES[name](model.model.layers[0].self_attn.q_proj.weight)
    with pytest.raises(RuntimeError, match="weights have changed"):
        scored.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 24), (600, 1000), (3, 700, 640)])
def test_a_checksum_depends_on_places_whatever_the_size(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = _checksum(weight)
    assert _checksum(weight.clone()) == total
    others = [weight.flip(0), weight.roll(1, 0), weight.roll(1, -1), -weight, weight.roll(8)]
    swapped = weight.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    one = weight.clone()
    one.view(-1)[-1] += 1
    assert all(_checksum(other) != total for other in (*others, swapped, one))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_both_backwards_drops_what_waits(set_to_none):
    model = make_model("qwen3", dtype=torch.float64)
    logprobs = linear.score_rows(model, ROWS)[0]
    truth = linear.gradients(model, loss_of(logprobs))
    scored = tt.TreeEngine(model).score(ROWS)
    (7 * loss_of(scored.logprobs)).backward()
    model.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match=r"have been dropped \(zero_grad\?\)"):
        scored.backward()
    loss_of(scored.logprobs).backward()  # a later one counts, without what was dropped
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


def test_parameters_whose_gradients_are_zeroed_get_nothing_of_what_waited():
    model = make_model("qwen3", dtype=torch.float64)
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored.logprobs).backward()
    dropped = list(model.model.layers[0].parameters())
    for p in dropped:
        p.grad = None
    scored.backward()
    assert all((p.grad is None) == any(p is other for other in dropped) for p in model.parameters())


@pytest.mark.parametrize("surrounding", [torch.inference_mode, torch.no_grad])
def test_a_backward_within_inference_mode_is_that_outside_of_it(surrounding):
    model = make_model("qwen3", dtype=torch.float64)
    truth = linear.gradients(model, loss_of(linear.score_rows(model, ROWS)[0]))
    scored = recomputing(model).score(ROWS)
    loss_of(scored.logprobs).backward()
    with surrounding():
        scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


def test_hooks_by_which_transformers_records_outputs_may_come_in_between():
    """They are set in the first forward that asks for outputs of layers, such as the routers', and change no values."""
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    found = []
    for records in (False, True):
        model = make_model("qwen3_moe", torch.float64)
        scored = recomputing(model, check=False).score(ROWS)
        if records:
            assert not any(module._forward_hooks for module in model.modules())
            capturing.maybe_install_capturing_hooks(model.model)
            assert any(module._forward_hooks for module in model.modules())
        loss_of(scored.logprobs).backward()
        scored.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*found)
