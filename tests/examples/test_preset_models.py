"""Built-in random models, and the one way to name a model."""

import pytest
import torch

from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.models.loading import (
    PRESETS,
    load_config,
    load_model,
    load_tokenizer,
)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", seed=0)


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)


def weights(model):
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_one_seed_gives_one_model_and_another_seed_another(tiny):
    same, other = (weights(load_model("tiny", seed=seed)) for seed in (0, 1))
    for name, weight in weights(tiny).items():
        assert torch.equal(weight, same[name])
    name = "model.embed_tokens.weight"
    assert not torch.equal(same[name], other[name])


def test_building_a_model_leaves_the_global_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model("tiny", seed=3)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 3_672_832), ("small", 29_371_008)])
def test_a_preset_has_the_size_it_states(name, parameters):
    with torch.device("meta"):
        from transformers import Qwen3ForCausalLM

        model = Qwen3ForCausalLM(load_config(name))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_model_and_tokenizer_of_a_preset_agree_on_ids(name):
    config, tokenizer = load_config(name), load_tokenizer(name)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config.bos_token_id is None
    assert config.vocab_size == len(tokenizer)
    assert config.max_position_embeddings == tokenizer.model_max_length


def test_the_untrained_model_is_about_as_sure_as_a_uniform_guess_and_holds_no_denormals(tiny):
    for weight in weights(tiny).values():
        assert weight[weight != 0].abs().min() > torch.finfo(torch.float32).tiny
    ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        loss = tiny(input_ids=ids, labels=ids).loss
    assert abs(float(loss) - torch.tensor(2048.0).log()) < 0.5


def test_a_saved_preset_loads_from_its_folder(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    load_tokenizer("tiny").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert all(torch.equal(weight, weights(model)[name]) for name, weight in weights(tiny).items())
    assert load_model(str(tmp_path), dtype=torch.float64).dtype == torch.float64
    text = "<|im_start|>user\n12 * 3"
    assert load_tokenizer(tmp_path)(text)["input_ids"] == load_tokenizer("tiny")(text)["input_ids"]


def test_a_preset_takes_no_options():
    with pytest.raises(ValueError, match="takes no options, got: device_map"):
        load_model("tiny", device_map="cpu")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "has space"])
def test_a_missing_folder_is_named_as_such(load, path):
    with pytest.raises(DataError, match=f"there is no folder {path}, and it cannot be a hub id"):
        load(path)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_id_without_network_says_that_the_hub_was_asked(load, no_network):
    with pytest.raises(DataError, match=r"'nobody/no-such-model' is no folder.*hub id.*Check the spelling"):
        load("nobody/no-such-model")


def test_a_folder_without_a_model_or_a_tokenizer_says_so(tmp_path):
    with pytest.raises((DataError, UnsupportedModel), match=r"has no config\.json.*save_pretrained"):
        load_model(tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_an_adapter_folder_is_recognised(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="LoRA adapter"):
        load_model(tmp_path)


def test_a_folder_of_no_causal_model_is_unsupported(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(UnsupportedModel, match="holds no model that transformers knows"):
        load_model(tmp_path)


def test_a_model_folder_without_weights_says_so(tmp_path):
    load_config("tiny").save_pretrained(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        load_model(tmp_path)
