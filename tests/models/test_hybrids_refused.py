"""Recurrences that are not carried over forks are refused by layer and by what is missing, before any work."""

import pytest
import torch
import transformers
from torch import nn

import treetrain as tt
from support.models import BASE, MAMBA, make_model
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.recurrence import recurrent_layers
from treetrain.layers.recurrence.recurrent_layers import RecurrentLayers

ROWS = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 7, 7]]


def refused(model: nn.Module, says: str) -> None:
    """Before the model is called at all."""
    started: list[str] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: started.append(type(m).__name__))
    for call in (lambda: tt.TreeEngine(model), lambda: tt.logprobs(model, ROWS)):
        with pytest.raises(UnsupportedModel, match=says):
            call()
    assert started == []


OTHERS = {
    "MiniMax": (
        {"layer_types": ["linear_attention", "full_attention"]},
        r"layers\.0\.self_attn \(MiniMaxLightningAttention\) mixes",
    ),
    "KimiLinear": ({}, r"layers\.\d\.self_attn \(KimiLinearDeltaAttention\) mixes"),
    "Jamba": (
        {"attn_layer_offset": 1, "attn_layer_period": 2},
        r"layers\.0\.mamba \(JambaMambaMixer\) mixes",
    ),
    "RecurrentGemma": ({"num_hidden_layers": 3}, r"rg_lru \(RecurrentGemmaRglru\) mixes"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_recurrences_are_refused_by_name(name):
    own, says = OTHERS[name]
    config_class, model_class = (getattr(transformers, f"{name}{kind}", None) for kind in ("Config", "ForCausalLM"))
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    with torch.device("meta"):
        model = model_class(config_class(**(BASE | own)))
    with pytest.raises(UnsupportedModel, match=says):
        tt.TreeEngine(model)


def test_an_attention_model_with_a_convolution_of_its_own_is_refused():
    model = make_model("llama")
    model.model.layers[1].mlp.smooth = nn.Conv1d(24, 24, 3, groups=24)
    refused(model, r"model\.layers\.1\.mlp\.smooth \(Conv1d\)")
    model = make_model("llama")
    model.model.layers[1].mlp.memory = nn.GRU(24, 24)
    refused(model, r"model\.layers\.1\.mlp\.memory \(GRU\)")


Layer = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet


class Twisted(Layer):
    """The same parts, put together otherwise."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) * 1.01


class TwistedMamba(transformers.models.bamba.modeling_bamba.BambaMixer):
    """The same parts, of which one is skipped."""

    def forward(self, hidden_states, **kwargs):
        skip, self.D = self.D, nn.Parameter(torch.zeros_like(self.D))
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            self.D = skip


class WithoutConfiguration(Layer):
    def __init__(self):
        raise AssertionError


class OneMorePart(Layer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.extra = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("layer_class", "says"),
    [(Twisted, "its own forward gives something else"), (WithoutConfiguration, "cannot be tried")],
)
def test_a_layer_with_the_known_parts_and_another_forward_is_refused(layer_class, says):
    model = make_model("qwen3_5_text")
    model.model.layers[0].linear_attn.__class__ = layer_class
    refused(model, rf"model\.layers\.0\.linear_attn \({layer_class.__name__}\).*{says}")


def test_a_mamba_2_layer_with_another_forward_is_refused():
    model = make_model("bamba")
    model.model.layers[0].mamba.__class__ = TwistedMamba
    refused(model, r"model\.layers\.0\.mamba \(TwistedMamba\) has the parts of a Mamba-2 layer, but")


def test_a_layer_with_another_part_is_refused():
    model = make_model("qwen3_5_text")
    model.model.layers[0].linear_attn = OneMorePart(model.config, 0)
    refused(model, r"model\.layers\.0\.linear_attn")


def test_a_want_of_memory_while_a_layer_is_tried_says_nothing_about_its_class(monkeypatch):
    def no_memory(*_args, **_keywords):
        raise MemoryError

    model = make_model("qwen3_5_text")
    monkeypatch.setattr(recurrent_layers, "_TRUSTED", {})
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(recurrent_layers.nn.init, "normal_", no_memory)
        tt.TreeEngine(model)
    tt.TreeEngine(model)


TRIED = dict.fromkeys(["qwen3_5_text", "qwen3_next_dense", "olmo_hybrid", "lfm2", *MAMBA, "falcon_h1_plain"], 1)
TRIED |= {"falcon_h1": 2, "falcon_h1_plain": 2, "zamba2": 3}
"""Families, and how many recurrent layers their small models have."""


@pytest.mark.parametrize("name", TRIED)
def test_trying_a_layer_draws_no_random_numbers_and_works_without_weights(name):
    recurrent_layers._TRUSTED.clear()
    with torch.device("meta"):
        model = type(make_model(name))(make_model(name).config)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    special = tt.TreeEngine(model).capabilities.special
    assert sum(len(x.modules) for x in special if isinstance(x, RecurrentLayers)) == TRIED[name]
    assert torch.equal(state, torch.get_rng_state())
    assert all(wrong is None for wrong in recurrent_layers._TRUSTED.values())


class DropsKeywords(transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        if hasattr(self, "linear_attn"):
            return hidden_states + self.linear_attn(self.input_layernorm(hidden_states))
        return super().forward(hidden_states, **kwargs)


def test_a_model_that_keeps_the_run_from_its_recurrent_layers_is_refused_before_any_gradient():
    model = make_model("qwen3_5_text")
    model.model.layers[0].__class__ = DropsKeywords
    with pytest.raises(UnsupportedModel, match="Qwen3_5GatedDeltaNet was called without the tree run"):
        tt.TreeEngine(model).forward_backward([tt.Trajectory(row) for row in ROWS], tt.losses.sft())
    assert all(p.grad is None for p in model.parameters())
