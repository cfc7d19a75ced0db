"""Which characters of a rendered conversation each message wrote.

A chat template turns messages into text, and does not say which characters come from which message. So the conversation
is rendered again with a mark in place of every value: of texts, of thinking, of the names and arguments of calls.

    values    hi              find         oak
    marked    <user>*0<bot><call>*1 {"q": "*2"}</call><end>
    text      <user>hi<bot><call>find {"q": "oak"}</call><end>

The spans are right because they are checked: with the values put back in the place of their marks, the second rendering
must be the first, character for character. All text between two marks is then the template's, and a value without a
mark is one that the template drops.

An answer reaches from its first mark to its last. What the template writes before them belongs to it as far as the
prompt for this answer does not end with it; what it writes behind them, as far as the conversation would also have it
if it ended with this answer, up to the token that ends a turn. So results of tools are never a part of an answer,
wherever the template puts them.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import common_prefix
from treetrain.logs.messages import Message
from treetrain.logs.records import Json, Tools

THINK_TAG = re.compile(r"(</?think>)")
"""Templates look for these in the text of an answer, so marks stand between them."""
DIGITS = 7
"""How many digits the number of a mark has."""
KEPT = 1024
"""Most of what is remembered of a template: shapes of messages, and texts around answers."""
SHAPE = ("role", "content", "tool_calls")
"""Keys of messages that mostly decide, with thinking, what a template writes around values."""
CALL_ID = re.compile(r"'id': '[^']*', ")


class Template(Protocol):
    """Renders messages, and knows the special tokens: `chat.Renderer`."""

    marker: "re.Pattern[str]"
    """Matches the special tokens."""
    reasoning_key: str
    """The key of messages under which the template finds thinking."""
    header: str
    """The text before every answer; empty if that cannot be determined."""
    end_of_turn: str
    """The special token that ends an answer of text; empty if there is none."""
    edges: dict[tuple[Json, ...], int]
    """The text around answers, which is the same in all conversations."""
    shapes: dict[str, list[str]]
    """Messages with marks, and what the template wrote around the marks."""

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """The text of messages; raises DataError."""
        ...


class Value(NamedTuple):
    """A value of a message that has a mark."""

    message: int
    """The message's number."""
    part: str
    """"text", "thinking" or "call"."""
    value: Json
    """A text, or a number in the arguments of a call."""

    def forms(self) -> Iterator[str]:
        """The value as templates write it: as it is, and as JSON."""
        if isinstance(self.value, str):
            yield self.value
            for ascii_only in (False, True):
                yield json.dumps(self.value, ensure_ascii=ascii_only)[1:-1]
        else:
            yield json.dumps(self.value)
            yield str(self.value)


class Place(NamedTuple):
    """A value in the text."""

    number: int
    """The number of the value."""
    start: int
    end: int
    """Its characters [start, end)."""
    before: str
    after: str
    """The text of the template between the value and its neighbours."""


class Span(NamedTuple):
    """Characters [start, end) of an answer, which has several only where the template tears it apart."""

    start: int
    end: int
    message: int
    said: int
    """Where the last value of the answer ends; what follows ends the turn."""


class Found(NamedTuple):
    """The messages of a conversation in its rendering."""

    spans: list[Span]
    """The spans of the answers, in the order of the text."""
    dropped: dict[int, set[str]]
    """For every message the parts of which a value is not in the text."""


class _Marked(NamedTuple):
    messages: list[Message]
    values: list[Value]
    sign: str
    """Begins the mark of a text."""
    pattern: "re.Pattern[str]"
    """Matches a mark; its group is the number."""


