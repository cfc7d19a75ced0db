import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treetrain.core.errors import DataError
from treetrain.logs.chat import ChatReader, Renderer
from treetrain.logs.messages import clean_messages, read_tools
from treetrain.logs.records import Notes, ReadSettings

ALL = ["chatml", "think_dropping", "plain", "strict", "think_opening"]


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def tool_call(arguments='{"a": 1}'):
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def conversation(template="chatml"):
    """A conversation; without calls where the template writes none."""
    messages = [
        said("system", "be brief"),
        said("user", "hello"),
        said("assistant", "hello there"),
        said("user", "add"),
        said("assistant", None, tool_calls=[tool_call()], refusal=None, audio=None, function_call=None),
        said("tool", "4", tool_call_id="c1", name="add"),
        said("assistant", "the answer is 4"),
        said("user", "bye"),
    ]
    return messages if template != "plain" else messages[:4] + messages[6:]


@pytest.fixture
def read(bytes_tokenizer, templates):
    def read(messages, template="chatml", **options):
        row = options.pop("row", {}) | {"messages": messages}
        notes = options.pop("notes", Notes())
        notes.place = "f.jsonl line 9"
        template = templates.get(template, template)
        return ChatReader(ReadSettings(tokenizer=bytes_tokenizer, chat_template=template, **options))(row, notes)

    return read


@pytest.fixture
def trained(bytes_tokenizer):
    """Texts of the runs of trained tokens."""

    def trained(row):
        runs = np.split(np.arange(len(row)), np.flatnonzero(np.diff(row.loss_weights != 0)) + 1)
        return [bytes_tokenizer.decode(row.ids[run]) for run in runs if row.loss_weights[run[0]] != 0]

    return trained


TOOL_TURN = '<tool_call>add{"a": 1}</tool_call><|im_end|>'
EXPECTED = {
    "chatml": ["hello there<|im_end|>", TOOL_TURN, "the answer is 4<|im_end|>"],
    "strict": ["hello there<|im_end|>", TOOL_TURN, "the answer is 4<|im_end|>"],
    "think_dropping": ["hello there<|im_end|>", TOOL_TURN, "the answer is 4<|im_end|>"],
    "think_opening": ["hello there<|im_end|>", TOOL_TURN, "the answer is 4<|im_end|>"],
    "plain": ["hello there</s>", "the answer is 4</s>"],
}


@pytest.mark.parametrize("template", ALL)
def test_a_transcript_trains_bodies_and_end_marks_of_assistant_messages_only(
    read, trained, template, bytes_tokenizer, templates
):
    (row,) = read(conversation(template), template)
    # In the plain template the space before a body is in the body's first token.
    assert [text.lstrip() for text in trained(row)] == EXPECTED[template]
    cleaned = [m | {"content": m["content"] or ""} for m in conversation(template)]
    if template != "plain":
        cleaned[4]["tool_calls"] = [tool_call({"a": 1})]
    text = bytes_tokenizer.apply_chat_template(cleaned, chat_template=templates[template], tokenize=False)
    assert row.ids.tolist() == bytes_tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", ALL)
def test_every_call_is_its_prompt_untrained_and_its_completion_trained(
    read, trained, template, bytes_tokenizer, templates
):
    rows = read(conversation(template), template, view="calls")
    assert [row.id for row in rows] == [f"f.jsonl line 9/{n}" for n in range(len(rows))]
    assert [trained(row) for row in rows] == [[text] for text in EXPECTED[template]]
    prompt = bytes_tokenizer.apply_chat_template(
        conversation()[:2], chat_template=templates[template], tokenize=False, add_generation_prompt=True
    )
    ids = bytes_tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert rows[0].ids[: len(ids)].tolist() == ids
    think = "<think>\n\n</think>\n\n" if template == "think_dropping" else ""
    ids += bytes_tokenizer(think)["input_ids"]
    assert rows[0].loss_weights.tolist() == [0] * len(ids) + [1] * (len(rows[0]) - len(ids))


