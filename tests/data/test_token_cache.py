"""Tokenised rows in a folder: the same rows and remarks, nothing twice, in one process or several."""

import json

import pytest

from treetrain.data import arrow
from treetrain.data.load import _Reading, load
from treetrain.errors import DataError
from treetrain.models.loading import load_tokenizer


def conversations(count: int, start: int = 0) -> list[dict]:
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": f"{role} {number}"} for role in roles], "odd": 1, "reward": number}
        for number in range(start, start + count)
    ]


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(arrow, "CHUNK", 3)


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
def test_rows_and_remarks_are_those_without_a_cache(log, tmp_path, small_chunks, processes) -> None:
    given = {"tokenizer": load_tokenizer("tiny"), "on_error": "skip"}
    plain = load(log, **given)
    assert len(plain.skipped) == 1 and any("'odd'" in note and "9 times" in note for note in plain.notes)
    assert same(load(log, **given, cache=tmp_path / "cache", processes=processes), plain)
    assert same(load(log, **given, processes=processes), plain)
    assert same(load(log, **given, cache=tmp_path / "cache", limit=4), load(log, **given, limit=4))


def test_only_new_records_are_tokenised_again(log, tmp_path, small_chunks, monkeypatch) -> None:
    given = {"tokenizer": load_tokenizer("tiny"), "on_error": "skip", "cache": tmp_path / "cache"}
    before = load(log, **given)
    tokenised = []
    whole = _Reading.__call__
    monkeypatch.setattr(_Reading, "__call__", lambda self, chunk: tokenised.append(chunk) or whole(self, chunk))
    assert same(load(log, **given), before) and tokenised == []
    with log.open("a") as file:
        file.write("\n" + json.dumps(conversations(1, 9)[0]))
    after = load(log, **given)
    assert len(after.trajectories) == 10 and [len(chunk) for chunk in tokenised] == [2]
    load(log, **given, view="calls")
    assert len(tokenised) == 5, "other settings are other rows"


def test_a_bad_record_stops_with_its_place(log, tmp_path, small_chunks) -> None:
    with pytest.raises(DataError, match=r"log\.jsonl line 5: "):
        load(log, tokenizer=load_tokenizer("tiny"), cache=tmp_path / "cache")
