import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.logs.formats.tokens import trajectory_from_token_row
from treetrain.logs.records import Notes


def nested(depth):
    """A list in a list, so many times."""
    found = []
    for _ in range(depth):
        found = [found]
    return found


def read(**row):
    return trajectory_from_token_row(row, Notes("f.jsonl line 3"))


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=8), st.integers(0, 3), st.booleans())
def test_padding_on_either_side_changes_nothing(tokens, padding, left):
    ids, trained = [t for t, _ in tokens], [b for _, b in tokens]
    labels = [t if b else -100 for t, b in tokens]
    logprobs = [-float(t) for t in ids]

    def pad(values, filler):
        return [filler] * padding + values if left else values + [filler] * padding

    row = read(
        input_ids=pad(ids, 7), labels=pad(labels, -100), logprobs=pad(logprobs, 0.0),
        attention_mask=pad([1] * len(ids), 0),
    )  # fmt: skip
    assert row.ids.tolist() == ids
    assert row.loss_weights.tolist() == [float(b) for b in trained]
    assert row.old_logprobs.tolist() == logprobs


def test_labels_masks_and_weights_multiply():
    row = read(input_ids=[1, 2, 3, 4], labels=[-100, 2, 3, 4], loss_mask=[1, 1, 0, 1], loss_weights=[2, 3, 4, 5])
    assert row.loss_weights.tolist() == [0, 3, 0, 5]


def test_every_documented_key_reaches_its_field():
    row = read(
        input_ids=[1, 2], loss_mask=[0, 1], logprobs=[0, -1], ref_logprobs=[0, -2], advantage=3,
        values=[0, 4], returns=[0, 5], reward=6, group_id="g", episode="e", id="i",
        pair="p", chosen=True, key="k", rollout_logprobs=[0, -7], teacher_logprobs=[0, -8],
    )  # fmt: skip
    assert row.old_logprobs.tolist() == [0, -1] and row.ref_logprobs.tolist() == [0, -2]
    assert row.advantages.tolist() == [3, 3] and row.values.tolist() == [0, 4] and row.returns.tolist() == [0, 5]
    assert (row.reward, row.group, row.episode, row.id) == (6.0, "g", "e", "i")
    assert (row.pair, row.chosen, row.key) == ("p", True, "k")
    assert row.rollout_logprobs.tolist() == [0, -7] and row.teacher_logprobs.tolist() == [0, -8]
    assert read(input_ids=[1, 2], sampling_logprobs=[0, -7]).rollout_logprobs.tolist() == [0, -7]
    other = read(input_ids=[1, 2], old_logprobs=[0, -1], advantages=[0, 2], group="h")
    assert other.old_logprobs.tolist() == [0, -1] and other.advantages.tolist() == [0, 2] and other.group == "h"
    assert other.id == "f.jsonl line 3"


