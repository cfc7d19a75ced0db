"""Conversations as tools write them: one small dialogue in every encoding gives the same tokens and the same mask."""

import gzip
import json
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

SYSTEM = "be brief"
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": TOOL}]


def call(name, arguments):
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


# Two calls in parallel, thinking, and an answer.
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "hm",
        "reasoning_content": "why",
        "tool_calls": [call("1", {"a": 1}), call("2", {})],
    },
    {"role": "tool", "tool_call_id": "1", "content": "4"},
    {"role": "tool", "tool_call_id": "2", "content": "5"},
    {"role": "assistant", "content": "the answer is 4"},
]
# docs.anthropic.com: Messages API, tool use, extended thinking.
ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "why", "signature": "x"},
            {"type": "text", "text": "hm"},
            {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "2", "name": "add", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "4"}]},
            {"type": "tool_result", "tool_use_id": "2", "content": "5"},
        ],
    },
    {"role": "assistant", "content": "the answer is 4"},
]
ANTHROPIC_TOOLS = [{"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}]
# platform.openai.com: the responses API, items of `input` and `output`.
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "why"}], "content": None},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "2", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "4"},
    {"type": "function_call_output", "call_id": "2", "output": "5"},
]
ANSWER = {"role": "assistant", "content": "the answer is 4", "refusal": None}
ITEM_TOOLS = [{"type": "function", **TOOL, "strict": True}]


@pytest.fixture
def read(bytes_tokenizer):
    def read(record, **options):
        return from_messages([record], tokenizer=bytes_tokenizer, chat_template="chatml", **options)

    return read


def same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.weights, b.weights)


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_openai_and_anthropic_messages_give_the_same_rows(read, view):
    openai = read({"messages": MESSAGES, "tools": TOOLS, "reward": 1}, view=view)
    anthropic = read({"messages": ANTHROPIC, "system": SYSTEM, "tools": ANTHROPIC_TOOLS, "reward": 1}, view=view)
    same(openai.trajectories, anthropic.trajectories)
    assert openai.notes == anthropic.notes == () and anthropic.trajectories[0].reward == 1


REQUESTS = {
    "chat completions, request and response": {
        "request": {"model": "m", "messages": MESSAGES[:-1], "tools": TOOLS},
        "response": {"id": "x", "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]},
    },
    "chat completions, response beside the messages": {
        "messages": MESSAGES[:-1],
        "tools": TOOLS,
        "choices": [{"message": ANSWER}],
    },
    "chat completions, batch": {
        "request": {"method": "POST", "body": {"messages": MESSAGES[:-1], "tools": TOOLS}},
        "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    },
    "responses": {
        "request": {"instructions": SYSTEM, "input": ITEMS, "tools": ITEM_TOOLS},
        "response": {
            "object": "response",
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": ANSWER["content"]}],
                }
            ],
        },
    },
    "anthropic": {
        "request": {"system": [{"type": "text", "text": SYSTEM}], "messages": ANTHROPIC[:-1], "tools": ANTHROPIC_TOOLS},
        "response": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]},
    },
    "bodies as text": {
        "request_body": json.dumps({"messages": MESSAGES[:-1], "tools": TOOLS}),
        "response_body": json.dumps({"choices": [{"message": ANSWER}]}),
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_log_of_requests_gives_the_last_call_of_the_conversation(read, name):
    expected = read({"messages": MESSAGES, "tools": TOOLS}, view="calls").trajectories[-1:]
    found = read(REQUESTS[name] | {"reward": 0.5, "episode": "e"})
    assert found.format == "requests"
    same(found.trajectories, expected)
    assert (found.trajectories[0].reward, found.trajectories[0].episode) == (0.5, "e")
    same(read({"messages": MESSAGES, "tools": TOOLS}, train="last").trajectories, expected)


def test_every_choice_of_a_response_is_a_row_and_a_prompt_elsewhere_is_refused(read):
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("yes", "no")]
    rows = read({"messages": MESSAGES[:2], "choices": choices}).trajectories
    assert len(rows) == 2 and not np.array_equal(rows[0].ids, rows[1].ids)
    with pytest.raises(DataError, match=r"row 0: `previous_response_id` is given"):
        read({"request": {"previous_response_id": "r", "input": "a"}, "response": {"output": []}})
    with pytest.raises(DataError, match=r"row 0: the response has no keys, expected one of choices"):
        read({"request": {"messages": []}, "response": {"choices": {}}})