def find_messages(
    template: Template, messages: Sequence[Message], tools: Tools, text: str, *, prompt: str | None = None
) -> Found:
    """Find messages in `text`, their rendering.

    Args:
        template: writes the text.
        messages: of one conversation.
        tools: schemas of tools, or None.
        text: the rendering of messages and tools.
        prompt: the rendering of all messages but the last, an answer, if no other message is looked for.

    Raises:
        DataError: the template writes messages so that they cannot be told from its own text.
    """
    answers = {number for number, one in enumerate(messages) if one["role"] == "assistant"}
    every = set(range(len(messages)))
    ways: list[tuple[set[int], re.Pattern[str], bool]] = [(every, THINK_TAG, True), (answers, THINK_TAG, True)]
    if prompt is not None:
        ways = [({len(messages) - 1}, THINK_TAG, True)]
    # Templates may also look into texts for special tokens, leave an empty answer out, or write arguments as Python.
    ways += [(ways[-1][0], re.compile(f"(</?think>|{template.marker.pattern})"), fully) for fully in (True, False)]
    for chosen, tags, fully in ways:
        marked = _marked(template, messages, chosen, tags, text, fully=fully)
        if (places := _rendered_places(template, marked, tools, text, prompt)) is not None:
            break
    else:
        raise DataError(
            "the chat template rewrites what the messages say, so answers cannot be told from its own text; "
            "pass another template, e.g. --chat-template chatml"
        )
    if prompt is not None and not text.startswith(prompt) and places:
        written, header = places[0].before, template.header
        if not (header and prompt.endswith(header) and header in written[common_start(written, prompt) :]):
            # What the answer begins with can only be told from a rendering with marks in all messages.
            whole, last = find_messages(template, messages, tools, text), len(messages) - 1
            dropped = {last: whole.dropped[last]} if last in whole.dropped else {}
            return Found([span for span in whole.spans if span.message == last], dropped)
    found = {place.number for place in places}
    dropped: dict[int, set[str]] = {}
    for number, value in enumerate(marked.values):
        if number not in found and (value.value != "" or messages[value.message]["role"] == "assistant"):
            dropped.setdefault(value.message, set()).add(value.part)
    if prompt is None and chosen is answers:
        for number in missing(messages, text):
            dropped.setdefault(number, set()).add("text")
    return Found(list(_spans(template, marked, tools, places, prompt)), dropped)


def missing(messages: Sequence[Message], text: str) -> list[int]:
    """Numbers of messages of others than the model whose text is not in a rendering."""
    others = [(number, one["content"].strip()) for number, one in enumerate(messages) if one["role"] != "assistant"]
    return [
        number for number, content in others if not any(form in text for form in Value(number, "text", content).forms())
    ]


# Marks


def _marked(
    template: Template,
    messages: Sequence[Message],
    chosen: Iterable[int],
    tags: "re.Pattern[str]",
    text: str,
    *,
    fully: bool,
) -> _Marked:
    """The messages with marks in place of the values of those that are chosen.

    Args:
        template, messages, text: as in `find_messages`.
        chosen: their numbers.
        tags: what stays as it is inside of a text.
        fully: mark arguments, and answers that say nothing.
    """
    sign = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    base = next(digits for number in range(10**9) if (digits := str(9_137_000_000 + number)) not in text)
    values: list[Value] = []
    changed = list(messages)

    def mark(part: str, value: Json) -> Json:
        values.append(Value(number, part, value))
        name = f"{len(values) - 1:0{DIGITS}d}"
        return sign + name if isinstance(value, str) else int(base + name)

    def in_text(part: str, whole: str) -> str:
        """Words with marks; white space around them stays, since templates strip it."""
        thought = whole.rfind("</think>") if part == "text" and message["role"] == "assistant" else -1
        pieces, at = [], 0
        for piece in tags.split(whole):
            word = "" if tags.fullmatch(piece) else piece.strip()
            kind = "thinking" if at < thought else part
            pieces.append(piece.replace(word, mark(kind, word), 1) if word else piece)
            at += len(piece)
        return "".join(pieces)

    def in_arguments(value: Json) -> Json:
        if isinstance(value, Mapping):
            return {name: in_arguments(one) for name, one in value.items()}
        if isinstance(value, list):
            return [in_arguments(one) for one in value]
        if isinstance(value, str):
            return in_text("call", value)
        return value if value is None else mark("call", value)

    for number in sorted(chosen):
        message, before = messages[number], len(values)
        made = changed[number] = dict(message)
        if (key := template.reasoning_key) in message:
            made[key] = in_text("thinking", message[key])
        made["content"] = in_text("text", message["content"])
        if message.get("tool_calls"):
            made["tool_calls"] = calls = []
            for call in message["tool_calls"]:
                function = call["function"] | {"name": mark("call", call["function"]["name"])}
                if fully:
                    function["arguments"] = in_arguments(function["arguments"])
                calls.append(call | {"function": function})
        if fully and len(values) == before:
            made["content"] += mark("text", "")
    escaped = re.escape(json.dumps(sign)[1:-1])
    return _Marked(changed, values, sign, re.compile(rf"(?:{sign}|{escaped}|{base})(\d{{{DIGITS}}})"))


