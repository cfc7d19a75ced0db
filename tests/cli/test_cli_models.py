"""`treetrain models`: the table of classes, and the answer for one model from its configuration alone."""

import json
from pathlib import Path

import pytest

from support.models import make_config, mamba1_config
from treetrain.models.loading import FamilyTable


def config_folder(tmp_path: Path, family: str, **changes) -> str:
    """A folder with a configuration and no weights."""
    folder = tmp_path / family
    make_config(family, **changes).save_pretrained(folder)
    return str(folder)


def test_the_table_lists_what_was_found(treetrain):
    wanted = FamilyTable.packaged().classes
    answer = treetrain("models", "--json")
    assert answer.code == 0
    assert [one["model_type"] for one in json.loads(answer.out)["classes"]] == [one.model_type for one in wanted]
    lines = treetrain("models").out.splitlines()
    for one in wanted:
        errors = [error for error in one.errors if error]
        assert any(line.split()[: 2 + len(errors)] == [one.model_type, one.verdict, *errors] for line in lines), one
        assert len(errors) >= 2 or one.verdict != "exact"


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_one_model_is_answered_for_without_weights(treetrain, tmp_path, family):
    folder = config_folder(tmp_path, family)
    answer = treetrain("models", "--model", folder, "--json")
    found = json.loads(answer.out)
    assert answer.code == 0 and found["verdict"] == "exact", found
    assert "its layers pass the check" in treetrain("models", "--model", folder).out
    tested = FamilyTable.packaged().find(found["model_type"])
    assert tested is not None and f"relative error {tested.float64:.1e} in float64" in found["reason"]


def test_a_refused_model_is_told_why_and_the_exit_code_says_so(treetrain, tmp_path):
    mamba1_config().save_pretrained(tmp_path)
    answer = treetrain("models", "--model", str(tmp_path))
    assert (
        answer.code == 1 and "refused" in answer.out and "model.layers.0" in answer.out and "mixes tokens" in answer.out
    )


def test_a_preset_is_answered_for_too(treetrain):
    assert json.loads(treetrain("models", "--model", "tiny", "--json").out)["verdict"] == "exact"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "./no/such/folder"], "there is no folder ./no/such/folder"),
    ],
)
def test_what_cannot_be_answered_is_one_line(treetrain, argv, says):
    answer = treetrain("models", *argv)
    assert answer.code == 2 and says in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_an_unsupported_model_is_refused_before_its_weights_are_looked_for(treetrain, tmp_path, token_file, command):
    mamba1_config(vocab_size=2000).save_pretrained(tmp_path)  # there are no weights in it
    answer = treetrain(command, token_file, "--model", str(tmp_path))
    assert answer.code == 2 and f"{tmp_path}: model.layers.0" in answer.err and "mixes tokens" in answer.err
