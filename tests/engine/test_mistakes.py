"""Mistakes in calls are one clear line each, before any work."""

import datasets
import numpy as np
import pytest
import torch

import treetrain as tt
from support.models import make_model

PADDED = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5]])
ROWS = [[1, 2, 3], [1, 2, 4]]


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


def check_says(call, kind, says):
    with pytest.raises(kind, match=says) as error:
        call()
    assert len(str(error.value)) <= 400 and "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [PADDED, PADDED.numpy()], ids=["tensor", "array"])
def test_one_padded_array_is_refused_as_rows_and_a_list_of_its_rows_is_not(model, rows):
    engine = tt.TreeEngine(model)
    for call in (engine.score, engine.logprobs, lambda x: tt.logprobs(model, x), tt.build_tree, tt.pack):
        check_says(lambda call=call: call(rows), tt.DataError, r"one array \[2, 4\].*tt\.from_padded\(input_ids")
    assert tt.build_tree(list(rows)).num_tokens == 6
    for batch in ({"input_ids": PADDED}, "a text"):
        check_says(
            lambda batch=batch: engine.score(batch), tt.DataError, "rows are given as one (dict|str); give a list"
        )
    # A column of a table is a sequence of rows, whatever it is an array of.
    column = np.empty(2, object)
    column[:] = ROWS
    assert tt.build_tree(column).num_tokens == 4


def test_a_name_in_the_place_of_a_model_is_refused_with_what_loads_one(model, tmp_path):
    arguments = tt.TreeArguments(output_dir=str(tmp_path), report_to=[])
    for call in (
        lambda: tt.TreeEngine("Qwen/Qwen3-0.6B"),  # type: ignore[arg-type]
        lambda: tt.logprobs("Qwen/Qwen3-0.6B", ROWS),  # type: ignore[arg-type]
        lambda: tt.verify("Qwen/Qwen3-0.6B", ROWS),  # type: ignore[arg-type]
        lambda: tt.TreeTrainer("Qwen/Qwen3-0.6B", arguments, [tt.Trajectory([1, 2])]),  # type: ignore[arg-type]
    ):
        check_says(call, TypeError, r"model is .*'Qwen/Qwen3-0\.6B'.*; give .*: tt\.load_model")
    check_says(lambda: tt.TreeEngine(model.config), TypeError, "model is a Qwen3Config")


def test_an_unknown_argument_of_the_engine_is_answered_with_those_that_there_are(model):
    check_says(lambda: tt.TreeEngine(model, max_tokens=9), TypeError, "TreeEngine has no argument 'max_tokens'.*budget")  # type: ignore[call-arg]
    check_says(lambda: tt.TreeEngine(model, buget=9), TypeError, r"did you mean budget\?")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ["lists", "a dataset", "dicts"])
def test_rows_that_are_no_trajectories_are_refused_where_facts_are_needed(model, kind, tmp_path):
    rows = {
        "lists": ROWS,
        "a dataset": datasets.Dataset.from_dict({"input_ids": ROWS, "reward": [1.0, 0.0]}),
        "dicts": [{"input_ids": row} for row in ROWS],
    }[kind]
    arguments = tt.TreeArguments(output_dir=str(tmp_path), report_to=[])
    for call in (lambda: tt.group_advantages(rows), lambda: tt.TreeTrainer(model, arguments, rows).train()):  # type: ignore[arg-type]
        check_says(call, tt.DataError, r"row 0 is a (list|dict), not a Trajectory: make one of every row, tt\.Traj")


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_set_between_calls_is_checked_too(model, value):
    engine = tt.TreeEngine(model, temperature=0.7)
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        engine.temperature = value
    assert engine.temperature == 0.7
