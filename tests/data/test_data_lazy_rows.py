"""Rows that stay in their files are those that are loaded, as strictly checked, and read by processes together."""

import gzip
import json
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.same_rows import assert_same_rows
from support.thread_ranks import on_ranks
from treetrain.data import lazy_rows as module
from treetrain.data import load
from treetrain.data.byte_ranges import FileState
from treetrain.data.columns import GIVEN, ListColumns, columns_of
from treetrain.data.digest import rows_digest
from treetrain.data.exchange import Alone, Exchange
from treetrain.data.index_file import index_key, load_index, store_index
from treetrain.data.lazy_rows import LazyRows, RowStore, take
from treetrain.data.row_index import RowIndex, build_index
from treetrain.data.row_maker import RowMaker
from treetrain.errors import DataError, RanksDisagree

NAMES = ("tokens", "weight", "trained", "negative", "signal", "reward", "chosen", "group", "pair", "episode")


def indexed(paths: list[Path], ranks: Exchange, maker: RowMaker | None = None) -> RowIndex:
    folder = paths[0].parent / "index"
    return build_index([str(path) for path in paths], maker or RowMaker(format="tokens"), folder=folder, exchange=ranks)


def lazy(paths: list[Path], ranks: Exchange | None = None, maker: RowMaker | None = None) -> LazyRows:
    ranks, maker = ranks or Alone(), maker or RowMaker(format="tokens")
    return LazyRows.all_of(RowStore(indexed(paths, ranks, maker), maker, ranks))


def assert_same_columns(found: Any, expected: Any) -> None:
    for name in NAMES:
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=name == "reward"), name
    assert all(np.array_equal(found.given[name], expected.given[name]) for name in GIVEN)


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


@pytest.fixture
def two_files(write_rows) -> list[Path]:
    """Rows with every fact, blank lines, and no line feed at the end."""
    first, second = write_rows(FULL, *OTHERS, name="a.jsonl"), write_rows(*OTHERS[::-1], FULL, name="b.jsonl")
    first.write_text(first.read_text().replace("\n", "\n\n", 2).rstrip("\n"))
    return [first, second]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_columns_notes_and_digests_are_those_of_rows_in_memory_for_any_number_of_ranks(two_files, size) -> None:
    loaded = load(two_files)
    expected = loaded.trajectories

    def check(ranks: Exchange) -> None:
        rows = lazy(two_files, ranks)
        assert rows._store.index.notes == loaded.notes
        assert len(rows) == len(expected) == 12
        assert_same_rows(rows.take(range(12)), expected)
        assert_same_rows(rows.take([7, 2, 7, 0]), [expected[number] for number in (7, 2, 7, 0)])
        assert_same_rows([rows[number] for number in (-1, 3)], [expected[number] for number in (-1, 3)])
        assert_same_columns(rows.columns, ListColumns(expected))
        assert rows_digest(rows) == rows_digest(expected)

    found = on_ranks(size, check)
    assert found == [None] * size, found
    assert list((two_files[0].parent / "index").iterdir()) == [], "sorted tokens are deleted"


def test_some_rows_of_some_rows_and_advantages_of_their_own(two_files) -> None:
    expected = load(two_files).trajectories
    rows, numbers = lazy(two_files), np.array([1, 4, 6, 9])
    picked = [expected[number] for number in numbers.tolist()]
    assert_same_rows(list(rows.subset(numbers)), picked)
    assert_same_rows(list(rows[1:8:3]), expected[1:8:3])
    values = np.array([0.0, -1.0, 2.0, 0.5])
    changed = [row.replace(advantages=value) for row, value in zip(picked, values.tolist())]
    advantaged = rows.subset(numbers).with_advantages(values)
    assert_same_rows(advantaged.take([3, 0, 1, 2]), [changed[number] for number in (3, 0, 1, 2)])
    assert np.array_equal(advantaged.columns.signal, ListColumns(changed).signal)
    assert advantaged.columns.given["advantages"].all()
    assert rows_digest(advantaged) == rows_digest(changed) != rows_digest(picked)
    assert_same_rows(list(advantaged.subset(np.array([1, 3]))), [changed[1], changed[3]])


def test_conversations_in_both_views_are_those_that_are_loaded(write_rows, bytes_tokenizer) -> None:
    def talk(number: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"hello {number}"}, {"role": "assistant", "content": "the answer"}]
        return {"messages": turns * (1 + number % 3), "task_id": number % 2, "reward": number / 2}

    path = write_rows(*map(talk, range(6)))
    for view in ("transcript", "calls"):
        expected = load(path, tokenizer=bytes_tokenizer, view=view).trajectories
        makers = [RowMaker(tokenizer=bytes_tokenizer, format="chat", view=view) for _ in range(2)]
        rows = on_ranks(2, lambda ranks: lazy([path], ranks, makers[ranks.rank]).take(range(len(expected))))  # noqa: B023
        for found in rows:
            assert_same_rows(found, expected)


