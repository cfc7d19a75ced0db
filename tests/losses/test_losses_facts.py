"""Facts: which number belongs to which prediction."""

import numpy as np
import pytest
import torch

from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import PER_TOKEN_FACTS
from treetrain.layers.trajectory import Trajectory
from treetrain.losses import Facts

ROWS = [
    Trajectory([5, 6, 7], loss_weights=[9, 0, 2], advantages=[9, 1, 2], values=[9, 3, 4]),
    Trajectory([]),
    Trajectory([5], advantages=3.0),
    Trajectory([5, 6, 7], loss_weights=0.5, advantages=-1.0, id="b"),
]


def test_facts_are_concatenated_without_entry_0_and_zero_where_the_weight_is():
    facts = Facts(ROWS, dtype=torch.float64)
    assert len(facts) == 4
    assert facts.rows.tolist() == [0, 0, 3, 3]
    assert facts.weights.tolist() == [0, 2, 0.5, 0.5]
    assert facts.advantages.tolist() == [0, 2, -1, -1]
    assert facts.weights.dtype == facts.advantages.dtype == torch.float64
    assert facts.rows.dtype == torch.int64


def test_a_mask_of_used_predictions_shortens_all():
    facts = Facts(ROWS, used=np.array([False, True, False, True]))
    assert len(facts) == 2
    assert facts.rows.tolist() == [0, 3]
    assert facts.weights.tolist() == [2, 0.5]
    assert facts.advantages.tolist() == [2, -1]


def test_a_share_of_a_trajectory_is_of_all_its_weights_even_if_only_some_are_passed():
    assert Facts(ROWS).shares("trajectory").tolist() == [0, 1, 0.5, 0.5]
    part = Facts(ROWS, used=np.array([False, True, False, True]))
    assert part.shares("trajectory").tolist() == [1, 0.5]
    assert part.shares("token").tolist() == [2, 0.5]


def test_all_facts_are_there_by_their_names():
    names = [name for name in PER_TOKEN_FACTS if name != "loss_weights"]
    row = Trajectory([5, 6], **{name: [9, -number] for number, name in enumerate(names, start=1)})
    facts = Facts([row])
    assert [getattr(facts, name).tolist() for name in names] == [[-number] for number in range(1, 8)]


def test_sums_by_row_give_0_to_rows_without_predictions_and_pass_gradients():
    facts = Facts(ROWS)
    numbers = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = facts.sum_by_row(numbers)
    assert sums.tolist() == [3, 0, 0, 12]
    (gradient,) = torch.autograd.grad((sums * torch.tensor([2.0, 3.0, 5.0, 7.0])).sum(), numbers)
    assert gradient.tolist() == [2, 2, 7, 7]


def test_a_fact_that_one_trained_row_lacks_is_an_error_only_when_asked_for():
    facts = Facts(ROWS)
    assert facts.advantages.shape == (4,)
    with pytest.raises(DataError, match=r"trajectory 'b' has no values, .*give values="):
        _ = facts.values
    nameless = Facts([ROWS[3], ROWS[0].replace(advantages=None)])
    with pytest.raises(DataError, match=r"trajectory number 1 \(from 0\) has no advantages, .*give advantages="):
        _ = nameless.advantages


def test_a_row_that_trains_nothing_needs_no_facts():
    context = Trajectory([5, 6], loss_weights=0.0)
    assert Facts([context, ROWS[0]]).values.tolist() == [0, 0, 4]


def test_facts_of_no_trajectory_are_empty():
    facts = Facts([])
    assert (len(facts), facts.rows.tolist(), facts.advantages.tolist()) == (0, [], [])


def test_facts_keep_the_digits_of_float64():
    third = 1 / 3
    facts = Facts([Trajectory([5, 6], advantages=third, loss_weights=third)], dtype=torch.float64)
    assert facts.advantages.item() == facts.weights.item() == third
