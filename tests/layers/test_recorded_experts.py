"""Records of experts as frameworks hand them on: what was not recorded is the router's to choose, never expert 0."""

import numpy as np
import pytest

from treetrain.core.errors import DataError
from treetrain.layers.experts.recorded import without_fill

RECORDED = [[[2, 0], [1, 3]], [[0, 0], [3, 1]], [[-1, -1], [0, 1]], [[255, 255], [0, 0]], [[5, -1], [0, 0]]]
"""Five tokens in two layers: whole; none in one layer; -1; -1 in 8 bits, and a tail; half a record, and a tail."""
EXPECTED = [[[2, 0], [1, 3]], [[-1, -1], [3, 1]], [[-1, -1], [0, 1]], [[-1, -1], [-1, -1]], [[-1, -1], [-1, -1]]]


def test_fill_of_any_kind_is_no_record():
    for dtype in (np.int64, np.int32, np.int16):
        found = without_fill(np.array(RECORDED, dtype), "experts", "leave them out")
        assert found.tolist() == EXPECTED and found.dtype == np.int64
    assert without_fill(np.array(RECORDED[:2], np.uint8), "experts", "leave them out").tolist() == EXPECTED[:2]
    assert without_fill(np.zeros((0, 2, 2), np.uint8), "experts", "leave them out").shape == (0, 2, 2)


def test_one_expert_per_token_is_refused_only_where_it_may_be_fill():
    whole = [[[3], [1]], [[2], [-1]], [[-1], [-1]]]
    assert without_fill(np.array(whole), "experts", "leave them out").tolist() == whole
    assert without_fill(np.array([[[255]]]), "experts", "leave them out").tolist() == [[[255]]]
    for record, said in (([[[3]], [[0]]], "token 1 has 0"), ([[[3]], [[255]]], "token 1 has 255")):
        with pytest.raises(DataError, match=f"experts of x: {said} in layer 0: with one expert per token, that may be"):
            without_fill(np.array(record, np.uint8), "experts of x", "leave them out")


def test_what_is_no_number_of_an_expert_is_refused_with_its_place():
    with pytest.raises(DataError, match="experts of x is of type float64, expected whole numbers; leave them out"):
        without_fill(np.array([[[0.0, 1.5]]]), "experts of x", "leave them out")
    with pytest.raises(DataError, match="experts of x: token 1 has -2 in layer 1: experts are numbered from 0"):
        without_fill(np.array([[[0, 1], [1, 2]], [[0, 1], [1, -2]]]), "experts of x", "leave them out")
