import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.logs.files import read_records


def read(path):
    """Line numbers and records; errors are raised."""
    found = []
    for place, record in read_records(path):
        if isinstance(record, DataError):
            raise DataError(f"{place}: {record}")
        found.append((int(place.rpartition(" line ")[2].split()[0]), record))
    return found


@pytest.mark.parametrize(
    "text", ['{"a": 1}\n{"b": {"r": 1, "s": 2, "r": 3}}\n{"a": 2}', '[{"a": 1}, {"r": 1, "r": 3}, {"a": 2}]']
)
def test_a_key_that_an_object_has_twice_is_refused_and_the_rest_is_read(tmp_path, text):
    first, second, third = read_records(write(tmp_path / "a.json", text))
    assert (first[1], third[1]) == ({"a": 1}, {"a": 2})
    assert "key 'r' twice, with 1 and 3" in str(second[1]) and ("line 2" in second[0] or "element 2" in second[0])


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_line_numbers_count_blank_lines_and_blank_lines_are_skipped(tmp_path):
    file = write(tmp_path / "a.jsonl", '\n{"a": 1}\n  \n\n{"a": 2}')
    assert read(file) == [(2, {"a": 1}), (5, {"a": 2})]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "zipped_but_not_named_so.jsonl"])
def test_gzip_is_recognised_by_name_and_by_content(tmp_path, name):
    file = write(tmp_path / name, gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert read(file) == [(1, {"a": 1}), (2, {"a": 2})]


def test_a_byte_order_mark_is_no_broken_json(tmp_path):
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}')) == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"a": 1}\n{"a": \n', "line 2: broken JSON"),
        ('{"a": 1}\n[1, 2]\n', "line 2: a JSON array, expected an object"),
        ("3\n", "line 1: a JSON number"),
        ("null\n", "line 1: a JSON null"),
        ("", "there are no records in it"),
        ("\n \n", "there are no records in it"),
        (b'{"a": "\xff"}\n', "line 1: byte 7 is not UTF-8"),
        ("[" * 200_000, "line 1: JSON is nested too deeply"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, data, message):
    file = write(tmp_path / "bad.jsonl", data)
    with pytest.raises(DataError, match=f"bad.jsonl.*{message}"):
        read(file)


@pytest.mark.parametrize("keep", [5, 30, -6])
def test_a_gzip_stream_cut_anywhere_is_refused(tmp_path, keep):
    whole = gzip.compress(b"".join(json.dumps({"a": i}).encode() + b"\n" for i in range(100)))
    file = write(tmp_path / "cut.jsonl.gz", whole[:keep])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: breaks off after line"):
        read(file)


def test_plain_text_named_gz_is_refused(tmp_path):
    with pytest.raises(DataError, match="breaks off after line 0"):
        read(write(tmp_path / "a.gz", '{"a": 1}\n'))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"the folder holds no file that ends in .jsonl"):
        read(tmp_path)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=5))
def test_every_object_comes_back_as_it_was_written(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("j") / "a.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert [row for _, row in read(file)] == rows