def test_sharegpt_with_calls_and_results_is_a_conversation(read):
    # LLaMA-Factory, data/README.md: the sharegpt format, with function_call and observation.
    turns = [("system", SYSTEM), ("human", "hello"), ("function_call", '{"name": "add", "arguments": {"a": 1}}')]
    turns += [("observation", "4"), ("gpt", "the answer is 4")]
    record = {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": json.dumps(TOOLS)}
    one_call = [*MESSAGES[:2], {"role": "assistant", "tool_calls": [call("1", {"a": 1})]}, MESSAGES[3], MESSAGES[-1]]
    same(read(record).trajectories, read({"messages": one_call, "tools": TOOLS}).trajectories)


def test_trls_columns_of_messages_train_the_completion(read, bytes_tokenizer):
    (row,) = read(
        {"prompt": [*MESSAGES[1:2], ANSWER], "completion": [{"role": "assistant", "content": "4"}]}
    ).trajectories
    assert bytes_tokenizer.decode(row.ids[row.weights > 0]) == "4<|im_end|>"
    (row,) = read({"prompt": "hello", "completion": " there", "label": False}).trajectories
    assert bytes_tokenizer.decode(row.ids) == "hello there" and row.chosen is False
    assert bytes_tokenizer.decode(row.ids[row.weights > 0]) == " there"


@pytest.mark.parametrize(
    ("more", "trained", "noted"),
    [
        ({}, " there", True),
        ({"finish_reason": "stop"}, " there</s>", False),
        ({"finish_reason": "length"}, " there", False),
        ({"completion": " there<|im_end|>"}, " there<|im_end|>", False),
        ({"completion": " there</s>"}, " there</s>", False),
    ],
)
def test_no_end_of_text_is_trained_that_the_log_does_not_have(read, bytes_tokenizer, more, trained, noted):
    found = read({"prompt": "hello", "completion": " there"} | more)
    (row,) = found.trajectories
    assert bytes_tokenizer.decode(row.ids) == "hello" + trained
    assert bytes_tokenizer.decode(row.ids[row.weights > 0]) == trained
    assert any("without an end-of-text token" in note for note in found.notes) == noted


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", '[{"a": 1, "a": 2}]', "[]"])
def test_text_that_looks_like_json_stays_text(read, bytes_tokenizer, text):
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    generation = {"type": "GENERATION", "traceId": "t", "input": said[:1], "output": text}
    for record in (
        {"prompt": "hello", "completion": text},
        {"prompt": said[:1], "chosen": text, "rejected": "x"},
        {"request": {"input": text}, "response": {"output": [{"type": "message", "content": text}]}},
        generation,
    ):
        row = read(record).trajectories[0]
        assert bytes_tokenizer.decode(row.ids[row.weights > 0]).removesuffix("</s>").removesuffix("<|im_end|>") == text


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": MESSAGES[1:2], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "5"}]},
        {"chosen": [MESSAGES[1], ANSWER], "rejected": [MESSAGES[1], {"role": "assistant", "content": "5"}]},
        {
            "prompt": "hello",
            "chosen": [MESSAGES[1], ANSWER],
            "rejected": [MESSAGES[1], {"role": "assistant", "content": "5"}],
        },
    ],
)
def test_preferences_are_pairs_of_rows_that_train_the_answers(read, bytes_tokenizer, record):
    rows = read(record).trajectories
    assert [(row.pair, row.chosen) for row in rows] == [("row 0", True), ("row 0", False)]
    texts = [bytes_tokenizer.decode(row.ids[row.weights > 0]) for row in rows]
    assert texts == ["the answer is 4<|im_end|>", "5<|im_end|>"]
    assert "hello" in bytes_tokenizer.decode(rows[1].ids)


