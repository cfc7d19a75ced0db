"""Unknown parts of a model are refused by name, before any gradient, wherever they hide."""

import json

import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import FAMILIES, MAMBA, make_config, make_model, mamba1_config
from treetrain.core.errors import UnsupportedModel
from treetrain.models.loading import check_config

ROWS = [tt.Trajectory(row) for row in ([1, 2, 3, 4], [1, 2, 5, 6, 7])]


def refusal(model: nn.Module) -> str:
    """Return the error of a step; no gradient may have been made before it."""
    with pytest.raises(UnsupportedModel) as error:
        tt.TreeEngine(model).forward_backward(ROWS, tt.losses.sft())
    assert all(p.grad is None for p in model.parameters())
    return str(error.value)


@pytest.mark.parametrize("name", [name for name in FAMILIES if make_config(name).to_dict().get("layer_types")])
def test_an_unknown_entry_of_layer_types_is_named(name):
    config = make_config(name)
    config.__dict__["layer_types"] = [*config.layer_types[:-1], "telepathic_attention"]
    kinds = config.to_dict().get("layer_types")
    if name in MAMBA or kinds is None or kinds[-1] != "telepathic_attention":
        pytest.skip("the configuration derives its layer_types")
    model = make_model(name)
    model.config.__dict__["layer_types"] = kinds
    last = len(kinds) - 1
    assert f"layer {last} is of kind 'telepathic_attention'" in refusal(model)


class Telepathy(nn.Module):
    """Mixes all tokens, in no way that anybody has heard of."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states.cumsum(1), None


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "qwen3_5_text"])
def test_a_layer_that_mixes_tokens_without_attention_is_counted(name):
    model = make_model(name)
    layers = model.model.layers
    layers[1].self_attn = Telepathy()
    assert "1 of 2 layers went through tree attention" in refusal(model)


class SelectiveTelepathyRNN(nn.RNN):
    """A recurrence of a new name."""


@pytest.mark.parametrize("kind", [nn.Conv1d, SelectiveTelepathyRNN, nn.LSTM])
def test_an_unknown_recurrence_or_convolution_is_named(kind):
    model = make_model("llama")
    model.model.layers[0].mlp.extra = kind(24, 24, 1)
    said = refusal(model)
    assert "model.layers.0.mlp.extra" in said and kind.__name__ in said


@pytest.mark.parametrize("asked", [{"telepathy": 0.5}, {"alibi_slopes": 0.25}, {"is_causal": False}], ids=str)
def test_an_unknown_keyword_of_attention_is_named(asked):
    model = make_model("llama")
    layer = model.model.layers[1].self_attn
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs, **asked)  # Llama hands on what it does not know
    said = refusal(model)
    assert "LlamaAttention" in said and next(iter(asked)) in said


def test_a_layer_that_attends_twice_is_refused_and_would_be_wrong_in_parts():
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    config = DiffLlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        head_dim=8,
    )
    torch.manual_seed(0)
    assert "layer 0 of DiffLlamaForCausalLM calls its attention several times" in refusal(DiffLlamaForCausalLM(config))


def test_a_configuration_alone_is_refused():
    with pytest.raises(UnsupportedModel, match="mixes tokens by a recurrence"):
        check_config(mamba1_config())


def test_a_refusal_comes_before_a_weight_is_looked_for(tmp_path):
    from treetrain.models.loading import load_model

    mamba1_config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{tmp_path}: model.layers.0.*mixes tokens"):
        load_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "jamba" and sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_what_a_configuration_says_is_what_the_model_says(name):
    from treetrain.layers.finders import check_model

    alone, whole = check_config(make_config(name)), check_model(make_model(name))
    assert alone is not None
    assert [*map(type, alone.special)] == [*map(type, whole.special)]
    for field in ("layers", "vocab_size", "max_positions"):
        assert getattr(alone, field) == getattr(whole, field), field
