"""Recorded experts in files of token rows."""

import pytest

from treetrain.data.records import Notes
from treetrain.data.token_rows import trajectory_from_token_row
from treetrain.errors import DataError

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