labels = st.sampled_from([None, "a", "b", 0, 1, 1.0, True, 2.5])
drawn = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=6), labels, labels, st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(drawn=drawn, size=st.integers(1, 4))
def test_labels_become_the_same_numbers_as_in_memory(drawn, size, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("labels") / "rows.jsonl"
    rows = [
        {"input_ids": ids, "group": group, "episode": episode, "pair": pair or None}
        for ids, group, episode, pair in drawn
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = ListColumns(load(path).trajectories)
    for found in on_ranks(size, lambda ranks: indexed([path], ranks).columns):
        assert_same_columns(found, expected)


def test_each_line_is_read_by_one_process_alone(write_rows, monkeypatch) -> None:
    path = write_rows(*({"input_ids": [number] * (1 + number % 5)} for number in range(40)))
    read: dict[int, Counter] = {}
    original = module.line_at

    def line_at(name: str, offset: int) -> bytes:
        read.setdefault(threading.get_ident(), Counter())[offset] += 1
        return original(name, offset)

    monkeypatch.setattr(module, "line_at", line_at)

    def check(ranks: Exchange) -> None:
        rows = lazy([path], ranks)
        for numbers in ([3, 30, 8, 21, 5, 39, 11, 17], [30, 8, 2], [2, 3]):
            assert [row.ids[0] for row in rows.take(numbers)] == numbers

    assert on_ranks(3, check) == [None] * 3
    assert len(read) == 3 and all(2 <= counted.total() <= 4 for counted in read.values())
    together = sum(read.values(), Counter())
    assert together.total() == len(together) == 9, "no line is read twice"


@pytest.mark.parametrize("bad", ['{"input_ids": [1, -2]}', "{broken", '{"input_ids": [1, 99]}', '{"messages": []}'])
def test_a_bad_row_is_told_as_by_load_on_the_rank_that_has_it_and_ends_all(write_rows, bad) -> None:
    good = [{"input_ids": [number] * 8} for number in range(20)]
    path = write_rows(*good)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:15], "", bad, *lines[15:]]))
    with pytest.raises(DataError) as expected:
        load(path, format="tokens", vocab_size=50)
    assert "line 17" in str(expected.value)
    for size in (1, 2, 4):
        maker = partial(RowMaker, format="tokens", vocab_size=50)
        found = on_ranks(size, lambda ranks: indexed([path], ranks, maker()))  # noqa: B023
        own = [error for error in found if isinstance(error, DataError)]
        assert [str(error) for error in own] == [str(expected.value)]
        others = [error for error in found if isinstance(error, RanksDisagree)]
        assert len(others) == size - 1 and all("line 17" in str(error) for error in others)


def test_files_that_lines_cannot_be_found_in_are_refused(write_rows, tmp_path) -> None:
    path = write_rows(*OTHERS)
    zipped = tmp_path / "rows.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    for bad, message in ((zipped, "unpack it"), (empty, "the file is empty"), (tmp_path / "no", "no such file")):
        with pytest.raises(DataError, match=message):
            indexed([path, bad], Alone())


def test_a_file_that_changes_during_the_run_is_refused(write_rows) -> None:
    path = write_rows(*OTHERS)
    rows = lazy([path])
    rows.take([0])
    text, state = path.read_text(), path.stat()
    path.write_text(text + text)
    with pytest.raises(DataError, match="has changed while"):
        rows.take([1])
    path.write_text(text.replace("[5, 6, 9]", "[5, 6, 8]"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    rows._store._kept.clear()
    with pytest.raises(DataError, match="line 1: the row is not the one that was read before"):
        rows.take([0])


def test_ranks_that_ask_for_other_rows_are_told_so(write_rows) -> None:
    path = write_rows(*OTHERS)
    found = on_ranks(2, lambda ranks: lazy([path], ranks).take([ranks.rank]))
    assert all(isinstance(error, RanksDisagree) and "reading 1 rows" in str(error) for error in found)


def test_what_is_kept_of_the_last_rows_is_bounded_and_the_same_on_all_ranks(write_rows, monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_TOKENS", 50)
    path = write_rows(*({"input_ids": [number] * 10} for number in range(30)))

    def check(ranks: Exchange) -> list[int]:
        rows = lazy([path], ranks)
        for start in (0, 3, 12, 1, 20, 7):
            assert [row.ids[0] for row in rows.take(range(start, start + 8))] == list(range(start, start + 8))
            rows[(start + ranks.rank) % 30]  # what a rank reads for itself changes nothing for the others
        assert rows._store._kept_tokens == sum(map(len, rows._store._kept.values())) <= 50
        return list(rows._store._kept)

    one, other = on_ranks(2, check)
    assert one == other and len(one) == 5


def test_an_index_is_found_again_until_the_file_or_the_settings_change(two_files, tmp_path) -> None:
    maker, folder = RowMaker(format="tokens"), tmp_path / "kept"
    folder.mkdir()

    def key(maker: RowMaker = maker) -> dict[str, Any]:
        return index_key([FileState.of(str(path)) for path in two_files], maker)

    index = indexed(two_files, Alone(), maker)
    store_index(folder, key(), index)
    found = load_index(folder, key())
    assert found is not None and found.notes == index.notes and found.files == index.files
    expected = load(two_files).trajectories
    rows = LazyRows.all_of(RowStore(found, maker, Alone()))
    assert_same_rows(take(rows, range(12)), expected)
    assert_same_columns(columns_of(rows), ListColumns(expected))
    assert all(np.array_equal(one, other) for one, other in zip(found.order, index.order))
    assert load_index(folder, key(RowMaker(format="tokens", vocab_size=99))) is None
    [path] = folder.iterdir()
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], whole[:200] + bytes(50) + whole[250:]):
        path.write_bytes(torn)
        assert load_index(folder, key()) is None
    two_files[0].write_text(two_files[0].read_text() + "\n")
    assert load_index(folder, key()) is None
    store_index(folder, key(), index)
    assert len(list(folder.iterdir())) == 1, "an index of what is no more is not kept"
