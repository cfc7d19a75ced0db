"""What is trained of a conversation, with the chat templates of others: the answers, and nothing that stands around."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
from trl import chat_template_utils

from treetrain.core.errors import DataError
from treetrain.logs.chat import SPECIAL, ChatReader
from treetrain.logs.messages import clean_messages
from treetrain.logs.records import Notes, ReadSettings

FOLDER = Path(chat_template_utils.__file__).parent / "chat_templates"
TRAINING = sorted(path.stem for path in FOLDER.glob("*_training.jinja"))


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name="weather", **arguments):
    return {"id": "c00000001", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, content="", **more):
    return said("assistant", content, tool_calls=list(calls), **more)


def result(content):
    return said("tool", content, tool_call_id="c00000001", name="weather")


ASKED = said("user", "Weather in Bern?")
CONVERSATIONS = {
    "answers": [ASKED, said("assistant", "It is sunny."), said("user", "And then?"), said("assistant", "Rain.")],
    "a call": [ASKED, calling(call(city="Bern", days=5)), result("SUNNY"), said("assistant", "It is sunny.")],
    "a call in the middle": [
        *(ASKED, said("assistant", "It is."), said("user", "Sure?"), calling(call(city="Bern")), result("SUNNY")),
        *(said("assistant", "It is sunny."), said("user", "Thanks."), said("assistant", "Bye.")),
    ],
    "thoughts": [
        *(ASKED, said("assistant", "It is sunny.", reasoning_content="I know."), said("user", "And then?")),
        said("assistant", "Rain.", reasoning_content="I know that, too."),
    ],
}


@pytest.fixture
def reader(bytes_tokenizer):
    """A reader with a template, whose special tokens the tokenizer has as it is with a real one."""

    def reader(template, **options):
        tokenizer = copy.deepcopy(bytes_tokenizer)
        special = sorted({*SPECIAL.findall(template), "<bos>"})
        tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": special})
        return ChatReader(ReadSettings(tokenizer=tokenizer, chat_template=template, **options))

    return reader


def runs(tokenizer, ids, mask):
    """Texts of the runs of tokens with a mask."""
    parts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(np.asarray(mask) != 0)) + 1)
    return [tokenizer.decode(np.asarray(ids)[part]) for part in parts if len(part) and mask[part[0]]]


@pytest.fixture
def trained(reader):
    """The texts that are trained, and the notes."""

    def trained(messages, template, **options):
        made, notes = reader(template, **options), Notes("f.jsonl line 1")
        rows = made({"messages": messages}, notes)
        return [runs(made.settings.tokenizer, row.ids, row.loss_weights) for row in rows], notes.lines()

    return trained


@pytest.mark.parametrize("name", TRAINING)
def test_masks_are_those_of_trls_templates_but_for_line_feeds_headers_and_empty_think_blocks(reader, name):
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    made = reader(template)
    renderer, compared = made.renderer, 0
    for messages in CONVERSATIONS.values():
        try:
            (row,) = made({"messages": messages}, Notes())
        except DataError as error:
            if "none or not all of the calls" in str(error):
                assert "tool_calls" not in template or name.startswith("deepseek_r1")
            else:
                assert "must alternate" in str(error) or "Only user and assistant roles" in str(error), name
            continue
        compared += 1
        theirs = renderer.tokenizer.apply_chat_template(
            renderer.templated(renderer.fitted(clean_messages(messages, Notes()))),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert row.ids.tolist() == theirs["input_ids"]
        ours, mask = row.loss_weights != 0, np.array(theirs["assistant_masks"]) != 0
        assert not (ours & ~mask).any(), runs(renderer.tokenizer, row.ids, ours & ~mask)
        headers = {renderer.header.strip(), renderer.header.partition("<think>")[0].strip(), "<｜tool▁outputs▁end｜>"}
        for text in runs(renderer.tokenizer, row.ids, mask & ~ours):
            rest = re.sub(r"<think>|</think>|\s", "", text)
            assert rest in {*headers, *(header.rpartition("\n")[2] for header in headers), ""}, text
    assert compared >= 2


# Written after Command A's template: a call is followed by a block of results, which is there without results, too.
COMMAND = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>' + (m.tool_plan or '') + '<|END_THINKING|>' }}"
    "{{- '<|START_ACTION|>[' }}{%- for c in m.tool_calls %}"
    "{{- '{\"tool_name\": \"' + c.function.name + '\", \"parameters\": ' + (c.function.arguments | tojson) + '}' }}"
    "{%- endfor %}{{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' }}"
    "{{- '<|START_TOOL_RESULT|>[' }}"
    "{%- for r in messages[loop.index0 + 1:] if r.role == 'tool' %}{{- r.content | tojson }}{%- endfor %}"
    "{{- ']<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
    "{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}"
    "{%- elif m.role != 'tool' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
)
# Written after axolotl's forms of Command A's template: the header of an answer stands behind every conversation, asked
# for or not; results are turns of the system, and a call is followed by its header even before it has a result.
ASKS_ALWAYS = (
    "{{- bos_token + '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be kind.<|END_OF_TURN_TOKEN|>' }}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[' + m.content + ']<|END_TOOL_RESULT|>' }}"
    "{%- elif m.role == 'user' %}{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content }}"
    "{%- else %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '<|START_ACTION|>' + c.function.name + (c.function.arguments | tojson) + '<|END_ACTION|>' }}"
    "{%- else %}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endfor %}"
    "{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
)
# The same, which asks for an answer with one token more, as Command A without tools.
ASKS_MORE = ASKS_ALWAYS + "{%- if add_generation_prompt %}{{- '<|START_RESPONSE|>' }}{%- endif %}"
# Written after axolotl's form of Gemma 4's template: results stand in the model's turn, between the calls and the text
# of one answer, and the token that begins a result ends a call that has none. The prompt has an empty thought.
IN_TURN = (
    "{%- set ns = namespace(open=false) %}{{- bos_token }}{%- for m in messages if m.role != 'tool' %}"
    "{%- set at = messages.index(m) %}{%- set after = messages[at + 1:] %}"
    "{%- if not (m.role == 'assistant' and ns.open) %}"
    "{{- '<|turn>' + {'assistant': 'model'}.get(m.role, m.role) + '\n' }}{%- endif %}"
    "{%- set ns.open = m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '<|tool_call>call:' + c.function.name + (c.function.arguments | tojson) + '<tool_call|>' }}{%- endfor %}"
    "{%- set results = namespace(count=0, over=not m.tool_calls) %}"
    "{%- for r in after %}{%- if r.role != 'tool' %}{%- set results.over = true %}{%- elif not results.over %}"
    "{%- set results.count = results.count + 1 %}"
    "{{- '<|tool_response>response:' + r.name + '{value:' + r.content + '}<tool_response|>' }}"
    "{%- endif %}{%- endfor %}{{- m.content | trim }}"
    "{%- if m.tool_calls and not results.count %}{{- '<|tool_response>' }}"
    "{%- elif not (results.count and not m.content) %}{{- '<turn|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role == 'user' %}"
    "{{- '<|turn>model\n<|channel>thought\n<channel|>' }}{%- endif %}"
)
# Written after Mistral's: the system prompt stands in front of the last message, if a user's, so the prompt for an
# answer is no beginning of the answered conversation; and there is no header of answers.
SYSTEM_LAST = (
    "{%- set said = messages[0].content if messages[0].role == 'system' else '' %}{{- bos_token }}"
    "{%- for m in messages if m.role != 'system' %}{%- if m.role == 'user' %}"
    "{{- '<|inst|> ' + (said + ' ' if loop.last else '') + m.content + '<|/inst|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|result|>' + m.content + '<|/result|>' }}"
    "{%- else %}{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '<|call|> ' + c.function.name + (c.function.arguments | tojson) }}{%- endfor %}{{- '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
)
# Writes what the model says and calls, and no call without text beside it; the last answer has no end.
NO_LAST_END = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '<call>' + c.function.name + '(' + c.function.arguments + ')</call>' }}{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}{#- and <|user|>, <|tool|> #}"
)
# Writes the text of messages alone, as Llama 3's, Phi's and many others.
NO_CALLS = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
SUNNY = CONVERSATIONS["a call"]


@pytest.mark.parametrize("view", ["transcript", "calls"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v5", "diffusion_gemma"])
def test_a_result_that_the_template_writes_into_the_models_turn_is_not_trained(trained, name, view):
    rows, _ = trained(SUNNY, (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), view=view)
    call, answer = (text for row in rows for text in row)
    assert call == '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:5}<tool_call|>'
    assert answer.strip() == "It is sunny.<turn|>"


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_a_block_of_results_and_the_next_header_behind_a_call_are_not_trained(trained, view):
    asks = calling(call(city="Bern"), reasoning_content="I ask.")
    rows, notes = trained([ASKED, asks, *SUNNY[2:]], COMMAND, view=view)
    action = '[{"tool_name": "weather", "parameters": {"city": "Bern"}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
    assert [text for row in rows for text in row] == [
        f"<|START_THINKING|>I ask.<|END_THINKING|><|START_ACTION|>{action}",
        "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ]
    assert not [note for note in notes if "drops" in note]


@pytest.mark.parametrize("view", ["transcript", "calls"])
@pytest.mark.parametrize("template", [ASKS_ALWAYS, ASKS_MORE])
def test_the_header_that_the_template_writes_behind_every_conversation_is_not_trained(trained, template, view):
    rows, _ = trained(CONVERSATIONS["a call in the middle"], template, view=view)
    begins = "<|START_RESPONSE|>" if template == ASKS_ALWAYS else ""
    said = [f"{begins}{text}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for text in ("It is.", "It is sunny.", "Bye.")]
    calls = '<|START_ACTION|>weather{"city": "Bern"}<|END_ACTION|><|END_OF_TURN_TOKEN|>'
    assert [text for row in rows for text in row] == [said[0], calls, *said[1:]]


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_the_text_of_an_answer_behind_its_results_ends_before_those_that_it_does_not_have(trained, view):
    calls = '<|tool_call>call:weather{"city": "Bern"}<tool_call|>'
    rows, _ = trained(CONVERSATIONS["a call in the middle"], IN_TURN, view=view)
    assert [text for row in rows for text in row] == ["It is.<turn|>", calls, "It is sunny.<turn|>", "Bye.<turn|>"]
    rows, _ = trained([ASKED, calling(call(city="Bern"), content="I look."), *SUNNY[2:]], IN_TURN, view=view)
    apart = [calls, "I look.<turn|>"] if view == "transcript" else [f"{calls}I look."]
    assert [text for row in rows for text in row] == [*apart, "It is sunny.<turn|>"]


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_an_answer_is_told_from_a_prompt_that_is_written_otherwise_once_it_is_answered(trained, view):
    messages = [said("system", "Be brief."), *CONVERSATIONS["a call in the middle"]]
    rows, _ = trained(messages, SYSTEM_LAST, view=view)
    answers = ["It is.<|end|>", '<|call|> weather{"city": "Bern"}<|end|>', "It is sunny.<|end|>", "Bye.<|end|>"]
    assert [text for row in rows for text in row] == answers


def test_thinking_does_not_follow_the_empty_thought_that_the_prompt_asks_with(reader):
    made = reader(IN_TURN, view="calls")
    answers = [said("assistant", "Sun.", reasoning_content="I know."), said("assistant", "Sun.")]
    texts = [
        made.settings.tokenizer.decode(row.ids)
        for answer in answers
        for row in made({"messages": [ASKED, answer]}, Notes())
    ]
    assert texts == [
        "<bos><|turn>user\nWeather in Bern?<turn|>\n<|turn>model\n<|channel>thought\nI know.\n<channel|>Sun.<turn|>",
        "<bos><|turn>user\nWeather in Bern?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>Sun.<turn|>",
    ]


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_calls_that_the_template_does_not_write_are_refused_unless_they_are_not_trained(trained, view):
    with pytest.raises(DataError, match=r"message 1 \(assistant\) calls tools, and the chat template writes none"):
        trained(SUNNY, NO_CALLS, view=view)
    rows, notes = trained([ASKED, SUNNY[1] | {"weight": 0}, *SUNNY[2:]], NO_CALLS, view=view)
    assert [text for row in rows for text in row] == ["It is sunny.<|end|>"]
    assert view == "calls" or any("drops an assistant message that is not trained" in note for note in notes)


def test_one_of_two_parallel_calls_that_the_template_writes_alone_is_refused(trained):
    template = (FOLDER / "gptoss.jinja").read_text(encoding="utf-8")
    with pytest.raises(DataError, match="writes none or not all of the calls"):
        trained([ASKED, calling(call(city="Bern"), call(city="Rome")), result("a")], template)


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_a_template_that_joins_arguments_as_text_gets_the_text_of_the_log(trained, view):
    spelt = {"id": "c00000001", "type": "function", "function": {"name": "f", "arguments": '{"a":1,  "b": "x"}'}}
    rows, notes = trained([ASKED, calling(spelt), result("y"), said("assistant", "done")], NO_LAST_END, view=view)
    texts = [text for row in rows for text in row]
    assert texts[0].startswith('<call>f({"a":1,  "b": "x"})</call>') and texts[1] == "done"
    assert any("writes no special token at the end of an answer" in note for note in notes)


def test_the_token_that_begins_the_next_message_ends_an_answer_where_the_template_writes_no_end(trained):
    rows, _ = trained(CONVERSATIONS["answers"], NO_LAST_END)
    assert rows == [["It is sunny.<|user|>", "Rain."]]


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_both_tokens_that_end_a_turn_are_trained(trained, view):
    rows, _ = trained([ASKED, said("assistant", "Sun.")], (FOLDER / "cohere2.jinja").read_text("utf-8"), view=view)
    assert rows == [["Sun.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"]]


def test_thinking_and_a_call_of_one_answer_are_trained_with_what_the_model_writes_between(trained):
    messages = [ASKED, calling(call(city="Bern"), reasoning_content="I must look."), result("20 m")]
    rows, _ = trained(messages, (FOLDER / "gptoss.jinja").read_text(encoding="utf-8"))
    (text,) = rows[0]
    assert text.startswith("<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant to=functions.weather")
    assert text.endswith('{"city": "Bern"}<|call|>')


@pytest.mark.parametrize("tag", ["", "<think>"])
def test_thinking_that_the_template_drops_is_noted_with_and_without_its_opening_tag(trained, tag):
    thought = f"{tag}I know.\n</think>\n\nIt is sunny."
    messages = [ASKED, said("assistant", thought), said("user", "And then?"), said("assistant", "Rain.")]
    rows, notes = trained(messages, (FOLDER / "qwen3.jinja").read_text(encoding="utf-8"))
    assert rows == [["It is sunny.<|im_end|>", "Rain.<|im_end|>"]]
    assert any("drops the thinking of an assistant message, so it is not trained" in note for note in notes)


@pytest.mark.parametrize("view", ["transcript", "calls"])
def test_the_beginning_of_an_answer_is_found_where_the_header_of_answers_cannot_be_determined(trained, view):
    picky = "{%- if messages[0].role != 'system' %}{{- raise_exception('no system prompt') }}{%- endif %}"
    template = picky + NO_CALLS.replace("m.content", "('[thought]' if m.role == 'assistant' else '') + m.content")
    rows, _ = trained([said("system", "be brief"), ASKED, said("assistant", "It is.")], template, view=view)
    assert rows == [["[thought]It is.<|end|>"]]


def test_an_empty_answer_trains_its_end_and_is_noted_where_the_template_writes_nothing_for_it(trained):
    messages = [ASKED, said("assistant", ""), said("user", "And then?"), said("assistant", "Rain.")]
    assert trained(messages, NO_CALLS)[0] == [["<|end|>", "Rain.<|end|>"]]
    rows, notes = trained(messages, NO_CALLS.replace("in messages %}", "in messages if m.content %}"))
    assert rows == [["Rain.<|end|>"]] and any("writes nothing for an empty answer" in note for note in notes)


def test_an_answer_that_the_template_tears_apart_is_trained_in_all_of_its_places_and_noted(trained):
    messages = [ASKED, calling(call(city="Bern"), content="I look."), *SUNNY[2:]]
    rows, notes = trained(messages, (FOLDER / "gemma4.jinja").read_text(encoding="utf-8"))
    assert [text.strip() for text in rows[0]][:2] == [
        '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>',
        "I look.<turn|>",
    ]
    assert any("writes one answer in several places" in note for note in notes)


def test_texts_that_look_like_the_template_or_like_marks_do_not_move_the_spans(trained):
    nasty = 'x<|end|><|user|>Weather in Bern?<|end|><|assistant|>It is sunny. \ue000\ue0000000001 9137000000 {"a": 1}'
    messages = [ASKED, said("assistant", nasty), said("user", nasty), said("assistant", "It is sunny.")]
    for view in ("transcript", "calls"):
        rows, _ = trained(messages, NO_CALLS, view=view)
        assert "".join("".join(row) for row in rows) == f"{nasty}<|end|>It is sunny.<|end|>"


def test_a_template_that_rewrites_what_messages_say_is_refused(trained):
    template = NO_CALLS.replace("m.content", "m.content[::-1] | upper")
    with pytest.raises(DataError, match="rewrites what the messages say"):
        trained([ASKED, said("assistant", "It is sunny.")], template)


def test_other_values_in_the_shape_of_earlier_messages_have_the_spans_of_a_rendering_of_their_own(reader):
    made = reader(NO_CALLS)
    for number in range(40):
        words = "a" * (number + 1)
        messages = [said("user", words), said("assistant", f"{words} b"), said("user", "c"), said("assistant", words)]
        (row,) = made({"messages": messages}, Notes())
        assert runs(made.settings.tokenizer, row.ids, row.loss_weights) == [f"{words} b<|end|>", f"{words}<|end|>"]
    assert len(made.renderer.shapes) == 1
