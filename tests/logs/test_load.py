import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from treetrain.core.errors import DataError
from treetrain.logs.advantages import group_advantages
from treetrain.logs.chat import chat_template_text
from treetrain.logs.load import from_messages, load

TALK = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "the answer"},
        {"role": "assistant", "content": "4"},
    ],
    "task_id": "t",
    "reward": 1.0,
}
TOKENS = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "reward": 0.5, "group_id": "g"}


def test_the_format_is_told_by_the_first_row(write_rows, bytes_tokenizer):
    tokens = load(write_rows(TOKENS))
    assert tokens.format == "tokens" and tokens.trajectories[0].ids.tolist() == [1, 2, 3]
    chat = load(write_rows(TALK), tokenizer=bytes_tokenizer)
    assert chat.format == "chat" and len(chat.trajectories) == 1
    assert len(load(write_rows(TALK, TALK), tokenizer=bytes_tokenizer, view="calls").trajectories) == 4


def test_several_files_plain_and_zipped_are_read_in_order(write_rows, tmp_path):
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps({"input_ids": [9]}).encode()))
    loaded = load([write_rows(TOKENS), str(zipped)])
    assert [t.ids.tolist() for t in loaded.trajectories] == [[1, 2, 3], [9]]
    assert str(loaded.trajectories[1].id) == f"{zipped} line 1"


def test_a_limit_counts_rows_over_all_files_and_is_noted(write_rows):
    path = write_rows(TOKENS, TOKENS, TOKENS)
    loaded = load([path, path], limit=4)
    assert len(loaded.trajectories) == 4
    assert "only the first 4 records are read; there are more" in loaded.notes
    assert load([path, path], limit=6).notes == ()


def test_options_without_effect_on_token_rows_are_noted(write_rows):
    (note,) = load(write_rows(TOKENS), view="calls").notes
    assert "have no effect" in note


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [TOKENS, {"input_ids": [1, 50]}],
            {"vocab_size": 50},
            r"line 2: ids\[1\] = 50 is outside .* 50 tokens",
        ),
        (
            [TOKENS, {"input_ids": [1] * 5}],
            {"max_positions": 4},
            "line 2: row .* has 5 tokens, .* 4 positions",
        ),
        ([TALK], {}, "line 1: conversations need a tokenizer, your model's: tokenizer=tt.load_tokenizer(...)"),
        ([{"text": "x"}], {}, "line 1: cannot tell the format: the record has text; name the format"),
        ([TOKENS, TALK], {}, "line 2: no `input_ids` in the row"),
        ([TOKENS], {"limit": 0}, "no rows were read"),
        ([TOKENS | {"reward": float("nan")}], {}, "line 1: .*reward is nan"),
        ([TOKENS], {"tools": "nowhere.json"}, "nowhere.json: the tools file cannot be read"),
    ],
)
def test_bad_input_is_refused_with_file_and_line(write_rows, rows, options, message):
    with pytest.raises(DataError, match=message):
        load(write_rows(*rows), **options)


def test_rows_of_a_generator_are_all_read_and_the_guessed_format_is_said():
    found = from_messages(iter([{"nodes": [{"tokens": [1, 2, n]}]} for n in range(3)]))
    assert [row.ids.tolist() for row in found.trajectories] == [[1, 2, n] for n in range(3)]
    assert found.notes[0].startswith("read as nodes")
    for format in ("auto", "langfuse"):
        with pytest.raises(DataError, match="row 0: no rows were given, or no record holds messages"):
            from_messages([{"data": []}], format=format)


def test_ids_and_rows_exactly_at_the_models_limits_are_read(write_rows):
    assert load(write_rows({"input_ids": [1, 49]}), vocab_size=50, max_positions=2).trajectories


def test_the_calls_of_a_conversation_are_checked_against_the_models_limits_too(write_rows, bytes_tokenizer):
    path = write_rows(TALK)
    first, second = load(path, tokenizer=bytes_tokenizer, view="calls").trajectories
    with pytest.raises(DataError, match=rf"line 1: row .*/1' has {len(second)} tokens, the model has"):
        load(path, tokenizer=bytes_tokenizer, view="calls", max_positions=len(first))


def test_no_file_unknown_options_templates_and_tokenizers_without_template_are_refused(write_rows, bytes_tokenizer):
    with pytest.raises(DataError, match="no file given"):
        load([])
    with pytest.raises(ValueError, match="view 'call'"):
        load(write_rows(TALK), view="call")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'chatlm' is no template text, no readable file"):
        load(write_rows(TALK), tokenizer=bytes_tokenizer, chat_template="chatlm")


