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


def test_one_expert_per_token_is_refused_since_zero_may_be_an_expert():
    with pytest.raises(DataError, match=r"experts of x has one expert per token, .*from expert 0; leave them out"):
        without_fill(np.zeros((3, 2, 1), int), "experts of x", "leave them out")
