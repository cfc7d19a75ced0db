"""Whether two trajectories are the same in every fact."""

import dataclasses

import numpy as np

from treetrain.data.trajectory import Trajectory


def assert_same_rows(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(Trajectory):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and np.array_equal(a, b), field.name
            else:
                assert type(a) is type(b) and a == b, field.name
