"""A TOML file says what the flags say; what is wrong in it is one line: file, key, value and what is allowed."""

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.runs import runs
from treetrain.train.checks import COUNTS, HINTS, NUMBERS, check_setting
from treetrain.train.config import LOSS_OPTIONS, ONLY_WITH, TrainConfig
from treetrain.train.config_file import SECTION_OF, read_settings, settings_as_toml
from treetrain.train.settings import SECTIONS

BASE: dict[str, Any] = {"data": ("rows.jsonl",), "model": "tiny", "output": "out"}


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_flat_keys_and_tables_say_the_same(write) -> None:
    flat = 'data = "rows.jsonl"\nmodel = "tiny"\noutput = "out"\nlr = 1\nbudget = "8GiB"\nmax_grad_norm = "None"'
    tables = """
        output = "out"
        [data]
        data = ["rows.jsonl"]
        [model]
        model = "tiny"
        [optimiser]
        lr = 1.0
        max_grad_norm = "None"
        [execution]
        budget = "8GiB"
    """
    config = TrainConfig(**read_settings(write(flat)))
    assert config == TrainConfig(**read_settings(write(tables)))
    assert config.lr == 1.0 and config.max_grad_norm is None and config.budget == "8GiB"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate = 1.0", ["unknown setting learning_rate = 1.0"]),
        ("warmup-steps = 3", ["unknown setting warmup-steps", "warmup_steps"]),
        ('lr = "fast"', ["lr is 'fast'", "allowed are numbers above 0"]),
        ("lr = 0", ["lr is 0", "above 0"]),
        ("lr = nan", ["lr is nan"]),
        ("lr = true", ["lr is True"]),
        ("steps = 1.5", ["steps is 1.5", "whole numbers from 1"]),
        ("overwrite = 1", ["overwrite is 1", "true and false"]),
        ("loss = 'dppo'", ["loss is 'dppo'", "grpo"]),
        ("reduction = 'mean'", ["reduction is 'mean'", "token, trajectory"]),
        ("kl_estimator = 'k4'", ["kl_estimator is 'k4'", "k1, k2, k3"]),
        ("device = 'tpu'", ["device is 'tpu'", "auto, cpu, cuda"]),
        ("budget = '3XB'", ["budget='3XB'"]),
        ("tools = 3", ["tools is 3", "strings"]),
        ("data = [1]", ["data is [1]", "list of strings"]),
        ("seed = 1979-05-27", ["seed is", "whole numbers"]),
        ("lr = {a = 1}", ["unknown table [lr]", "optimiser"]),
        ("[optimizers]\nlr = 1.0", ["unknown table [optimizers]", "optimiser"]),
        ("[loss]\nlr = 1.0", ["lr stands in [loss]", "[optimiser]"]),
        ("[loss]\nfoo = 1.0", ["unknown setting foo"]),
        ("lr = 1.0\n[optimiser]\nlr = 2.0", ["lr is given twice"]),
        ("lr = 1.0\nlr = 2.0", ["no TOML", "overwrite a value"]),
        ("lr 1", ["no TOML", "line 1"]),
    ],
)
def test_what_is_wrong_is_one_line_with_file_key_value_and_what_is_allowed(write, text, parts) -> None:
    path = write(text)
    with pytest.raises(ValueError) as error:
        read_settings(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.toml cannot be read: No such file"):
        read_settings(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b'model = "caf\xe9"')
    with pytest.raises(ValueError, match=r"latin\.toml is no TOML: it is not UTF-8"):
        read_settings(tmp_path / "latin.toml")


VALUES: dict[str, Any] = {
    "max_grad_norm": None,
    "budget": 4096,
    "clip_high": float("inf"),
    "lora_rank": 4,
    "lora_targets": ("q_proj", "v_proj"),
    "reference_free": True,
    "chat_template": 'a "quoted"\\path\tü€\U0001f600\x7f\x01',
    "lr": 1e-07,
    "seed": 2**63 - 1,
    "ema_decay": 0.999,
}


@pytest.mark.parametrize("values", [{}, VALUES, {"steps": 3, "eval_data": ("a", "b")}], ids=["defaults", "many", "two"])
def test_what_a_run_stores_gives_the_same_run_when_it_is_passed_back(write, values) -> None:
    config = TrainConfig(**BASE | values)
    assert TrainConfig(**read_settings(write(settings_as_toml(config)))) == config


@runs(60)
@given(st.text(min_size=1).filter(str.strip), st.floats(0, 1, exclude_min=True), st.lists(st.text(min_size=1)))
def test_any_string_and_any_number_survive_the_file(name, number, names) -> None:
    config = TrainConfig(**BASE | {"model": name, "lr": number, "data": ("rows.jsonl", *names)})
    text = settings_as_toml(config)
    stored = {key: value for table in tomllib.loads(text).values() for key, value in table.items()}
    assert (stored["model"], stored["lr"], stored["data"]) == (name, number, ["rows.jsonl", *names])


def test_every_setting_has_one_section_a_sentence_and_bounds() -> None:
    names = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names)) and set(names) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(names) == set(SECTION_OF) == set(HINTS)
    for name, hint in HINTS.items():
        kinds = {hint, *typing.get_args(hint)}
        assert (float in kinds) == (name in NUMBERS), name
        assert (int in kinds and name != "budget") == (name in COUNTS), name
    assert set(LOSS_OPTIONS) <= set(SECTION_OF) and set(ONLY_WITH) <= set(SECTION_OF)


def test_every_default_is_a_value_that_is_allowed() -> None:
    for field in dataclasses.fields(TrainConfig):
        if field.default is not dataclasses.MISSING:
            check_setting(field.name, field.default)


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"decay_steps": 5}, "schedule wsd"),
        ({"decay_fraction": 0.5}, "schedule wsd"),
        ({"momentum": 0.5}, "optimizer sgd or muon"),
        ({"lora_alpha": 3.0}, "lora_rank above 0"),
        ({"lora_dora": True}, "lora_rank above 0"),
        ({"lora_rslora": True}, "lora_rank above 0"),
        ({"lora_targets": ("q_proj",)}, "lora_rank above 0"),
        ({"keep_best": True}, "held out"),
        ({"early_stop_patience": 2, "eval_fraction": 0.1}, "eval_every_steps"),
        ({"early_stop_min_delta": 0.1}, "early_stop_patience or keep_best"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused_with_what_it_needs(given, needed) -> None:
    with pytest.raises(ValueError, match=next(iter(given))) as error:
        TrainConfig(**BASE, **given)
    assert needed in str(error.value)
