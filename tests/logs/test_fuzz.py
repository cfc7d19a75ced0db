"""Every reader on damaged records: rows, or one clear error with the place; no other exception, no long message."""

import collections
import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.logs.files import MAGIC, read_records
from treetrain.logs.load import from_messages

SAMPLES = {
    path.name: [r for _, r in read_records(path)] for path in sorted((Path(__file__).parent / "samples").iterdir())
}
DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
ODD = [
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    float("nan"),
    "",
    "x",
    "\ud800",
    "[bold]",
    "token_id:x",
    "[1",
    "x" * 5000,
    [],
    [1],
]
ODD += [[[]], ["a", {}], {}, {"a": 1}, {"content": 3}, {"type": "text"}, {"role": "user"}, {"0": {"1": 2}}, DEEP]


def places(value, path=()):
    """Paths of all entries of nested lists and objects."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*path, name)
        yield from places(entry, (*path, name))


def damaged(record, path, odd):
    """The record with the entry at `path` replaced, or removed where `odd` is an Ellipsis."""
    record = copy.deepcopy(record)
    at = record
    for name in path[:-1]:
        at = at[name]
    if odd is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = odd
    return record


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_record_of_any_format_is_read_or_refused_in_one_sentence(bytes_tokenizer, data):
    records = SAMPLES[data.draw(st.sampled_from(list(SAMPLES)))]
    number = data.draw(st.integers(0, len(records) - 1))
    path = data.draw(st.sampled_from(list(places(records[number]))))
    record = damaged(records[number], path, data.draw(st.sampled_from([..., *ODD])))
    view = data.draw(st.sampled_from(["transcript", "calls"]))
    options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml", "view": view}
    try:
        from_messages([record], **options)
    except DataError as error:
        assert "row 0" in str(error) and len(str(error)) < 700, str(error)


def test_the_samples_make_more_than_24000_damaged_records():
    entries = sum(len(list(places(record))) for records in SAMPLES.values() for record in records)
    assert entries * (1 + len(ODD)) > 24_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_every_entry_of_every_sample_damaged_in_every_way_is_read_noted_or_refused(bytes_tokenizer, name):
    options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml"}
    options["format"] = from_messages(SAMPLES[name], **options).format
    outcomes = collections.Counter()
    for record in SAMPLES[name]:
        try:
            whole = from_messages([record], **options)
        except DataError:  # a span that is no call, say: no rows by itself
            continue
        for path in places(record):
            for odd in (..., *ODD):
                try:
                    found = from_messages([damaged(record, path, odd)], **options)
                except DataError as error:
                    assert "row 0" in str(error) and len(str(error)) < 700, (path, odd, str(error))
                    outcomes["refused"] += 1
                else:
                    # Without an entry there are fewer rows; an entry of another kind must not be lost in silence.
                    absent = odd is ... or odd in (None, "", 0, -1, {}) or (isinstance(odd, list) and len(odd) < 2)
                    lost = len(found.trajectories) < len(whole.trajectories) and not set(found.notes) - set(whole.notes)
                    # A response whose `output` is a text is one, with one answer.
                    assert absent or not lost or path == ("response", "output"), (path, odd)
                    outcomes["read"] += 1
    print(name, dict(outcomes))


@given(
    st.binary(max_size=200)
    | st.builds(bytes.__add__, st.sampled_from(list(MAGIC)), st.binary(max_size=200))
    | st.text(max_size=200).map(str.encode)
    | st.builds(lambda x: json.dumps(x).encode(), st.lists(st.integers()))
)
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_records_or_errors(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("f") / "a.jsonl"
    path.write_bytes(content)
    try:
        for place, _ in read_records(path):
            assert str(path) in place
    except DataError as error:
        assert str(path) in str(error)
