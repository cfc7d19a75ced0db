"""The built-in tokenizer and chat template."""

import json
import subprocess
import sys

import pytest

from treetrain.models.loading import PRESETS, TOKENIZER_FOLDER, load_config, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.mark.parametrize(
    "text",
    ["", " ", "plain words\n\n  indented\t12 * 34 = 408", "naïve Ω 漢字 🌲\r\n", '{"a": [1, 2]}', "\x00\x7f", "  a  b"],
)
def test_any_text_comes_back_from_its_tokens(text, tokenizer):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_is_that_of_every_preset_and_the_special_tokens_are_where_the_config_says(tokenizer):
    assert {load_config(name).vocab_size for name in PRESETS} == {len(tokenizer)}
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert ids == [tokenizer.pad_token_id, 1, tokenizer.eos_token_id] == [0, 1, 2]


@pytest.mark.slow
def test_training_it_again_gives_the_committed_tokenizer(tmp_path):
    from examples.countdown.train_tokenizer import write

    write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((TOKENIZER_FOLDER / name).read_text()), name
    assert (TOKENIZER_FOLDER / "tokenizer.json").stat().st_size < 400_000


def test_the_tokens_of_the_first_messages_are_a_prefix_of_the_tokens_of_all(tokenizer, recorded):
    def ids(messages, **options):
        return tokenizer.apply_chat_template(messages, tools=row["tools"], return_dict=True, **options)["input_ids"]

    for row in recorded["heldout"][::20]:
        whole = ids(row["messages"])
        for end in range(1, len(row["messages"])):
            part = ids(row["messages"][:end])
            assert whole[: len(part)] == part
            if row["messages"][end]["role"] == "assistant":
                prompt = ids(row["messages"][:end], add_generation_prompt=True)
                assert whole[: len(prompt)] == prompt


def test_the_generation_marks_cover_what_the_agent_wrote_and_nothing_else(tokenizer, recorded):
    row = recorded["heldout"][0]
    rendered = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [i for i, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mark]
    expected = ""
    for message in row["messages"][2::2]:
        function = message["tool_calls"][0]["function"]
        said = f"{message['content']}\n" if message["content"] else ""
        body = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
        expected += f"{said}<tool_call>\n{body}\n</tool_call><|im_end|>"
    assert tokenizer.decode(marked) == expected


def test_the_template_renders_the_traps_of_real_chat_files(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "done", "tool_calls": None},
    ]
    made = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\none two<|im_end|>\n"
        f"<|im_start|>assistant\n{made}\n{made}<|im_end|>\n"
        "<|im_start|>tool\nx<|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )


@pytest.mark.slow
def test_the_tokenizer_loads_where_torch_is_not_installed():
    code = (
        "import sys; sys.modules['torch'] = None; from treetrain.models.loading import load_tokenizer; "
        "tokenizer = load_tokenizer('tiny'); "
        "assert tokenizer.apply_chat_template([{'role': 'user', 'content': 'hello'}], tokenize=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
