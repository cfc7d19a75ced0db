"""Loss and metrics of a step are read from the device when somebody asks for them, as they were when it ended."""

import copy
import dataclasses
import pickle

import pytest
import torch

import treetrain as tt
from support.models import make_model
from treetrain.core.losses.facts import mean_metrics, read_metrics
from treetrain.core.losses.protocol import StepResult, summed

COUNTS = {
    "flat_tokens": 9,
    "unique_tokens": 5,
    "computed_tokens": 4,
    "recomputed_tokens": 0,
    "parts": 1,
    "attention": {"varlen": 2},
}


def result(loss, **sums) -> StepResult:
    return StepResult(loss_tensor=loss, metric_sums=sums, **COUNTS)


def test_loss_and_metrics_are_plain_numbers_that_are_read_once():
    found = result(torch.tensor(0.5), nll=(torch.tensor([3.0]), 2), none=(torch.tensor(3.0), 0))
    assert (found.loss, found.metrics) == (0.5, {"nll": 1.5}), "a metric without weight is left out"
    assert type(found.loss) is float and found.metrics is found.metrics
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.parts = 3  # type: ignore[misc]


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, StepResult.on_host])
def test_a_copy_of_a_result_has_the_same_numbers(again):
    found = again(result(torch.tensor(0.5), nll=(torch.tensor(3.0), 2.0)))
    assert (found.loss, found.metrics, found.flat_tokens) == (0.5, {"nll": 1.5}, 9)


def test_calls_of_a_step_are_added_up_without_reading_any():
    on_meta = torch.zeros((), device="meta")
    whole = summed([result(on_meta, nll=(on_meta, 1.0))] * 3, over=2)  # reading would raise
    assert whole.flat_tokens == 27 and whole.attention == {"varlen": 6} and whole.metric_sums["nll"][1] == 3.0
    whole = summed([result(torch.tensor(x), nll=(torch.tensor(3 * x), 2.0)) for x in (0.5, 1.0)], over=2)
    assert whole.loss == 0.75 and whole.metrics == {"nll": 4.5 / 4}


def test_numbers_of_every_kind_are_read_as_floats():
    kinds = (
        0.1,
        2,
        True,
        torch.tensor(0.1).double(),
        torch.tensor(7),
        torch.tensor(0.5).bfloat16(),
        torch.tensor([True]),
    )
    assert read_metrics({str(n): (x, 1) for n, x in enumerate(kinds)}) == {
        str(n): (float(x), 1.0) for n, x in enumerate(kinds)
    }
    assert mean_metrics({}) == {}


def test_a_loss_that_writes_into_its_metrics_later_changes_no_result():
    calls = torch.zeros(())

    def loss(logprobs, entropies, row):
        calls.add_(1)
        return -logprobs.sum(), {"calls": (calls, 1.0)}

    engine = tt.TreeEngine(make_model("qwen3"))
    first = engine.forward_backward([[1, 2, 3]], loss, 1.0)
    second = engine.forward_backward([[1, 2, 3]], loss, 1.0)
    assert (first.metrics["calls"], second.metrics["calls"]) == (1.0, 2.0)
