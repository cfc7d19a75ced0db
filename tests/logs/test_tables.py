"""Parquet and Arrow files give the rows of JSONL, or one clear error."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.load import load


def assert_same_rows(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(Trajectory):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and np.array_equal(a, b), field.name
            else:
                assert type(a) is type(b) and a == b, field.name


FULL = {
    "input_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [None, None, -1.5, -0.25],
    "ref_logprobs": [0, 0, -1, -2],
    "advantages": [0, 0, 1.5, -1.5],
    "experts": [[[0, 1]], [[2, 1]], [[-1, -1]]],
    "reward": 1.0,
    "group_id": "a",
    "episode": "e",
    "pair": 3,
    "chosen": True,
    "key": "adapter",
    "id": "named",
}
OTHERS = [
    {"input_ids": [5, 6, 9], "loss_weights": [0, 0.5, 2], "advantage": 0.0, "group_id": 7, "reward": 0},
    {"input_ids": [], "pair": 3, "chosen": False},
    {"input_ids": [5], "group_id": 7.0, "note": "unused"},
    {"input_ids": [5, 6, 7], "labels": [-100, -100, -100], "group_id": True},
    {"input_ids": [9, 9, 9, 9, 9], "attention_mask": [0, 1, 1, 1, 0], "episode": "e"},
]


def test_token_rows_of_parquet_and_arrow_files_are_those_of_jsonl(write_rows, tmp_path):
    expected = list(load(write_rows(FULL, *OTHERS[:2])).trajectories)
    table = pa.Table.from_pylist([FULL | {"group_id": "a"}, OTHERS[0] | {"group_id": None}, OTHERS[1]])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        found = load(tmp_path / name).trajectories
        assert [row.ids.tolist() for row in found] == [row.ids.tolist() for row in expected]
        assert_same_rows([found[0]], expected[:1])
        assert found[1].id == f"{tmp_path / name} row 2"
    pyarrow.parquet.write_table(pa.table({"input_ids": [[1], [2, -3]]}), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet row 2: .*ids\[1\] = -3 is negative"):
        load(tmp_path / "bad.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"torn\.parquet: cannot be read as parquet"):
        load(tmp_path / "torn.parquet")
