"""Mistakes in calls are one clear line each, before any work."""

import copy
import pickle

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


# ---- the model and the call


@pytest.mark.parametrize("how", ["forward", "hook"])
def test_logits_that_are_changed_after_the_head_are_named(how):
    model = make_model()

    def without_one(output):
        output.logits[..., 3] = -torch.inf
        return output

    if how == "hook":
        model.register_forward_hook(lambda module, args, output: without_one(output))
    else:
        forward = model.forward
        model.forward = lambda *args, **kwargs: without_one(forward(*args, **kwargs))
    with pytest.raises(
        tt.UnsupportedModel, match=r"reads or changes logits after its head, in its forward or in a hook"
    ):
        tt.logprobs(model, [[1, 2, 3], [1, 2, 4]])


def test_a_vocabulary_that_is_larger_than_the_embedding_is_that_of_the_embedding():
    model = make_model()
    rows = model.get_input_embeddings().num_embeddings
    model.config.vocab_size = rows + 20
    with pytest.raises(
        tt.DataError, match=rf"token id {rows + 1} at position 2 is outside the model's vocabulary of {rows}"
    ):
        tt.logprobs(model, [[1, 2, rows + 1]])
    tt.logprobs(model, [[1, 2, rows - 1]])


def test_a_model_without_weights_and_a_default_device_beside_it_are_refused():
    model, rows = make_model(), [[1, 2, 3], [1, 2, 4]]
    with torch.device("meta"), pytest.raises(ValueError, match=r"default device is meta .* the model is on cpu"):
        tt.logprobs(model, rows)
    engine = tt.TreeEngine(model.to("meta"))
    for call in (engine.score, lambda rows: engine.forward_backward(rows, tt.losses.sft())):
        with pytest.raises(tt.UnsupportedModel, match="on the meta device, which holds no weights"):
            call(rows)


def test_weights_that_functional_call_put_in_are_named():
    model = make_model()
    engine = tt.TreeEngine(model)

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return engine.score([[1, 2, 3], [1, 2, 4]])

    others = {f"model.{name}": p.detach() + 0.1 for name, p in model.named_parameters()}
    scored = torch.func.functional_call(Scores(), {name: p.requires_grad_() for name, p in others.items()}, ())
    sum(row.sum() for row in scored.logprobs).backward()
    with pytest.raises(RuntimeError, match=r"torch\.func\.functional_call put others in"):
        scored.backward()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_scores_are_not_copied(duplicate):
    scored = tt.TreeEngine(make_model()).score([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(TypeError, match=r"TreeEngine\.score gave cannot be copied or pickled.*Score the rows again"):
        duplicate(scored)
