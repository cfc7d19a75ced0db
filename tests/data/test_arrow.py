"""Memory-mapped rows are those that are loaded, as strictly checked, converted once."""

import dataclasses
import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.data import arrow, load
from treetrain.data.advantages import advantages_of_groups
from treetrain.data.arrow import MappedTrajectories, write_trajectories
from treetrain.data.columns import GIVEN, columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError


def assert_same_rows(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(Trajectory):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and np.array_equal(a, b), field.name
            else:
                assert type(a) is type(b) and a == b, field.name


NAMES = ("tokens", "trained", "reward", "group", "pair", "episode", "key")
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


def assert_same_columns(found: Any, expected: Any) -> None:
    for name in NAMES:
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=name == "reward"), name
    assert all(np.array_equal(found.given[name], expected.given[name]) for name in GIVEN)


@pytest.fixture
def two_files(write_rows) -> list[Path]:
    """Rows with every fact, one of the files gzipped."""
    first, second = write_rows(FULL, *OTHERS, name="a.jsonl"), write_rows(*OTHERS[::-1], FULL, name="b.jsonl")
    zipped = second.with_suffix(".jsonl.gz")
    zipped.write_bytes(gzip.compress(second.read_bytes()))
    return [first, zipped]


@pytest.mark.parametrize("batch_tokens", [1, 9, 1 << 18])
def test_rows_columns_notes_and_format_are_those_of_rows_in_memory(two_files, tmp_path, monkeypatch, batch_tokens):
    monkeypatch.setattr(arrow, "BATCH_TOKENS", batch_tokens)
    expected, found = load(two_files), load(two_files, cache=tmp_path / "new")
    rows = found.trajectories
    assert isinstance(rows, MappedTrajectories) and len(rows) == 12
    assert (found.notes, found.format) == (expected.notes, expected.format)
    assert_same_rows(list(rows), list(expected.trajectories))
    assert_same_rows(rows[8:1:-3], list(expected.trajectories[8:1:-3]))
    assert_same_rows([rows[-12]], [expected.trajectories[0]])
    with pytest.raises(IndexError, match="row 12 of 12"):
        rows[12]
    assert columns_of(rows) is rows.columns
    assert_same_columns(rows.columns, columns_of(expected.trajectories))
    assert_same_rows(list(pickle.loads(pickle.dumps(rows))), list(expected.trajectories))
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".arrow"], "nothing else is left"


def test_conversations_in_both_views_are_those_that_are_loaded(write_rows, bytes_tokenizer, tmp_path):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer"}]
    talks = [{"messages": turns * (1 + n % 3), "task_id": n % 2, "reward": n / 2, "trial": n} for n in range(6)]
    path = write_rows(*talks)
    for view in ("transcript", "calls"):
        given = {"tokenizer": bytes_tokenizer, "view": view}
        expected = list(load(path, **given).trajectories)
        rows = load(path, **given, cache=tmp_path / "cache").trajectories
        assert_same_rows(list(rows), expected)
        assert np.array_equal(advantages_of_groups(rows), advantages_of_groups(expected))


labels = st.sampled_from([None, "a", "b", "1", 0, 1, 1.0, True, 2.5])
drawn_rows = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), labels, labels), max_size=12)


@settings(max_examples=30, deadline=None)
@given(drawn=drawn_rows)
def test_any_rows_come_back_as_they_were(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("rows") / "rows.arrow"
    rows = [Trajectory(ids, group=group, pair=pair, advantages=len(ids)) for ids, group, pair in drawn]
    write_trajectories(path, rows, dict)
    mapped = MappedTrajectories(path)
    assert_same_rows(list(mapped), rows)
    assert_same_columns(mapped.columns, columns_of(rows))


def test_a_file_is_converted_once_and_again_when_it_or_the_reading_has_changed(write_rows, tmp_path, monkeypatch):
    path, cache = write_rows(FULL, *OTHERS), tmp_path / "cache"
    conversions: list[int] = []
    write = arrow.write_trajectories
    monkeypatch.setattr(arrow, "write_trajectories", lambda *given: conversions.append(1) or write(*given))

    def rows_now(**settings: Any) -> int:
        return len(load(path, cache=cache, **settings).trajectories)

    assert [rows_now(), rows_now(), len(conversions)] == [6, 6, 1]
    assert [rows_now(limit=2), rows_now(limit=2), len(conversions)] == [2, 2, 2]
    os.utime(path, ns=(1, 1))
    assert [rows_now(), len(conversions)] == [6, 2], "the content is the same"
    path.write_text(path.read_text().replace("[5, 6, 7, 8]", "[5, 6, 7, 9]"))
    assert [rows_now(), len(conversions)] == [6, 3]
    assert rows_now(vocab_size=10) == 6 and len(conversions) == 4
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    assert [rows_now(), len(conversions)] == [6, 5], "a file that is not whole is written again"


def test_a_conversion_that_fails_leaves_no_file_and_names_the_bad_line(write_rows, tmp_path):
    path, cache = write_rows(FULL, {"input_ids": [1, -2]}), tmp_path / "cache"
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: .*ids\[1\] = -2 is negative"):
        load(path, cache=cache)
    assert list(cache.iterdir()) == []


def test_what_cannot_be_written_or_read_is_a_data_error_that_names_the_file(write_rows, tmp_path):
    path = write_rows(FULL)
    with pytest.raises(DataError, match=r"rows\.jsonl.*\.arrow: the rows cannot be written there"):
        load(path, cache=path)
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        load(tmp_path / "nowhere.jsonl", cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"rows\.jsonl is no Arrow file of trajectories"):
        MappedTrajectories(path)


def test_token_rows_of_parquet_and_arrow_files_are_those_of_jsonl(write_rows, tmp_path):
    expected = list(load(write_rows(FULL, *OTHERS[:2])).trajectories)
    table = pa.Table.from_pylist([FULL | {"group_id": "a"}, OTHERS[0] | {"group_id": None}, OTHERS[1]])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        found = load(tmp_path / name, cache=tmp_path / "cache").trajectories
        assert [row.ids.tolist() for row in found] == [row.ids.tolist() for row in expected]
        assert_same_rows([found[0]], expected[:1])
        assert found[1].id == f"{tmp_path / name} row 2"
    pyarrow.parquet.write_table(pa.table({"input_ids": [[1], [2, -3]]}), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet row 2: .*ids\[1\] = -3 is negative"):
        load(tmp_path / "bad.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"torn\.parquet: cannot be read as parquet"):
        load(tmp_path / "torn.parquet")


SMALL_MEMORY = """
import resource, sys
import numpy as np
from treetrain.data.arrow import MappedTrajectories, write_trajectories
from treetrain.data.columns import prefix_order
from treetrain.data.trajectory import Trajectory

def rows():
    for number in range(10_000):
        ids = np.arange(1_000) + number // 2
        yield Trajectory(ids, loss_weights=np.ones(1_000), old_logprobs=np.zeros(1_000), id=f"row {number}")

held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + (100 << 20),) * 2)
write_trajectories(sys.argv[1], rows(), dict)
mapped = MappedTrajectories(sys.argv[1])
assert mapped.path.stat().st_size > 2 * (100 << 20) - (10 << 20)
assert mapped.columns.tokens.sum() == 10_000_000
assert (prefix_order(mapped).shared == 1_000).sum() == 5_000
assert all(row.id == f"row {number}" for number, row in enumerate(mapped))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory is allocated")
def test_files_are_written_planned_and_read_in_less_memory_than_they_have_bytes(tmp_path):
    done = subprocess.run([sys.executable, "-c", SMALL_MEMORY, str(tmp_path / "rows.arrow")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