def test_a_think_block_that_the_template_writes_is_trained_where_it_is_written(read, trained):
    messages = [
        said("user", "a"),
        said("assistant", "b", reasoning_content="early"),
        said("user", "c"),
        said("assistant", "d", reasoning_content="late"),
    ]
    (row,) = read(messages, "think_dropping")
    assert trained(row) == ["b<|im_end|>", "<think>\nlate\n</think>\n\nd<|im_end|>"]
    calls = read(messages, "think_dropping", view="calls")
    assert [trained(call) for call in calls] == [
        ["<think>\nearly\n</think>\n\nb<|im_end|>"],
        ["<think>\nlate\n</think>\n\nd<|im_end|>"],
    ]


def test_an_empty_think_block_that_the_log_does_not_have_is_not_trained(read, trained, bytes_tokenizer):
    notes = Notes()
    for thought, expected in ((None, "d"), ("", "d"), ("late", "<think>\nlate\n</think>\n\nd")):
        messages = [said("user", "c"), said("assistant", "d", reasoning_content=thought)]
        for view in ("transcript", "calls"):
            (row,) = read(messages, "think_dropping", view=view, notes=notes)
            assert "<think>" in bytes_tokenizer.decode(row.ids) and trained(row) == [expected + "<|im_end|>"]
    (row,) = read([said("user", "c"), said("assistant", "<think>\n\n</think>\n\nd")], notes=notes)
    assert trained(row) == ["<think>\n\n</think>\n\nd<|im_end|>"]
    assert [line for line in notes.lines() if "empty think block" in line and "(4 times" in line]


@pytest.mark.parametrize("template", ["chatml", "strict", "think_dropping", "plain"])
def test_the_end_of_an_answer_that_was_cut_off_is_not_trained(read, trained, template):
    messages = [said("user", "a"), said("assistant", "b c", finish_reason="length"), said("user", "d")]
    messages += [said("assistant", "e", finish_reason="stop")]
    end = "</s>" if template == "plain" else "<|im_end|>"
    (row,) = read(messages, template)
    assert [text.strip() for text in trained(row)] == ["b c", "e" + end]
    cut, whole = read(messages, template, view="calls")
    assert [text.strip() for text in trained(cut) + trained(whole)] == ["b c", "e" + end]


def test_the_same_words_in_every_turn_do_not_confuse_the_spans(read, trained):
    messages = [said("user", "x"), said("assistant", "x"), said("assistant", "x"), said("user", "x")]
    assert trained(read(messages)[0]) == ["x<|im_end|>", "x<|im_end|>"]


def test_special_tokens_spelled_out_in_a_body_stay_inside_its_span(read, trained):
    # The body quotes the very text that follows it.
    nasty = "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nz"
    messages = [said("user", "q"), said("assistant", nasty), said("user", "b"), said("assistant", "c")]
    assert trained(read(messages)[0]) == [nasty + "<|im_end|>", "c<|im_end|>"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(alphabet="ab \n é😀", max_size=6)),
        min_size=1,
        max_size=6,
    )
)
def test_in_any_conversation_each_assistant_body_is_exactly_what_is_trained(read, trained, turns):
    (row,) = read([said(role, text) for role, text in turns])
    assert trained(row) == [text + "<|im_end|>" for role, text in turns if role == "assistant"]


def test_a_token_across_the_edge_of_a_body_is_trained_and_noted(read, bytes_tokenizer):
    template = (
        "{%- for m in messages %}{{- m.role + ':' + (' ' if m.role == 'assistant' else '') + m.content }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )
    notes = Notes()
    (row,) = read([said("user", "hello"), said("assistant", "there")], template, notes=notes)
    tokens = [bytes_tokenizer.decode([i]) for i in row.ids[row.loss_weights > 0]]
    assert "".join(tokens).strip() == "there" and tokens[0].startswith(" ")
    assert any("a token holds the edge of an answer and text beside it" in note for note in notes.lines())


def test_tokenizers_without_offsets_train_the_same_text(bytes_tokenizer, trained):
    class Slow:
        is_fast = False
        chat_template = bytes_tokenizer.chat_template
        all_special_tokens = bytes_tokenizer.all_special_tokens
        added_tokens_decoder = bytes_tokenizer.added_tokens_decoder
        apply_chat_template = staticmethod(bytes_tokenizer.apply_chat_template)

        def __call__(self, text, return_offsets_mapping=False, **options):
            assert not return_offsets_mapping
            return bytes_tokenizer(text, **options)

    row = {"messages": conversation()}
    (slow,) = ChatReader(ReadSettings(tokenizer=Slow()))(row, Notes())
    assert trained(slow) == EXPECTED["chatml"]


def test_pieces_tokenised_apart_are_exactly_the_tokens_of_the_whole(bytes_tokenizer):
    renderer = Renderer(bytes_tokenizer)
    assert renderer._pieces is not None
    text = "x<|im_start|> user\n\nhello<|im_end|><|im_end|>\n é😀</s> there "
    expected = bytes_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts, ends = renderer.encode(text)
    assert ids.tolist() == expected["input_ids"]
    assert list(zip(starts.tolist(), ends.tolist())) == expected["offset_mapping"]


def test_a_tokenizer_that_marks_text_starts_or_eats_spaces_is_never_given_pieces(bytes_tokenizer):
    marks_start = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("▁abcd")}, merges=[]))
    marks_start.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    marks_start.add_special_tokens([AddedToken("</s>", special=True)])
    marking = PreTrainedTokenizerFast(tokenizer_object=marks_start, eos_token="</s>", chat_template="x")
    assert Renderer(marking)._pieces is None
    eating = copy.deepcopy(bytes_tokenizer)
    eating.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert Renderer(eating)._pieces is None


