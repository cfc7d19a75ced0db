"""Model folders of others are refused before they fill the memory or end the process."""

import json
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treetrain.core.errors import DataError
from treetrain.logs.chat import Renderer
from treetrain.models import loading
from treetrain.models.loading import load_config, load_model, load_tokenizer


def folder_of(path: Path, **changed: object) -> Path:
    loading._preset_model("tiny", 0, "float32").config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config | changed))
    return path


@pytest.mark.parametrize("load", [load_config, load_model])
def test_a_configuration_of_a_billion_layers_is_refused_before_they_are_listed(load, tmp_path) -> None:
    begun = time.process_time()
    with pytest.raises(DataError, match=r"has num_hidden_layers=1,000,000,000, more than 10,000, which no model has"):
        load(folder_of(tmp_path, num_hidden_layers=10**9))
    assert time.process_time() - begun < 30


def test_a_configuration_of_more_modules_than_any_model_has_is_refused_while_they_are_made(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(loading, "MOST_MODULES", 100)
    with pytest.raises(DataError, match="is that of a model of more than 100 modules"):
        load_model(folder_of(tmp_path, num_hidden_layers=50))


def test_a_configuration_that_no_model_can_be_built_of_is_refused_with_its_folder(tmp_path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}: no Qwen3Config .*Padding_idx must be within .*correct its con"):
        load_model(folder_of(tmp_path, pad_token_id=99_999))


def tokenizer_of(path: Path, **parts: object) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_a_tokenizer_that_multiplies_texts_is_refused(tmp_path) -> None:
    many = normalizers.Sequence([normalizers.Replace("a", "a" * 20)] * 4)
    with pytest.raises(DataError, match="replaces texts by others that are up to 160,000 times as long"):
        load_tokenizer(tokenizer_of(tmp_path / "many", normalizer=many))
    usual = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_"), normalizers.NFKC()])
    load_tokenizer(tokenizer_of(tmp_path / "usual", normalizer=usual))


def test_a_tokenizer_whose_expression_gives_up_is_an_error_with_the_text(tmp_path) -> None:
    endless = pre_tokenizers.Split(Regex(r"(x+x+)+(?<=y)z"), "isolated")
    tokenizer = load_tokenizer(tokenizer_of(tmp_path, pre_tokenizer=endless))
    with pytest.raises(DataError, match=r"the tokenizer fails with the rendered text 'xxx.*retry-limit"):
        Renderer(tokenizer, "{{ messages }}").encode("x" * 60)