def test_messages_have_facts_of_their_own(read):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "advantage": 2, "reward": 3}]
    said += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "train": False}]
    found = read({"messages": said, "reward": 1, "task_id": "t"}, view="calls")
    (first,) = found.trajectories
    assert (first.reward, first.episode, set(first.advantages[first.weights > 0])) == (3, None, {2.0})
    assert "an assistant message that is not trained is no call (row 0 message 3)" in found.notes
    with pytest.raises(DataError, match=r"message 1 has a reward, but a transcript is one row"):
        read({"messages": said})
    del said[1]["reward"]
    (row,) = read({"messages": said}).trajectories
    np.testing.assert_array_equal(row.advantages[row.weights > 0], 2.0)
    said[3]["train"] = True
    with pytest.raises(DataError, match=r"message 3 has no `advantage` and other assistant messages have one"):
        read({"messages": said})
    said[3]["train"] = 2
    with pytest.raises(DataError, match=r"message 3: `train` is 2, expected true or false"):
        read({"messages": said})


def test_nothing_that_a_template_drops_is_dropped_in_silence(read, bytes_tokenizer, templates):
    with pytest.raises(DataError, match=r"does not render `tools`.*--chat-template chatml"):
        from_messages([{"messages": MESSAGES, "tools": TOOLS}], tokenizer=bytes_tokenizer)
    with pytest.raises(DataError, match=r"does not render `tools`.*--tools none"):
        from_messages(
            [{"messages": MESSAGES, "tools": TOOLS}],
            tokenizer=bytes_tokenizer,
            chat_template=bytes_tokenizer.chat_template,
        )
    found = from_messages([{"messages": MESSAGES, "tools": TOOLS}], tokenizer=bytes_tokenizer, tools="none")
    dropped = (
        "the template drops the thinking of an assistant message, so it is not trained; --view calls renders every "
        "answer as the last message (row 0 message 2)"
    )
    assert found.notes[0] == dropped
    with pytest.raises(DataError, match=r"the record has `system` and a system message"):
        read({"messages": MESSAGES, "system": "x"})
    found = from_messages([{"messages": [*MESSAGES[:-1], ANSWER | {"colour": 1}]}], tokenizer=bytes_tokenizer)
    assert found.notes == (
        "tools are called but no tool schemas are given, so the prompt lacks them (--tools FILE adds them) (row 0)",
        dropped,
        "message keys that are not used: 1, such as 'colour'; first: row 0",
    )


def test_images_are_refused_or_keep_rows_apart(write_rows, bytes_tokenizer):
    def said(url):
        image = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what"}]}, ANSWER]}

    path = write_rows(said("a"), said("b"), said("a"))
    with pytest.raises(DataError, match=r"message 0: content part 0 is of type 'image_url'.*--images key"):
        load(path, tokenizer=bytes_tokenizer)
    found = load(path, tokenizer=bytes_tokenizer, images="key")
    keys = [row.key for row in found.trajectories]
    assert keys[0] == keys[2] != keys[1] and "(3 times" in found.notes[0]
    tokens = write_rows(
        {"input_ids": [1], "images": ["a"], "key": "lora"}, {"input_ids": [1], "images": ["b"]}, name="t"
    )
    one, other = load(tokens, images="key").trajectories
    assert one.key.startswith("lora ") and one.key.split()[1] != other.key


