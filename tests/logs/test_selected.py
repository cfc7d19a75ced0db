"""Which calls of a log are read, and what is said where none is."""

import json
from pathlib import Path

import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture
def read(bytes_tokenizer, templates):
    def read(*records, **options):
        return from_messages(records, tokenizer=bytes_tokenizer, chat_template=templates["chatml"], **options)

    return read


def generation(model, text, **more):
    answer = {"role": "assistant", "content": text}
    return {"type": "GENERATION", "traceId": "t", "model": model, "input": SAID, "output": answer} | more


def test_where_selects_calls_by_their_model_or_another_field(read, bytes_tokenizer):
    calls = [generation("policy", "hi"), generation("judge", "good"), generation("judge", "bad", version="2")]
    trace = {"id": "t", "observations": calls}
    for records in (calls, [trace]):
        found = read(*records, where={"model": "policy"})
        assert [bytes_tokenizer.decode(row.ids[row.weights > 0]) for row in found.trajectories] == ["hi<|im_end|>"]
        (note,) = [note for note in found.notes if "is left out" in note]
        assert note.startswith("a row is left out: its `model` is 'judge', not 'policy' (2 times")
    (row,) = read(trace, where={"version": "2"}).trajectories
    assert bytes_tokenizer.decode(row.ids[row.weights > 0]) == "bad<|im_end|>"
    with pytest.raises(DataError, match=r"row 0: no rows in 1 records.*its `model` is 'judge', not 'mine'"):
        read(trace, where={"model": "mine"})
    rows = [{"messages": [*SAID, {"role": "assistant", "content": name}], "split": {"name": name}} for name in "ab"]
    assert len(read(*rows, where={"split.name": "b"}).trajectories) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        # Keys of what is there, and a way to read it.
        (
            {"log": {"turns": SAID}},
            r"cannot tell the format: the record has log\.turns\.0\.role.*--map messages=log\.turns",
        ),
        ({"text": "x", "messages": "y"}, "the record has text, messages; name the format .*near: .*chat"),
        # Spans that hold no call.
        (
            {"name": "tool", "attributes": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}},
            "no rows in 1 records, read as spans .spans and runs that are no LLM call.*attributes.gen_ai.tool.name",
        ),
        ({"messages": SAID}, "no rows in 1 records, read as chat .no assistant message, so nothing to train"),
    ],
)
def test_a_log_without_rows_is_an_error_that_says_what_it_holds(read, write_rows, bytes_tokenizer, record, message):
    with pytest.raises(DataError, match=message) as error:
        read(record, view="calls")
    assert len(str(error.value)) <= 600
    with pytest.raises(DataError, match=message):
        load(write_rows(record), tokenizer=bytes_tokenizer, view="calls")


def test_a_log_of_which_every_record_is_skipped_is_an_error(write_rows):
    path = write_rows({"input_ids": "x"}, {"input_ids": "y"})
    with pytest.raises(DataError, match=r"line 1: no rows in 2 records.*skipped: .*line 1: .*input_ids"):
        load(path, on_error="skip")


def test_pages_of_an_api_are_the_records_in_them(tmp_path, bytes_tokenizer):
    path = tmp_path / "page.json"
    page = {"data": [generation("m", "a"), generation("m", "b")], "meta": {"page": 1, "totalItems": 2}}
    path.write_text(json.dumps(page))
    found = load(path, tokenizer=bytes_tokenizer)
    assert found.format == "langfuse" and len(found.trajectories) == 2
    path.write_text(json.dumps(page | {"data": [generation("m", "a"), 3]}))
    with pytest.raises(DataError, match=r"page\.json line 1 data\.1: `data\.1` is 3, expected an object"):
        load(path, tokenizer=bytes_tokenizer)


def test_keys_that_are_not_used_are_one_line_with_counts(read):
    rows = [
        {"messages": [*SAID, {"role": "assistant", "content": "a"}], "colour": 1, "size": n or None} for n in range(3)
    ]
    assert read(*rows).notes == ("keys that are not used: 2, such as 'colour'; first: row 0",)


def test_a_misspelt_key_below_a_record_is_named(read):
    path = Path(__file__).parent / "samples" / "art.jsonl"
    group = json.loads(path.read_text())
    whole = read(group, tools="none")
    assert len(whole.trajectories) == 2
    assert not any("not used" in note and "messages_and_choices" in note for note in whole.notes)
    group["trajectories"][0]["rewrad_score"] = group["trajectories"][0].pop("reward")
    found = read(group, tools="none")
    assert any("'trajectories.rewrad_score' (1)" in note for note in found.notes)
