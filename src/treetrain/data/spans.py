"""Where in a rendered transcript the model spoke, for any chat template and without generation marks."""

import re
from collections.abc import Sequence
from typing import Any

from treetrain.data.messages import Message
from treetrain.data.rendering import Renderer
from treetrain.errors import DataError

Tools = list[dict[str, Any]] | None
Span = tuple[int, int]


def assistant_spans(renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
    """Characters [start, end) of every assistant message in `text`, the rendering of `messages`.

    A span is what the model would generate: the message's body, its think block and tool calls as the
    template writes them, and the end-of-turn token; not the header before it. It is found by rendering again
    with placeholders: what does not change is the template's, what does is the message's.

    Raises:
        DataError: the template leaves an assistant message out, or tangles it with its neighbours.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans = _spans_at_once(renderer, messages, tools, text, turns)
    if spans is None:
        spans = [_span_of(renderer, messages, tools, text, turn) for turn in turns]
    finished: list[Span] = []
    floor = 0
    for turn, (start, end) in zip(turns, spans):
        if start < floor or end < start:
            raise DataError(_lost(turn))
        start = _after_header(renderer, text, start, floor)
        end = end if renderer.last_marker_end(text[start:end]) == end - start else renderer.end_of_turn(text, end)
        finished.append((start, end))
        floor = end
    return finished


def completion_span(renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str) -> Span:
    """The span of the last message, an assistant's, in `text`, the rendering of `messages`."""
    start, end = _span_of(renderer, messages, tools, text, len(messages) - 1)
    start = _after_header(renderer, text, start, 0)
    closed = renderer.last_marker_end(text[start:])
    return start, renderer.end_of_turn(text, end) if closed is None else start + closed


def _spans_at_once(
    renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str, turns: list[int]
) -> list[Span] | None:
    """All spans from one rendering with a placeholder per turn; None where that might be wrong."""
    if any(renderer.has_marker(messages[turn]["content"]) for turn in turns):
        return None
    mark = _private_character(text)
    changed = list(messages)
    for number, turn in enumerate(turns):
        changed[turn] = {"role": "assistant", "content": f"{mark}{number}{mark}"}
    try:
        pieces = re.split(f"{mark}(\\d+){mark}", renderer.render(changed, tools))
    except DataError:
        return None
    between = pieces[::2]
    if pieces[1::2] != [str(number) for number in range(len(turns))]:
        return None
    if not all(between[1:-1]) or not (text.startswith(between[0]) and text.endswith(between[-1])):
        return None
    spans, start = [], len(between[0])
    for piece in between[1:-1]:
        end = text.find(piece, start)
        if end < 0:
            return None
        spans.append((start, end))
        start = end + len(piece)
    if turns:
        spans.append((start, len(text) - len(between[-1])))
    return spans if all(start <= end for start, end in spans) else None


def _span_of(renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str, turn: int) -> Span:
    span = _span_by_prefixes(renderer, messages, tools, text, turn)
    if span is None:
        span = _span_by_placeholder(renderer, messages, tools, text, turn)
    if span is None:
        raise DataError(_lost(turn))
    return span


def _span_by_prefixes(
    renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str, turn: int
) -> Span | None:
    """Between the prompt for this turn and the transcript that ends with it, if the text begins with both."""
    if turn == 0:
        return None
    try:
        before = renderer.render(messages[:turn], tools, prompt=True)
        after = renderer.render(messages[: turn + 1], tools)
    except DataError:
        return None
    if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
        return None
    closed = renderer.last_marker_end(after)
    return None if closed is None or closed < len(before) else (len(before), closed)


def _span_by_placeholder(
    renderer: Renderer, messages: Sequence[Message], tools: Tools, text: str, turn: int
) -> Span | None:
    mark = _private_character(text)
    changed = list(messages)
    changed[turn] = {"role": "assistant", "content": mark}
    try:
        before, found, after = renderer.render(changed, tools).partition(mark)
    except DataError:
        return None
    if not found or mark in after:
        return None
    start = _common_prefix(text, before)
    return start, len(text) - _common_prefix(text[start:][::-1], after[::-1])


def _after_header(renderer: Renderer, text: str, start: int, floor: int) -> int:
    """Back to the end of the turn's header, over what the template always writes between it and the body.

    Such a constant (an empty think block) is part of what the model is asked to generate.
    """
    header = renderer.header
    at = text.rfind(header, floor, start) if header else -1
    if at < 0 or renderer.has_marker(text, at + len(header), start):
        return start
    return at + len(header)


def _common_prefix(one: str, other: str) -> int:
    """Number of leading characters that are the same, by bisection: slices compare at memory speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _private_character(text: str) -> str:
    """A character of Unicode's private use area that the text does not have."""
    return next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)


def _lost(turn: int) -> str:
    return (
        f"message {turn} (assistant) cannot be found in what the chat template renders; "
        "pass another template, e.g. --chat-template chatml"
    )