def _rendered_places(
    template: Template, marked: _Marked, tools: Tools, text: str, prompt: str | None
) -> list[Place] | None:
    """The values in the text, in its order; None if the rendering with marks is not that of the text.

    Messages that were written before with other values are not rendered again if the same pieces and the values are
    the text: where each of them stands is then known as well.
    """
    asked = prompt if prompt is not None and text.startswith(prompt) else ""
    shown = marked.messages if prompt is None else marked.messages[-1:]
    key = str([prompt is None, *([one.get(name) for name in (template.reasoning_key, *SHAPE)] for one in shown)])
    key = CALL_ID.sub("", key)
    if (known := template.shapes.get(key)) is not None:
        places = _places(text, [asked + known[0], *known[1:]], marked)
        if places is not None:
            return places
    try:
        pieces = marked.pattern.split(template.render(marked.messages, tools))
    except DataError:  # a template may refuse what it does not know
        return None
    places = _places(text, pieces, marked)
    if places is not None and (prompt is None or (asked and pieces[0].startswith(asked))):
        _keep(template.shapes, key, [pieces[0][len(asked) :], *pieces[1:]])
    return places


def _places(text: str, pieces: list[str], marked: _Marked) -> list[Place] | None:
    """The values between these pieces of the text; None if that is not the text.

    Args:
        text: the rendering of the messages as they are.
        pieces: what the template writes around marks; every second one is the number of a mark.
        marked: the messages with marks.
    """
    if not text.startswith(pieces[0]):
        return None
    found: list[Place] = []
    at, before = len(pieces[0]), pieces[0]
    for name, after in zip(pieces[1::2], pieces[2::2]):
        for form in marked.values[int(name)].forms():
            end = at + len(form)
            if text.startswith(form, at) and text.startswith(after, end):
                break
        else:
            return None
        found.append(Place(int(name), at, end, before, after))
        at, before = end + len(after), after
    return found if at == len(text) else None


# Answers


def _spans(
    template: Template, marked: _Marked, tools: Tools, places: list[Place], prompt: str | None
) -> Iterator[Span]:
    """The answers: runs of values of one answer, with what the template writes around them for it."""
    seen: set[int] = set()
    runs: list[list[int]] = []
    last = None  # the answer that the place before belongs to
    for at, place in enumerate(places):
        message = marked.values[place.number].message
        own = marked.messages[message]["role"] == "assistant"
        if own and message == last:
            runs[-1].append(at)
        elif own:
            runs.append([at])
        last = message if own else None
    for run in runs:
        # A template may repeat a value: it writes the name of a call with the call's result, too.
        new = [at for number, at in {places[at].number: at for at in run[::-1]}.items() if number not in seen]
        seen |= {places[at].number for at in new}
        if not new:
            continue
        first, end = places[min(new)], places[max(new)]
        message = marked.values[first.number].message
        before = places[min(new) - 1].number if min(new) else None
        opening = _opening(template, marked, tools, first, before, prompt)
        after = places[max(new) + 1].number if max(new) + 1 < len(places) else None
        yield Span(first.start - opening, end.end + _closing(template, marked, tools, end, after), message, end.end)


def _opening(
    template: Template, marked: _Marked, tools: Tools, first: Place, before: int | None, prompt: str | None
) -> int:
    """How many characters before its first value an answer has; `before` is the value in front of it."""
    written, value = first.before, marked.values[first.number]
    key = ("opening", value.part, before is None, written)
    if prompt is None and key in template.edges:
        return template.edges[key]
    asked, name = prompt, before
    if asked is None:
        with contextlib.suppress(DataError):  # many templates cannot render a conversation without messages
            whole = template.render(marked.messages[: value.message], tools, prompt=True)
            *_, name, asked = None, *marked.pattern.split(whole)
            name = None if name is None else int(name)
    if asked is not None and name == before:
        cut = len(asked)
        if not written.startswith(asked):
            # The template asks for an answer otherwise than it writes it: cut behind a space or a special token.
            cut = common_start(written, asked)
            ends = [one.end() for one in re.finditer(rf"{template.marker.pattern}|\s", written)]
            cut = max([0, *(end for end in (*ends, len(written)) if end <= cut)])
    else:
        cut = 0 if template.header and template.header in written else len(written)
    if (
        template.header and template.header in written[cut:]
    ):  # some write a header for an answer that they ask for without one
        cut = written.rindex(template.header) + len(template.header)
    if prompt is None:
        _keep(template.edges, key, len(written) - cut)
    return len(written) - cut


