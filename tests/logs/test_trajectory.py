import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory

NAN = float("nan")


def test_a_trajectory_holds_int32_ids_and_float64_facts():
    row = Trajectory([5, 6, 7], old_logprobs=[0, -1, -2], advantages=2, loss_weights=0.5)
    assert row.ids.dtype == np.int32 and row.ids.flags.c_contiguous
    assert row.old_logprobs is not None and row.old_logprobs.dtype == np.float64
    assert row.advantages is not None and row.advantages.tolist() == [2, 2, 2]
    assert row.loss_weights is not None and row.loss_weights.tolist() == [0.5, 0.5, 0.5]
    assert len(row) == 3


def test_weights_are_ones_where_none_are_given_and_entry_zero_is_never_trained():
    assert Trajectory([1, 2, 3]).weights.tolist() == [0, 1, 1]
    row = Trajectory([1, 2, 3], loss_weights=[7, 8, 9])
    assert row.weights.tolist() == [0, 8, 9]
    assert row.loss_weights is not None and row.loss_weights.tolist() == [7, 8, 9]


@pytest.mark.parametrize("ids", [[], [4]])
def test_rows_of_no_token_and_of_one_token_are_rows(ids):
    row = Trajectory(ids, advantages=1.0)
    assert len(row) == len(ids) and row.weights.sum() == 0


def test_changing_the_callers_buffers_afterwards_does_not_change_the_row():
    ids, logprobs = np.array([1, 2], np.int32), np.array([0.0, -1.0])
    row = Trajectory(ids, old_logprobs=logprobs)
    ids[0], logprobs[1] = 9, 9
    assert row.ids.tolist() == [1, 2]
    assert row.old_logprobs is not None and row.old_logprobs.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ids": [1, -2]}, r"ids\[1\] = -2 is negative"),
        ({"ids": [1, 2**31]}, r"ids\[1\] = 2147483648 is above 2147483647"),
        ({"ids": [1.0, 2.0]}, "1.0, a float; token ids are whole numbers"),
        ({"ids": [True, False]}, "True, a bool; token ids are whole numbers"),
        ({"ids": [[1, 2], [3, 4]]}, r"shape \(2, 2\)"),
        ({"ids": [[1], [3, 4]]}, "no flat list"),
        ({"ids": [1, 2], "values": [1]}, "values has 1 entries, but there are 2 token ids.*entry 0"),
        ({"ids": [1, 2], "old_logprobs": [1, 2, 3]}, "old_logprobs has 3 entries, but there are 2 token ids"),
        ({"ids": [1, 2], "returns": 3.0}, r"returns is 3.0, but there are 2"),
        ({"ids": [1, 2], "loss_weights": [0, NAN]}, r"loss_weights\[1\] is nan; give a finite"),
        ({"ids": [], "loss_weights": NAN}, r"loss_weights\[0\] is nan; give a finite"),
        ({"ids": [1, 2], "advantages": float("inf")}, r"advantages\[0\] is inf; give a finite"),
        ({"ids": [1], "ref_logprobs": ["x"]}, "ref_logprobs is no flat list of numbers"),
        ({"ids": [1], "ref_logprobs": torch.zeros(1, requires_grad=True)}, "ref_logprobs is no flat list of numbers"),
        ({"ids": [1], "reward": NAN}, "reward is nan"),
        ({"ids": [1], "reward": "0.5"}, "reward is '0.5'"),
        ({"ids": [1], "reward": [1]}, r"reward is \[1\]"),
        ({"ids": [1], "group": [1]}, "group is a list"),
        ({"ids": [1], "chosen": 1}, "chosen is 1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_the_row_is_named(facts, message):
    with pytest.raises(DataError, match="trajectory 'r7': .*" + message):
        Trajectory(**facts, id="r7")


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs"])
def test_probabilities_of_trained_tokens_are_at_most_1(name):
    """Beyond rounding: bfloat16 has steps of 2^-8, so that a probability that was normalised in it may be 1.008."""
    Trajectory([1, 2, 3], **{name: [0.0, math.log(1 + 2**-7), math.log(1.008)]})
    named = rf"trajectory 'r7': {name}\[2\] of token 8 is 0.5, above 0; .* at most 0 \(to 0.01, for rounding\)"
    for weights in (None, 0.5, [0, 0, -1.0]):
        with pytest.raises(DataError, match=named):
            Trajectory([5, 7, 8], loss_weights=weights, id="r7", **{name: [9, -1, 0.5]})
    fillers = Trajectory([5, 7, 8], loss_weights=[0, 1, 0], **{name: [9, -1, 0.5]})
    assert getattr(fillers, name).tolist() == [9, -1, 0.5]
    with pytest.raises(DataError, match=rf"{name}\[2\]"):
        fillers.replace(loss_weights=1.0)


def test_replace_changes_the_named_fields_and_checks_again():
    row = Trajectory([1, 2], reward=1.0, group="g", id="a", key="k", episode="e")
    other = row.replace(advantages=3.0)
    assert other.advantages is not None and other.advantages.tolist() == [3, 3]
    assert (other.reward, other.group, other.id, other.key, other.episode) == (1.0, "g", "a", "k", "e")
    assert row.advantages is None
    with pytest.raises(DataError, match=re.escape("advantages has 3 entries, but there are 2 token ids")):
        row.replace(advantages=[1, 2, 3])


def test_a_trajectory_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        Trajectory([1]).reward = 1.0  # type: ignore[misc]


@given(st.lists(st.integers(0, 2**31 - 1)), st.floats(allow_nan=False, allow_infinity=False))
def test_a_trajectory_survives_pickling_for_worker_processes(ids, reward):
    row = pickle.loads(pickle.dumps(Trajectory(ids, reward=reward, advantages=0.5)))
    assert row.ids.tolist() == ids and row.reward == reward and len(row.advantages) == len(ids)
