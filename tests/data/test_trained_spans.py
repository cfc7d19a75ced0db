"""What is trained of a conversation, with the chat templates of others: the answers, and nothing that stands around."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
from trl import chat_template_utils

from treetrain.data.chat import SPECIAL, ChatReader
from treetrain.data.messages import clean_messages
from treetrain.data.records import Notes, ReadSettings
from treetrain.errors import DataError

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