def test_a_template_can_be_a_file_text_or_the_built_in_one(write_rows, tmp_path, templates, bytes_tokenizer):
    file = tmp_path / "own.jinja"
    file.write_text(templates["plain"])
    by_file = load(write_rows(TALK), tokenizer=bytes_tokenizer, chat_template=str(file)).trajectories[0]
    by_text = load(write_rows(TALK), tokenizer=bytes_tokenizer, chat_template=templates["plain"]).trajectories[0]
    np.testing.assert_array_equal(by_file.ids, by_text.ids)
    built_in = load(write_rows(TALK), tokenizer=bytes_tokenizer, chat_template="chatml").trajectories[0]
    assert bytes_tokenizer.decode(built_in.ids) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello there<|im_end|>\n"
        "<|im_start|>user\nthe answer<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert chat_template_text(None) is None


def test_the_built_in_template_writes_tools_reasoning_and_several_calls(write_rows, bytes_tokenizer):
    calls = [
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "sub", "arguments": "{broken"}},
    ]
    answer = {"role": "assistant", "content": "hm", "reasoning_content": "why", "tool_calls": calls}
    row = {"messages": [{"role": "user", "content": "q"}, answer], "tools": [{"name": "add"}]}
    (read,) = load(write_rows(row), tokenizer=bytes_tokenizer, chat_template="chatml").trajectories
    text = bytes_tokenizer.decode(read.ids)
    assert text.startswith("<|im_start|>system\nThese functions") and '<tools>\n{"name": "add"}\n</tools>' in text
    assert bytes_tokenizer.decode(read.ids[read.weights > 0]) == (
        '<think>\nwhy\n</think>\n\nhm\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sub", "arguments": {broken}\n</tool_call><|im_end|>'
    )


def loaded_by(code):
    code = f"import sys; {code}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(found.stdout.split())


def test_reading_imports_no_torch():
    assert loaded_by("import treetrain.logs.load").isdisjoint({"torch", "transformers"})


@pytest.mark.slow
def test_a_training_step_imports_no_reader_of_logs():
    found = loaded_by("import treetrain as tt; tt.TreeEngine; tt.share_prefixes")
    rooms = {name.removeprefix("treetrain.logs.") for name in found if name.startswith("treetrain.logs.")}
    assert "treetrain.layers.trajectory" in found and rooms <= {"columns", "advantages", "once"}


@pytest.fixture(scope="module")
def qwen(shared_data):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizer-qwen3")


def airline(shared_data, qwen, **options):
    folder = shared_data / "tau_airline"
    return load(folder / "trajectories.jsonl", tokenizer=qwen, tools=folder / "tools.json", **options)


@pytest.mark.slow
def test_tau_airline_transcripts_train_exactly_what_its_calls_train(shared_data, qwen):
    whole = airline(shared_data, qwen, chat_template="chatml", limit=10)
    calls = airline(shared_data, qwen, chat_template="chatml", limit=10, view="calls")
    assert whole.notes[:-1] == ()
    trained = np.concatenate([t.ids[t.weights > 0] for t in whole.trajectories])
    np.testing.assert_array_equal(trained, np.concatenate([t.ids[t.weights > 0] for t in calls.trajectories]))
    for t in whole.trajectories:
        text = qwen.decode(t.ids)
        assert qwen(text, add_special_tokens=False)["input_ids"] == t.ids.tolist()


@pytest.mark.slow
def test_real_search_trees_load_and_get_advantages(shared_data, qwen):
    path = shared_data / "tot_game24_bfs" / "trajectories.jsonl"
    loaded = load(path, tokenizer=qwen, limit=300)
    assert any(note.startswith("keys that are not used: 1, such as 'step'") for note in loaded.notes)
    first = loaded.trajectories[0]
    answer = json.loads(path.read_text(encoding="utf-8").partition("\n")[0])["messages"][1]["content"]
    assert qwen.decode(first.ids[first.weights > 0]).startswith(answer.strip())
    rows = group_advantages(loaded.trajectories)
    by_group = {t.group: [] for t in rows}
    for t in rows:
        by_group[t.group].append(t.advantages[0])
    assert len(by_group) > 3
    assert all(abs(np.mean(values)) < 1e-9 for values in by_group.values())
