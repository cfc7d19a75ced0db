"""Rows that branch, the plans that they are scored under, and what is kept of their graphs."""

import pytest

TRUNK = list(range(9))
ROWS = [
    [*TRUNK, 20, 21, 22],
    [*TRUNK, 20, 21, 23, 24],
    [*TRUNK, 20, 21, 23, 24],
    [*TRUNK[:4], 25, 26],
    TRUNK[:4],
    [30, 31, 32],
    [30, 33],
    [34],
    [],
]
SHAPES = [("1 part", "none"), ("N/4", "mixed"), ("one segment per part", "none"), ("chunks of 2", "all")]
every_plan = pytest.mark.parametrize(("shape", "keep"), SHAPES)
WAYS = ["kept", "partly", "recomputed"]
every_way = pytest.mark.parametrize("graphs", WAYS)