def _closing(template: Template, marked: _Marked, tools: Tools, last: Place, after: int | None) -> int:
    """How many characters behind its last value an answer has; `after` is the value that follows."""
    written, value = last.after, marked.values[last.number]
    key = ("closing", value.part, after is None, written)
    if key in template.edges:
        return template.edges[key]
    markers = list(template.marker.finditer(written))
    same = len(written)
    first = False
    ended = marked.messages[: value.message + 1]
    if after is not None:
        alone = _written_after(template, marked, ended, tools, last.number)
        first = alone is None  # some refuse a call without its result
        same = len(written) if alone is None else common_start(written, alone)
    end = next((one.end() for one in markers if one[0] == template.end_of_turn and one.end() <= same), None)
    if end is None and "tool_calls" in ended[-1]:
        results = _before_results(template, marked, ended, tools, last)
        same, markers = min(same, results), [one for one in markers if one.end() <= results]
    if end is None and (ends := [one.end() for one in markers if one.end() <= same]):
        end = ends[0 if first else -1]
    if end is None:
        # The next special token ends the turn where the template writes no end, or another one after the last answer.
        end = len(written[:same].rstrip())
        end = next((one.end() for one in markers if not written[end : one.start()].strip()), end)
    _keep(template.edges, key, end)
    return end


def _pieces(template: Template, marked: _Marked, messages: list[Message], tools: Tools) -> list[str]:
    """The texts between the marks of a rendering, and their numbers; empty if the template refuses the messages."""
    try:
        return marked.pattern.split(template.render(messages, tools))
    except DataError:
        return []


def _written_after(
    template: Template, marked: _Marked, messages: list[Message], tools: Tools, number: int
) -> str | None:
    """The text that follows a value in the rendering of these messages; None if it is not there."""
    pieces = _pieces(template, marked, messages, tools)
    return next((pieces[at + 1] for at in range(1, len(pieces), 2) if int(pieces[at]) == number), None)


def _before_results(template: Template, marked: _Marked, ended: list[Message], tools: Tools, last: Place) -> int:
    """How much of what follows the last value of a call does not begin the result of a tool.

    What also stands between two results begins a result, even if it is written without one.
    """
    written, call = last.after, ended[-1]["tool_calls"][-1]
    number = len(marked.values)
    result = {"role": "tool", "content": f"{marked.sign}{number:0{DIGITS}d}", "name": call["function"]["name"]}
    result |= {"tool_call_id": call["id"]} if "id" in call else {}
    pieces = _pieces(template, marked, [*ended, result, result], tools)
    results = [at for at in range(1, len(pieces), 2) if int(pieces[at]) == number]
    if len(results) < 2:
        return len(written)
    # Beside its content a result may have the name of the call, which has a mark, too.
    first = 2 * results[0] - results[-1] + 2
    if first < 1:
        return len(written)
    before, between = pieces[first - 1], pieces[results[0] + 1]
    begins = len(before) - common_start(before[::-1], between[::-1])
    inside = (one.end() for one in template.marker.finditer(before) if one.start() < begins < one.end())
    begins = next(inside, begins)
    if first > 1 and int(pieces[first - 2]) == last.number:
        return begins if written.startswith(before[:begins]) else len(written)
    # The template writes results in front of the last value. A result that is not there yet may begin behind it.
    starts = (at for at in range(len(written)) if before.startswith(written[at:], begins))
    return next(starts, len(written))


def _keep(known: dict[Any, Any], key: object, value: object) -> None:
    """Remember a value; all others are forgotten when there are too many."""
    if len(known) == KEPT:
        known.clear()
    known[key] = value


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    codes = (np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) for text in (one, other))
    return common_prefix(*codes)