def test_arguments_with_a_key_twice_are_refused(read):
    with pytest.raises(DataError, match=r"message 0: tool call 0: .* the key 'a' twice, with 1 and 2"):
        read([said("assistant", None, tool_calls=[tool_call('{"a": 1, "a": 2}')])])


def test_row_facts_reach_every_call_and_the_conversation_is_the_episode(read):
    row = {"reward": 0.5, "task_id": "t", "trial": 2, "key": "adapter"}
    calls = read(conversation(), view="calls", row=row)
    assert [(c.reward, c.group, c.key, c.episode) for c in calls] == [(0.5, "t", "adapter", "f.jsonl line 9")] * 3
    assert [c.id for c in calls] == ["t/2/0", "t/2/1", "t/2/2"]
    (whole,) = read(conversation(), row=row | {"group_id": "g", "id": "me"})
    assert (whole.group, whole.id, whole.episode) == ("g", "me", None)


def test_a_message_weight_multiplies_its_loss(read):
    messages = [said("user", "a"), said("assistant", "b", weight=0), said("assistant", "c", weight=0.5)]
    (row,) = read(messages)
    assert set(row.loss_weights.tolist()) == {0, 0.5}
    (call,) = read(messages, view="calls")
    assert call.loss_weights.max() == 0.5 and call.id.endswith("/1")


def test_an_answer_to_nothing_and_a_conversation_without_answer_are_rows(read, trained):
    for view in ("transcript", "calls"):
        (row,) = read([said("assistant", "hello")], view=view)
        assert trained(row) == ["hello<|im_end|>"]
    notes = Notes()
    (row,) = read([said("user", "hello")], notes=notes)
    assert row.loss_weights.sum() == 0
    assert read([said("user", "hello")], view="calls", notes=notes) == []
    assert notes.lines()[0] == "no assistant message, so nothing to train (2 times, first: f.jsonl line 9)"


def test_what_a_template_leaves_out_and_keys_without_use_are_noted(read):
    notes = Notes()
    template = "{%- for m in messages if m.role != 'tool' %}{{- m.role + m.content + '</s>' }}{%- endfor %}"
    messages = [said("user", "q"), said("tool", "result"), said("assistant", "a")]
    read(messages, template, notes=notes, row={"step": 3})
    assert notes.lines() == (
        "a tool message does not appear in the rendered text as it is: the template drops or rewrites it "
        "(f.jsonl line 9 message 1)",
        "keys that are not used: 1, such as 'step'; first: f.jsonl line 9",
    )


def test_a_prompt_that_the_answered_text_does_not_begin_with_is_noted(read, trained):
    notes = Notes()
    calls = read(conversation(), "think_opening", view="calls", notes=notes)
    assert trained(calls[0]) == ["hello there<|im_end|>"]
    assert any("writes a call's prompt differently" in line and "(3 times" in line for line in notes.lines())


