"""Loss and metrics of a step are brought to the host when they are first read, as they were when it ended."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from treetrain.engine import outcome as outcome_module
from treetrain.engine.outcome import Found, Outcome, on_host
from treetrain.engine.routing import METRIC
from treetrain.engine.step import StepResult, outcome_of, summed

COUNTS = {"flat_tokens": 9, "unique_tokens": 5, "computed_tokens": 4, "recomputed_tokens": 0, "parts": 1}


class Late:
    """Outcomes that note when they are made."""

    def __init__(self) -> None:
        self.made: list[float] = []

    def result(self, loss: float, **sums: tuple[float, float]) -> StepResult:
        def find() -> Found:
            self.made.append(loss)
            return Found(loss, {name: total / weight for name, (total, weight) in sums.items()}, dict(sums))

        outcome = Outcome(find)
        return StepResult(loss=outcome, metrics=outcome, metric_sums=outcome, **COUNTS)  # type: ignore[arg-type]


def test_numbers_are_found_once_and_when_one_of_them_is_read() -> None:
    late = Late()
    result = late.result(0.5, nll=(3.0, 2.0))
    assert result.parts == 1 and late.made == []
    assert result.metrics == {"nll": 1.5} and late.made == [0.5]
    assert (result.loss, result.metric_sums) == (0.5, {"nll": (3.0, 2.0)}) and late.made == [0.5]
    assert result.metrics is result.metrics


def test_a_result_is_what_it_was_immutable_shown_whole_and_replaceable() -> None:
    late = Late()
    plain = StepResult(loss=0.5, metrics={"nll": 1.5}, metric_sums={"nll": (3.0, 2.0)}, **COUNTS)
    result = late.result(0.5, nll=(3.0, 2.0))
    assert repr(result) == repr(plain) and "metric_sums" not in repr(result) and "loss=0.5" in repr(result)
    assert result == plain and dataclasses.asdict(result) == dataclasses.asdict(plain)
    for name in ("loss", "parts", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, name, 3)
    changed = dataclasses.replace(result, unique_tokens=7, loss=2.0)
    assert (changed.loss, changed.unique_tokens, changed.metrics) == (2.0, 7, {"nll": 1.5}) and result.loss == 0.5


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_a_copy_of_a_result_holds_plain_numbers(again) -> None:
    late = Late()
    found = again(late.result(0.5, nll=(3.0, 2.0)))
    assert type(found) is StepResult and late.made == [0.5]
    assert not any(isinstance(value, Outcome) for value in vars(found).values())
    assert (found.loss, found.metrics, found.flat_tokens) == (0.5, {"nll": 1.5}, 9)


def test_calls_of_a_step_are_added_up_without_waiting_for_any_and_to_the_same_bits() -> None:
    late, losses = Late(), [0.1, 0.2, 0.7]
    parts = [late.result(loss, nll=(3.0 * loss, 2.0), **{METRIC: (loss, 1.0)}) for loss in losses]
    whole = summed(parts, unique_tokens=11)
    again = summed([whole, late.result(0.3)], over=2)
    assert late.made == [] and whole.unique_tokens == 11 and whole.flat_tokens == 27 and again.unique_tokens == 16
    assert again.loss == (sum(losses) + 0.3) / 2 and late.made == [*losses, 0.3]
    assert whole.loss == sum(losses) and whole.metric_sums["nll"] == (sum(3.0 * loss for loss in losses), 6.0)
    assert whole.metrics[METRIC] == sum(losses), "the calls have shares of one loss of the routers"
    assert late.made == [*losses, 0.3]


def test_numbers_that_somebody_has_put_in_place_of_others_are_added_up() -> None:
    late = Late()
    changed = dataclasses.replace(late.result(0.5, nll=(3.0, 2.0)), loss=4.0)
    assert summed([changed, changed]).loss == 8.0 and outcome_of(changed).found.metrics == {"nll": 1.5}


def scalars() -> list:
    return [
        torch.tensor(0.1),
        2,
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([7], dtype=torch.int64),
        torch.tensor(0.1, dtype=torch.bfloat16),
        0.25,
        torch.tensor(0.3, requires_grad=True),
        torch.tensor(True),
    ]


def test_numbers_on_a_device_arrive_as_they_were_in_one_copy(monkeypatch) -> None:
    expected = [float(x.detach()) if isinstance(x, torch.Tensor) else float(x) for x in scalars()]
    assert on_host(scalars())() == expected
    # The way from a GPU, with what CUDA would do done by the CPU.
    events, copies, empty = [], [], torch.empty

    class Event:
        def record(self, stream) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("waited")

    class Cuda(torch.Tensor):
        device = torch.device("cuda")

    def pinned(*size, pin_memory=False, **options):
        copies.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, current_stream=lambda device: None))
    monkeypatch.setattr(outcome_module.torch, "empty", pinned)
    given = [x.detach().clone().as_subclass(Cuda) if isinstance(x, torch.Tensor) else x for x in scalars()]
    numbers = on_host(given)
    assert events == ["recorded"] and copies == [True]
    for x in given:
        if isinstance(x, torch.Tensor):
            x.zero_()
    assert numbers() == expected and events == ["recorded", "waited"]


def test_what_is_no_number_is_refused_when_the_step_ends_and_not_when_it_is_read() -> None:
    for wrong in (torch.zeros(2), "much", torch.zeros(0)):
        with pytest.raises((RuntimeError, ValueError)):
            Outcome.of(wrong, {})
    with pytest.raises(RuntimeError):
        Outcome.of(torch.zeros(2, device="meta"), {})


def test_a_metric_without_weight_is_left_out() -> None:
    found = Outcome.of(1.0, {"a": (torch.tensor(3.0), 0), "b": (1, torch.tensor(2.0))}).found
    assert found.metrics == {"b": 0.5} and found.metric_sums == {"a": (3.0, 0.0), "b": (1.0, 2.0)}
