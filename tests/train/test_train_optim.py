"""AdamW's groups and the learning rate over a run."""

import pytest
import torch
from torch import nn

from treetrain.train.config import TrainConfig
from treetrain.train.optim import make_optimizer, parameter_groups
from treetrain.train.schedules import lr_factor, make_schedule


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def test_matrices_are_decayed_norms_and_biases_are_not_and_frozen_weights_are_left_out() -> None:
    model = Small()
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert {id(p) for p in decayed["params"]} == {id(model.embedding.weight)}
    assert {id(p) for p in plain["params"]} == {id(model.norm.weight), id(model.norm.bias), id(model.head.bias)}


def test_a_tied_weight_is_updated_once() -> None:
    assert [len(group["params"]) for group in parameter_groups(Small(), 0.1)] == [1, 3]


def test_a_model_with_nothing_to_train_is_refused() -> None:
    config = TrainConfig(data=("a",), model="m", output="o")
    with pytest.raises(ValueError, match="nothing can be trained"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), config)


def test_the_warm_up_rises_linearly_and_ends_at_the_peak() -> None:
    factors = [lr_factor(step, total=10, warmup=4, schedule="cosine", min_ratio=0.1) for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_cosine_is_half_way_in_the_middle_and_ends_at_its_minimum() -> None:
    factors = [lr_factor(step, total=11, warmup=0, schedule="cosine", min_ratio=0.2) for step in range(11)]
    assert factors[0] == 1.0 and factors[5] == pytest.approx(0.6) and factors[10] == pytest.approx(0.2)
    assert factors == sorted(factors, reverse=True)


def test_the_constant_schedule_stays_at_the_peak_and_one_step_is_at_the_peak() -> None:
    assert lr_factor(99, total=100, warmup=3, schedule="constant", min_ratio=0.0) == 1.0
    assert lr_factor(0, total=1, warmup=0, schedule="cosine", min_ratio=0.0) == 1.0


def test_the_line_falls_evenly_from_the_warm_up_to_its_minimum() -> None:
    factors = [lr_factor(step, total=7, warmup=2, schedule="linear", min_ratio=0.2) for step in range(7)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_wsd_stays_at_the_peak_and_falls_over_the_last_steps() -> None:
    factors = [lr_factor(step, total=10, warmup=2, schedule="wsd", min_ratio=0.0, decay=4) for step in range(10)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    longer = [lr_factor(step, total=5, warmup=2, schedule="wsd", min_ratio=0.0, decay=9) for step in range(5)]
    assert longer == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_every_falling_schedule_ends_at_its_minimum_and_is_defined_for_the_shortest_runs(schedule) -> None:
    for total in range(1, 9):
        for warmup in range(total + 2):
            factors = [
                lr_factor(step, total=total, warmup=warmup, schedule=schedule, min_ratio=0.25, decay=2)
                for step in range(total)
            ]
            assert all(0 < factor <= 1 for factor in factors)
            assert total - warmup < 2 or factors[-1] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 20), ({"decay_fraction": 0.5}, 50), ({"decay_steps": 7}, 7), ({"decay_steps": 0}, 0)]
)
def test_the_decay_is_given_in_steps_or_as_a_share(given: dict, expected: int) -> None:
    assert TrainConfig(data=("a",), model="m", output="o", schedule="wsd", **given).decay(100) == expected


def test_the_schedule_drives_the_optimizer_of_every_group() -> None:
    config = TrainConfig(data=("a",), model="m", output="o", lr=1.0, warmup_steps=2, weight_decay=0.5)
    optimizer = make_optimizer(Small(), config)
    schedule = make_schedule(optimizer, config, 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert isinstance(optimizer, torch.optim.AdamW)
