"""Shapes in signatures are checked under pytest and nowhere else."""

import subprocess
import sys

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from support import shapes
from treetrain.core.attention.schedule import Forest
from treetrain.kernels.tile_lists import keys_of


@pytest.fixture(autouse=True)
def checked() -> None:
    """`make test` checks the shapes in a sample of all tests; here always."""
    shapes.set_checked(True)


def test_a_wrong_shape_or_dtype_is_refused_under_pytest() -> None:
    ends = np.array([3, 2, 3])
    assert len(keys_of(ends, ends - 1).ends) == 3
    for depth in (ends[:2], ends[None], ends.astype(np.int32)):
        with pytest.raises(TypeCheckError, match="keys_of"):
            keys_of(ends, depth)


def test_the_fields_of_a_data_class_must_agree_under_pytest() -> None:
    ends, none = np.array([1, 2]), np.array([-1, -1])
    Forest(ends=ends, depth=ends - ends, segment_start=np.arange(3), segment_parent=none)
    with pytest.raises(TypeCheckError, match="Forest"):
        Forest(ends=ends, depth=ends - ends, segment_start=np.arange(2), segment_parent=none)


def test_nothing_is_checked_outside_pytest() -> None:
    code = """
import sys
import numpy as np
from treetrain.core.attention.schedule import Forest
Forest(ends=np.zeros(1), depth=np.zeros((2, 2)), segment_start=None, segment_parent=0)
assert "beartype" not in sys.modules and not hasattr(Forest.__init__, "__wrapped__")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
