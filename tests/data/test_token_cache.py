"""Tokenised rows in a folder: the same rows and remarks, nothing twice, in one process or several."""

import json
import sys

import pytest

from treetrain.data.load import load
from treetrain.errors import DataError
from treetrain.models.loading import load_tokenizer


def conversations(count: int, start: int = 0) -> list[dict]:
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": f"{role} {number}"} for role in roles], "odd": 1, "reward": number}
        for number in range(start, start + count)
    ]


@pytest.fixture
def log(tmp_path):
    """Nine conversations, of which the fifth is broken."""
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(row) for row in conversations(9)]
    path.write_text("\n".join([*lines[:4], '{"messages": 7}', *lines[4:]]))
    return path


def same(one, other) -> bool:
    assert (one.notes, one.skipped, one.format) == (other.notes, other.skipped, other.format)
    rows = zip(one.trajectories, other.trajectories, strict=True)
    return all(repr(a) == repr(b) and a.ids.tolist() == b.ids.tolist() for a, b in rows)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_and_remarks_are_those_without_a_cache(log, tmp_path, processes) -> None:
    given = {"tokenizer": load_tokenizer("tiny"), "on_error": "skip"}
    plain = load(log, **given)
    assert len(plain.skipped) == 1 and any("'odd'" in note and "9 times" in note for note in plain.notes)
    for _ in range(2):
        assert same(load(log, **given, cache=tmp_path / "cache", processes=processes), plain)
    assert same(load(log, **given, processes=processes), plain)
    assert same(load(log, **given, cache=tmp_path / "cache", limit=4), load(log, **given, limit=4))


@pytest.mark.slow
def test_several_processes_convert_the_records_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["treetrain.data.load"], "CHUNK", 3)
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, conversations(20))))
    given = {"tokenizer": load_tokenizer("tiny"), "view": "calls"}
    assert same(load(path, **given, processes=2), load(path, **given))


def test_a_bad_record_stops_with_its_place(log, tmp_path) -> None:
    with pytest.raises(DataError, match=r"log\.jsonl line 5: "):
        load(log, tokenizer=load_tokenizer("tiny"), cache=tmp_path / "cache")