def test_null_is_fine_where_nothing_is_trained():
    row = read(input_ids=[1, 2, 3], loss_mask=[0, 0, 1], logprobs=[None, None, -1.5])
    assert row.old_logprobs.tolist() == [0, 0, -1.5]
    assert read(input_ids=[1, 2], logprobs=[None, -1]).old_logprobs.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": [1]}, "no `input_ids` in the row; it has 'tokens'"),
        ({"input_ids": [1, "x"]}, "token ids are whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries, but there are 2 token ids"),
        ({"input_ids": [1, 2], "logprobs": [-1]}, "logprobs has 1 entries, but there are 2 token ids.*entry 0"),
        ({"input_ids": [1, 2], "advantages": [1, 2, 3]}, "advantages has 3 entries, but there are 2 token ids"),
        ({"input_ids": [1, 2], "labels": [1, 5]}, r"labels\[1\] = 5 but input_ids\[1\] = 2"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "shifted by one"),
        ({"input_ids": [1, 2], "labels": [-1, 2]}, r"labels\[0\] = -1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask\\[1\\] is 0.5, expected 0 or 1"),
        ({"input_ids": [1, 2], "loss_weights": [0, float("nan")]}, r"loss_weights\[1\] is nan"),
        ({"input_ids": [1, 2], "loss_weights": [0, -1]}, r"loss_weights\[1\] = -1, but weights are 0 or more"),
        ({"input_ids": [1, 2], "loss_weights": 2}, "loss_weights is 2, but there are 2 token ids"),
        ({"input_ids": [1, 2], "logprobs": [0, float("nan")]}, r"logprobs\[1\] is NaN"),
        ({"input_ids": [1, 2], "logprobs": [0, None]}, r"logprobs\[1\] is null but the token is trained"),
        ({"input_ids": [1, 2], "logprobs": [0, 1], "old_logprobs": [0, 1]}, "they mean the same: keep one"),
        ({"input_ids": [1, 2], "values": [[0], [1]]}, r"values has shape \(2, 1\)"),
        ({"input_ids": [1, 2], "reward": float("inf")}, "reward is inf"),
        (
            {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
            "attention_mask is 0 at 1, between",
        ),
        ({"input_ids": [1, 2], "attention_mask": [2, 1]}, "attention_mask\\[0\\] is 2, expected 0 or 1"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 entries, but there are 2 token ids"),
        ({"input_ids": [1, 2], "advantage": float("nan")}, r"advantages\[0\] is nan"),
        ({"input_ids": [1, 2], "attention_mask": [10**400, 1]}, "attention_mask is no flat list of numbers"),
        ({"input_ids": [1, 2], "reward": 10**400}, r"reward is 10+\.\.\.0+, expected one finite number"),
        ({"input_ids": [1, 2], "values": [0, "x" * 999]}, r"values is no flat list of numbers .{,170}$"),
        ({"input_ids": [1, 2], "advantage": 10**400}, "advantages is no flat list of numbers"),
        ({"input_ids": [1, 2], "loss_weights": {"a": nested(500)}}, "loss_weights is no flat list of numbers"),
    ],
)
def test_a_bad_row_is_refused_with_key_and_value(row, message):
    with pytest.raises(DataError, match=message):
        read(**row)


def test_unknown_keys_and_missing_labels_are_noted_not_swallowed():
    notes = Notes()
    for line in (1, 2):
        notes.place = f"f line {line}"
        trajectory_from_token_row({"input_ids": [1], "colour": "red"}, notes)
    assert notes.lines() == (
        "no labels, loss_mask or loss_weights: every token is trained (2 times, first: f line 1)",
        "keys that are not used: 1, such as 'colour'; first: f line 1",
    )


def test_a_mask_of_padding_only_gives_an_empty_row():
    assert len(read(input_ids=[0, 0], attention_mask=[0, 0], labels=[-100, -100])) == 0


def test_a_scalar_advantage_stands_for_the_tokens_left_after_padding():
    row = read(input_ids=[9, 1, 2], attention_mask=[0, 1, 1], advantage=-0.5)
    np.testing.assert_array_equal(row.advantages, [-0.5, -0.5])


EXPERTS = [[[0, 1]], [[2, 3]], [[1, 0]]]


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
def test_experts_are_read_and_padding_is_cut_off(name):
    row = {"input_ids": [5, 6, 7], "attention_mask": [0, 1, 1], name: EXPERTS}
    assert trajectory_from_token_row(row, Notes("row 1")).experts.tolist() == EXPERTS[1:]


def test_the_last_token_may_be_left_out_as_samplers_do():
    found = trajectory_from_token_row({"input_ids": [5, 6, 7, 8], "experts": EXPERTS}, Notes("row 1")).experts
    assert found.tolist() == [*EXPERTS, [[-1, -1]]]


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (EXPERTS[:1], r"experts have shape \(1, 1, 2\), expected \[3, layers, k\] for 3 input_ids"),
        ([[0, 1], [2, 3], [1, 0]], r"shape \(3, 2\)"),
        ([[[0, 1]], [[2]], [[1, 0]]], "no .L, layers, k. block"),
        ([*EXPERTS[:2], [[1, 1]]], r"experts\[2\]\[0\] = \[1, 1\]"),
    ],
)
def test_experts_of_another_shape_are_refused(experts, says):
    with pytest.raises(DataError, match=says):
        trajectory_from_token_row({"input_ids": [5, 6, 7], "experts": experts}, Notes("row 1"))


def test_rows_without_experts_have_none():
    assert trajectory_from_token_row({"input_ids": [5, 6]}, Notes("row 1")).experts is None