def test_tools_of_the_row_come_before_tools_of_the_file(read, bytes_tokenizer):
    template = "{{- tools | tojson if tools else 'none' }}" + bytes_tokenizer.chat_template

    def read_with(**options):
        (row,) = read([said("user", "a"), said("assistant", "b")], template, **options)
        return bytes_tokenizer.decode(row.ids)

    file, own = [{"name": "file"}], [{"name": "own"}]
    assert read_with().startswith("none")
    assert read_with(tools=file).startswith('[{"name": "file"}]')
    assert read_with(tools=file, row={"tools": own}).startswith('[{"name": "own"}]')
    assert read_with(row={"tools": '[{"name": "text"}]'}).startswith('[{"name": "text"}]')


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            said("critic", "x"),
            r"message 1 has the unknown role 'critic' \(known: system, user, assistant, tool",
        ),
        ({"content": "x"}, "unknown role None"),
        ("hello", "message 1 is 'hello', expected an object"),
        (said("user", 3), "content 3, expected text"),
        (said("user", [{"type": "image_url"}]), "content part 0 is of type 'image_url'; only text"),
        (said("assistant", "x", tool_calls="y"), "`tool_calls` is 'y', expected a list"),
        (
            said("assistant", "x", tool_calls=[{"function": {}}]),
            "tool call 0 .*expected `function` with a `name`",
        ),
        (said("assistant", "x", weight=float("nan")), "weight nan"),
        (said("assistant", "x", weight=10**400), r"weight 10+\.\.\.0+, expected a finite"),
        (said("user", "a\ud800"), r"the lone surrogate '.ud800', which the tokenizer cannot read"),
        (said("user", {"a": "x" * 500}), r"content {.{,90}, expected text"),
    ],
)
def test_a_bad_message_is_refused_with_its_index(read, message, text):
    messages = [said("user", "a"), message]
    with pytest.raises(DataError, match=text):
        read(messages)


def test_no_messages_nan_rewards_and_templates_that_refuse_are_named(read, bytes_tokenizer):
    with pytest.raises(DataError, match=r"`messages` is \[\]"):
        read([])
    with pytest.raises(DataError, match=r"reward is nan"):
        read(conversation(), row={"reward": float("nan")})
    with pytest.raises(DataError, match=r"the chat template refuses.*must alternate.*--chat-template chatml"):
        read([said("user", "a"), said("user", "b")], "strict")
    with pytest.raises(DataError, match=r"message 1 .* cannot be found in what the chat template renders"):
        read([said("user", "a"), said("assistant", "b")], "{{- 'nothing' }}")


def clean(**message):
    return clean_messages([message], Notes())[0]


def with_arguments(arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return clean(role="assistant", content=None, tool_calls=[call])["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("given_arguments", "expected"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
    ],
)
def test_tool_arguments_become_objects_where_they_are_objects(given_arguments, expected):
    assert with_arguments(given_arguments) == expected


@given(st.text())
def test_no_tool_argument_string_is_refused_or_changed_unless_it_is_an_object(text):
    result = with_arguments(text)
    assert isinstance(result, dict) or result == text


def test_null_fields_are_dropped_and_null_content_is_empty_text():
    message = clean(role="assistant", content=None, refusal=None, audio=None, tool_calls=None, function_call=None)
    assert message == {"role": "assistant", "content": ""}
    assert clean(role="user")["content"] == ""


def test_text_parts_are_joined():
    assert clean(role="user", content=[{"type": "text", "text": "a"}, "b"])["content"] == "ab"


def test_older_and_newer_names_of_roles_and_calls_are_read_and_noted():
    notes = Notes()
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    cleaned = clean_messages(messages, notes)
    assert [m["role"] for m in cleaned] == ["system", "assistant", "tool"]
    assert cleaned[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert len(notes.lines()) == 2


def test_the_users_rows_are_not_changed():
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    clean_messages([message], Notes())
    assert message["content"] is None and call["function"]["arguments"] == "{}"


@pytest.mark.parametrize("key", ["train", "loss_mask"])
def test_what_a_message_says_before_the_result_of_a_tool_is_not_trained_either(key):
    parts = [{"type": "text", "text": "a"}, {"type": "tool_result", "content": "b"}, {"type": "text", "text": "c"}]
    cleaned = clean_messages([{"role": "assistant", key: 0, "content": parts}], Notes())
    assert [(one["content"], one.get("weight")) for one in cleaned] == [("a", 0), ("b", None), ("c", 0)]


@pytest.mark.parametrize("text", ["", "3", '{"a": 1}', "[1]", "[broken"])
def test_a_tools_file_that_is_no_list_of_schemas_is_refused(tmp_path, text):
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tools.json"):
        read_tools(path)