def test_keys_are_mapped_by_path(write_rows):
    path = write_rows({"ids": [1, 2], "result": {"score": 0.5}, "task": "t"}, {"ids": [3], "task": "t"})
    found = load(path, map={"input_ids": "ids", "reward": "result.score", "group": "task"})
    assert [(row.ids.tolist(), row.reward, row.group) for row in found.trajectories] == [
        ([1, 2], 0.5, "t"),
        ([3], None, "t"),
    ]
    assert any(note.startswith("`result.score`, to be read as `reward`, is not there") for note in found.notes)


def test_bad_records_are_skipped_where_that_is_asked_for_and_listed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": "x"}\n{broken\n{"input_ids": [3, 4]}\n')
    with pytest.raises(DataError, match=r"line 2: "):
        load(path)
    found = load(path, on_error="skip")
    assert [row.ids.tolist() for row in found.trajectories] == [[1, 2], [3, 4]]
    assert [line.partition(": ")[0] for line in found.skipped] == [f"{path} line 2", f"{path} line 3"]
    assert any(note.startswith("2 of 4 records are skipped") for note in found.notes)


def test_arrays_documents_compression_tables_and_folders_are_the_same_records(tmp_path, bytes_tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    rows = [{"messages": [*MESSAGES[1:2], {"role": "assistant", "content": f"{n} é"}], "reward": n} for n in range(3)]
    text = json.dumps(rows, ensure_ascii=False).encode()
    (tmp_path / "array.json").write_bytes(text)
    (tmp_path / "pretty.json").write_bytes(json.dumps(rows, indent=2).encode())
    (tmp_path / "documents.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "rows.jsonl.zst").write_bytes(
        pa.compress("".join(json.dumps(r) + "\n" for r in rows).encode(), "zstd", asbytes=True)
    )
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "folder" / f"{number}.traj").write_text(json.dumps(row))
    options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml"}
    expected = from_messages(rows, **options).trajectories
    for path in sorted(tmp_path.iterdir()):
        found = load(path, **options).trajectories
        same(found, expected)
        assert [row.reward for row in found] == [0, 1, 2]
    same(from_messages(Dataset.from_list(rows), **options).trajectories, expected)


def test_a_broken_array_names_the_line_and_loses_nothing_in_silence(tmp_path):
    for text, message in [
        (
            '[{"input_ids": [1]},\n{"input_ids": [2]}',
            r"broken JSON after line 2 \(expected ',', or '\]' at the end of the text\)",
        ),
        ('[{"input_ids": [1]},\n{"input_ids": [2', "broken JSON after line 1"),
        ('[{"input_ids": [1]}]\n{"input_ids": [2]}', r"after line 1 \(expected ',', or '\]' at the end of the text\)"),
        ('[{"input_ids": [1]},\n 3]', "line 2 element 2: a JSON number, expected an object"),
    ]:
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            load(path)


def test_a_reader_of_ones_own_is_a_function_and_an_entry_point(write_rows, monkeypatch):
    point = EntryPoint("mine", "test_conversations:read_mine", "treetrain.formats")
    monkeypatch.setitem(load.__globals__, "entry_points", lambda group: EntryPoints([point]))
    rows = load(write_rows({"mine": [1, 2]}, {"mine": [3]}), format="mine").trajectories
    assert [row.ids.tolist() for row in rows] == [[1, 2], [3]]
    with pytest.raises(DataError, match=r"line 1: the record is not as format mine has them \(KeyError: 'mine'\)"):
        load(write_rows({"other": 1}), format="mine")
    with pytest.raises(ValueError, match=r"unknown format 'nine'; did you mean mine"):
        load(write_rows({"other": 1}), format="nine")


def read_mine(record):
    return [{"input_ids": record["mine"]}]


def test_images_beside_tokens_or_messages_are_refused_or_keys(read):
    image = {"type": "image_url", "image_url": {"url": "a"}}
    request = {"messages": [{"role": "user", "content": [image]}]}
    response = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3], "message": ANSWER}]}
    for record in ({"input_ids": [1, 2], "images": ["a"]}, {"request": request, "response": response}):
        with pytest.raises(DataError, match=r"the record has images, .*--images key"):
            read(record)
