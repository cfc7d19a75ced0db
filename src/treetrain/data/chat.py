"""Conversations to trajectories: loss on the assistant's messages, one row per transcript or one per LLM call.

A chat template turns messages into text, and does not say which characters come from which message. So the text is
rendered again with placeholders for the assistant's messages: text that stays the same comes from the template, text
that changes comes from a message. The model is trained on what it generated: the body, with its think block and tool
calls as the template writes them, and the token that ends the turn. It is not trained on the header, on an empty think
block that the message does not have, or on the end of a turn that was cut off.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.killable import ChildError, Killable
from treetrain.data.log_images import PlacedImage, images_in, listed_images
from treetrain.data.messages import MESSAGE_KEYS, Message, PlaceImage, clean_messages, clean_tools, is_number
from treetrain.data.records import (
    NO_TOOLS,
    ROW_KEYS,
    Json,
    Notes,
    ReadSettings,
    Record,
    Tools,
    field,
    row_facts,
    unknown,
)
from treetrain.data.trajectory import Trajectory, common_prefix
from treetrain.errors import DataError, expect, quoted, shortened

if TYPE_CHECKING:
    from tokenizers import AddedToken

CHAT_KEYS = frozenset(("messages", "system", "tools", "functions", "parallel_tool_calls", "train", "trial", "model"))
CHAT_KEYS |= {"advantage", *ROW_KEYS}
TEXT_KEYS = frozenset(("prompt", "completion", "finish_reason", "advantage", "model", *ROW_KEYS))
IMAGE_KEYS = ("images", "image", "multi_modal_data")
"""Keys of the images that a record has beside its messages or token ids."""
CHAT_KEYS |= set(IMAGE_KEYS)
IMAGE_TEXT = "<image>"
"""Stands for an image in a conversation that is inspected."""
CHATML_END = "<|im_end|>"
ENDED = ("stop", "end_turn", "eos")
"""Finish reasons of texts that the model ended itself."""
CACHED_CHARACTERS = 1 << 24
"""Characters of text pieces whose tokens are cached; about 100 MB at most."""
RENDER_SECONDS = 10
"""A chat template that takes longer for one conversation is refused; it may loop without end."""
RENDER_BYTES = 1 << 30
"""A chat template that takes more memory for one conversation is refused."""
THINK = re.compile("<think>(.*?)</think>", re.DOTALL)
EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>\n*")
"""What templates write in place of thinking that a message does not have."""

Span = tuple[int, int]
# Token ids of a text, and the character offsets where each token starts and ends.
Encoded = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """A row that is rendered and not tokenised yet."""

    texts: tuple[str, ...]
    """Tokenised each by itself, and joined."""
    spans: list[Span]
    """Characters [start, end) of the joined texts that are trained."""
    messages: list[Message]
    """The message of each span, with its `weight` and `advantage`."""
    facts: dict[str, Json]
    """Facts of the whole row, as arguments of `Trajectory`."""
    add_bos: bool = False
    """Whether the tokens that the tokenizer puts before every text come first."""

    def __len__(self) -> int:
        return sum(map(len, self.texts))


class ChatReader:
    """Reads conversations (`messages`), and texts that need no template (`prompt` and `completion`).

    A conversation may have `system` and `tools` and the facts of the row. A message's `weight` multiplies its loss, as
    in OpenAI's fine-tuning files; `train: false` is weight 0; `advantage` and, in the calls view, `reward` are the
    message's own. In the "transcript" view the whole conversation is one row. In the "calls" view every assistant
    message is one row: its prompt is rendered from the messages before it, and its completion is tokenised separately,
    as RL loggers write them. The rows' `episode` is the conversation, and their ids end in `/0`, `/1`, ... With `train:
    "last"`, the record's or the setting, the last assistant message is the only call.

    Raises:
        DataError: there is no tokenizer.
    """

    def __init__(self, settings: ReadSettings) -> None:
        if settings.tokenizer is None:
            raise DataError("conversations need a tokenizer; pass --model or --tokenizer")
        self.settings = settings
        self.renderer = Renderer(settings.tokenizer, settings.chat_template)

    def __call__(self, record: Record, notes: Notes) -> list[Trajectory]:
        """The trajectories of one record. Raises DataError without the place."""
        return [self.renderer.tokenised(row) for row in self.rows(record, notes)]

    def rows(self, record: Record, notes: Notes) -> list[ChatRow]:
        """The rows of one record as text. Raises DataError without the place."""
        settings, renderer, facts = self.settings, self.renderer, row_facts(record, notes)
        if "messages" not in record:
            notes.unused_keys(unknown(record, TEXT_KEYS))
            return [_text_row(renderer, record, notes, facts)]
        notes.unused_keys(unknown(record, CHAT_KEYS))
        keys: list[str] = []
        placed: list[PlacedImage] = []
        listed = [] if settings.image_reader is None else listed_images(record)
        messages = clean_messages(record["messages"], notes, self._place_image(keys, placed, listed))
        if listed:  # as TRL does where messages do not say where images stand
            messages = self._placed_first(messages, placed, listed)
        if images_in(messages, placed) != len(placed):
            raise DataError("messages have images at places that are not known; prepare the rows yourself")
        messages = [*_system(record, messages), *messages]
        messages = [_with_advantage(one, record) if one["role"] == "assistant" else one for one in messages]
        if keys:
            facts["key"] = " ".join(str(one) for one in (facts["key"], *keys) if one is not None)
            notes.add("images are not part of the rows; rows with different images are kept apart, to inspect them")
        own = clean_tools(record.get("tools") or record.get("functions"))
        tools = None if settings.tools == NO_TOOLS else own or settings.tools
        renderer.check_tools(messages, tools)
        if not tools and settings.tools != NO_TOOLS and any("tool_calls" in message for message in messages):
            notes.add(
                "tools are called but no tool schemas are given, so the prompt lacks them (--tools FILE adds them)"
            )
        for message in messages:
            # The template may read other keys, too.
            others = (name for name in unknown(message, MESSAGE_KEYS) if name not in renderer.source)
            notes.unused_keys(others, "message keys")
        begins = next((message for message in messages if message["role"] != "system"), {})
        if begins.get("role") == "assistant" and begins.get("weight", 1) and len(messages) > 1:
            notes.add(
                "a conversation begins with an assistant message, which is trained; where no model wrote it, give it "
                "`weight: 0`"
            )
        if not any(message["role"] == "assistant" for message in messages):
            notes.add("no assistant message, so nothing to train")
        if record.get("id") is None and facts["group"] is not None and record.get("trial") is not None:
            facts["id"] = f"{facts['group']}/{record['trial']}"
        train = record.get("train")
        if train not in (None, "all", "last"):
            raise DataError(f"`train` is {quoted(train)}, expected 'all' or 'last'")
        only_last = (train or settings.train) == "last"
        if settings.view == "transcript" and not only_last:
            return [_transcript(renderer, messages, tools, notes, facts | self._images(placed))]
        rows = _calls(renderer, messages, tools, notes, facts, only_last)
        if not placed:
            return rows
        # Every call has the images of the messages before its answer.
        places = {id(message): place for place, message in enumerate(messages)}
        numbers = (images_in(messages[: places[id(row.messages[0])]], placed) for row in rows)
        return [
            dataclasses.replace(row, facts=row.facts | self._images(placed[:number]))
            for row, number in zip(rows, numbers)
        ]

    def _place_image(self, keys: list[str], placed: list[PlacedImage], listed: list[object]) -> PlaceImage | None:
        """Return what to call for the text in place of an image; it adds a digest to `keys` or an image to `placed`."""

        def key(part: object, _here: str) -> str:
            keys.append(hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16])
            return IMAGE_TEXT

        def place(part: object, here: str) -> str:
            assert reader is not None
            placed.append(reader.place(part, listed, self.renderer, here))
            return placed[-1].text

        reader = self.settings.image_reader
        return key if self.settings.images == "key" else None if reader is None else place

    def _placed_first(self, messages: list[Message], placed: list[PlacedImage], listed: list[object]) -> list[Message]:
        """The messages with the listed images at the beginning of the first one of the user."""
        reader = self.settings.image_reader
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if placed or first is None or reader is None:
            places = f"places for {len(placed)} of them" if placed else "no message of a user for them"
            raise DataError(f"the record lists {len(placed) + len(listed)} images, and its messages have {places}")
        placed += [reader.prepare(one, self.renderer, f"image {number}") for number, one in enumerate(listed)]
        text = "".join(one.text for one in placed) + messages[first]["content"]
        return [*messages[:first], messages[first] | {"content": text}, *messages[first + 1 :]]

    def _images(self, placed: Sequence[PlacedImage]) -> dict[str, object]:
        """The images as arguments of `Trajectory`."""
        reader = self.settings.image_reader
        if not placed or reader is None:
            return {}
        return {"images": tuple(tile for one in placed for tile in one.tiles), "image_token": reader.token}


def _system(record: Record, messages: list[Message]) -> list[Message]:
    """The system prompt that a record has beside its messages."""
    if not record.get("system"):
        return []
    if any(message["role"] == "system" for message in messages):
        raise DataError("the record has `system` and a system message; a template renders one: keep one of them")
    return clean_messages([{"role": "system", "content": record["system"]}], Notes())


def _text_row(renderer: "Renderer", record: Record, notes: Notes, facts: dict[str, Json]) -> ChatRow:
    """Prompt and completion as plain text, tokenised as one; the completion is trained.

    The EOS token is added only where `finish_reason` says that the model ended the text ("stop"): a log without special
    tokens does not show whether it was sampled.
    """
    prompt, completion = field(record, "prompt", str), field(record, "completion", str)
    if renderer.last_marker_end(completion) is None:
        if record.get("finish_reason") in ENDED:
            completion += getattr(renderer.tokenizer, "eos_token", None) or ""
        elif record.get("finish_reason") is None:
            notes.add(
                "the completion ends without an end-of-text token, and none is added or trained; write it in the text, "
                'or `"finish_reason": "stop"` where the model ended by itself'
            )
    text = prompt + completion
    spans = [(len(prompt), len(text))]
    return renderer.row(text, spans, [_with_advantage({}, record)], facts, add_bos=True)


def _with_advantage(message: Message, record: Record) -> Message:
    """The message with the advantage of its record, if it has none of its own."""
    advantage = record.get("advantage")
    if advantage is None or "advantage" in message:
        return message
    if not is_number(advantage):
        raise DataError(f"`advantage` is {quoted(advantage)}, expected a finite number")
    return message | {"advantage": advantage}


def _transcript(
    renderer: "Renderer", messages: list[Message], tools: Tools, notes: Notes, facts: dict[str, Json]
) -> ChatRow:
    text = renderer.render(messages, tools)
    _note_dropped(messages, text, notes)
    spans = assistant_spans(renderer, messages, tools, text)
    turns = _turns(messages)
    answers = [messages[turn] for turn in turns]
    some = any("advantage" in message for message in answers)
    for turn, message in zip(turns, answers):
        _note_thinking(message, text, f"message {turn}", notes)
        if "reward" in message:
            raise DataError(
                f"message {turn} has a reward, but a transcript is one row with one reward; read every call as a row "
                "(--view calls), or give `advantage`"
            )
        if some and "advantage" not in message and message.get("weight", 1.0):
            raise DataError(f"message {turn} has no `advantage` and other assistant messages have one; give all one")
    return renderer.row(text, _sampled(renderer, text, spans, answers, notes), answers, facts)


def _sampled(renderer: "Renderer", text: str, spans: list[Span], answers: list[Message], notes: Notes) -> list[Span]:
    """The spans without what the template wrote and the model did not: an empty think block, the end of a cut turn."""
    sampled = []
    for (start, end), answer in zip(spans, answers):
        thought = answer.get("reasoning_content") or "</think>" in answer["content"]
        if not thought and (empty := EMPTY_THINK.match(text, start, end)):
            notes.add("the template writes an empty think block that the log does not have; it is not trained")
            start = empty.end()
        if answer.get("cut"):
            notes.add("an answer was cut off, so the end of its turn is not trained")
            end = start + renderer.closing_start(text[start:end])
        sampled.append((start, end))
    return sampled


def _calls(
    renderer: "Renderer", messages: list[Message], tools: Tools, notes: Notes, facts: dict[str, Json], only_last: bool
) -> list[ChatRow]:
    calls: list[ChatRow] = []
    turns, last = _turns(messages), 0
    episode = notes.place if facts["episode"] is None else facts["episode"]
    for number, turn in enumerate(turns[-1:] if only_last else turns):
        if messages[turn].get("weight") == 0 and not only_last:
            notes.add("an assistant message that is not trained is no call", f"message {turn}")
            continue
        answer = messages[turn]
        texts = _call_texts(renderer, messages[: turn + 1], tools, notes)
        _note_thinking(answer, texts[1], f"message {turn}", notes)
        own = {} if only_last else {"episode": episode, "id": f"{facts['id']}/{number}"}
        if "reward" in answer:  # a call with a reward of its own is an episode by itself
            own |= {"reward": answer["reward"], "episode": None}
        whole = "".join(texts)
        spans = _sampled(renderer, whole, [(len(texts[0]), len(whole))], [answer], notes)
        calls.append(ChatRow(texts=texts, spans=spans, messages=[answer], facts=facts | own))
        last = turn
    if calls:
        _note_dropped(messages[: last + 1], "".join(calls[-1].texts), notes)
        if turns[-1] + 1 < len(messages):
            notes.add("messages after the last assistant message are in no call")
    return calls


def _turns(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _call_texts(renderer: "Renderer", messages: list[Message], tools: Tools, notes: Notes) -> tuple[str, str]:
    """Prompt and completion of the call that the last message answers."""
    whole = renderer.render(messages, tools)
    if len(messages) == 1:  # no prompt: many templates cannot render an empty conversation
        start, end = _completion_span(renderer, messages, tools, whole)
        return whole[:start], whole[start:end]
    prompt = renderer.render(messages[:-1], tools, prompt=True)
    begins = whole.startswith(prompt)
    if begins and (closed := renderer.last_marker_end(whole)) is not None and closed >= len(prompt):
        return prompt, whole[len(prompt) : closed]
    if not begins:
        notes.add("the template writes a call's prompt differently once it is answered", f"message {len(messages) - 1}")
    start, end = _completion_span(renderer, messages, tools, whole)
    return prompt, whole[max(start, len(prompt)) if begins else start : end]


def _note_dropped(messages: list[Message], text: str, notes: Notes) -> None:
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"].strip()[:60] not in text:
            what = f"a {message['role']} message does not appear in the rendered text as it is"
            notes.add(f"{what}: the template drops or rewrites it", f"message {index}")


def _note_thinking(message: Message, text: str, where: str, notes: Notes) -> None:
    thought = message.get("reasoning_content") or "".join(THINK.findall(message["content"])[:1])
    if thought.strip()[:60] not in text:
        notes.add("the template drops the thinking of an assistant message, so it is not trained", where)


# Spans of assistant messages


def assistant_spans(renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
    """Characters [start, end) of every assistant message in `text`, the rendering of `messages`.

    Raises:
        DataError: the template drops an assistant message, or mixes it with its neighbours.
    """
    turns, spans = _turns(messages), None
    if not any(renderer.has_marker(messages[turn]["content"]) for turn in turns):
        spans = _spans_by_placeholders(renderer, messages, tools, text, turns)
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


def _completion_span(renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str) -> Span:
    """The span of the last message (the assistant's) in `text`, the rendering of `messages`."""
    start, end = _marked_span(renderer, messages, tools, text, len(messages) - 1)
    start = _after_header(renderer, text, start, 0)
    closed = renderer.last_marker_end(text[start:])
    return start, renderer.end_of_turn(text, end) if closed is None else start + closed


def _spans_by_placeholders(
    renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str, turns: list[int]
) -> list[Span] | None:
    """All spans from one more rendering; None where that might be wrong.

    The bodies B and C of two turns are replaced by marks. The text between the marks is then located in `text`:

        text      <user> a <bot> B <end> <user> b <bot> C <end>
        rendered  <user> a <bot> * <end> <user> b <bot> * <end>
    """
    mark = _private_character(text)
    changed = list(messages)
    for number, turn in enumerate(turns):
        changed[turn] = {"role": "assistant", "content": f"{mark}{number}{mark}"}
    try:
        pieces = re.split(f"{mark}(\\d+){mark}", renderer.render(changed, tools))
    except DataError:
        return None
    between = pieces[::2]
    if pieces[1::2] != [str(number) for number in range(len(turns))] or not all(between[1:-1]):
        return None
    if not (text.startswith(between[0]) and text.endswith(between[-1])):
        return None
    spans, start = [], len(between[0])
    for piece in between[1:-1]:
        if (found := text.find(piece, start)) < 0:
            return None
        spans.append((start, found))
        start = found + len(piece)
    spans += [(start, len(text) - len(between[-1]))] if turns else []
    return spans if all(start <= end for start, end in spans) else None


def _span_of(renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str, turn: int) -> Span:
    """The span of one turn, for templates that write other messages differently because of it."""
    # The span lies between the prompt for this turn and the transcript up to it, if the text begins with both.
    if turn > 0:
        try:
            before = renderer.render(messages[:turn], tools, prompt=True)
            after = renderer.render(messages[: turn + 1], tools)
        except DataError:
            before = after = ""
        closed = renderer.last_marker_end(after)
        if before and text.startswith(before) and text.startswith(after) and (closed or 0) >= len(before):
            return len(before), closed or 0
    return _marked_span(renderer, messages, tools, text, turn)


def _marked_span(renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str, turn: int) -> Span:
    """The span of one turn: what changes where a mark stands in its place."""
    mark = _private_character(text)
    changed = list(messages)
    changed[turn] = {"role": "assistant", "content": mark}
    try:
        before, found, after = renderer.render(changed, tools).partition(mark)
    except DataError:
        before = found = after = ""
    if not found or mark in after:
        raise DataError(_lost(turn))
    start = _common_start(text, before)
    return start, len(text) - _common_start(text[start:][::-1], after[::-1])


def _after_header(renderer: "Renderer", text: str, start: int, floor: int) -> int:
    """Move `start` back to the end of the turn's header.

    The model also generates constant text that the template writes after the header (an empty think block).
    """
    header = renderer.header
    at = text.rfind(header, floor, start) if header else -1
    if at < 0 or renderer.has_marker(text, at + len(header), start):
        return start
    return at + len(header)


def _common_start(one: str, other: str) -> int:
    codes = (np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) for text in (one, other))
    return common_prefix(*codes)


def _private_character(text: str) -> str:
    """A character of Unicode's private use area that the text does not have."""
    return next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)


def _lost(turn: int) -> str:
    return (
        f"message {turn} (assistant) cannot be found in what the chat template renders; "
        "pass another template, e.g. --chat-template chatml"
    )


# Templates and tokenizers


def chat_template_text(template: str | None) -> str | None:
    """The text of a template given as text, as a file, or as `chatml` (built in, prefix-preserving)."""
    if template is None or "{" in template:
        return template
    if template == "chatml":
        return resources.files("treetrain.data").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"chat template {template!r} is no template text, no readable file and not the built-in 'chatml'"
        ) from error


_RENDERING: weakref.WeakKeyDictionary[Any, tuple[object, Killable[str]]] = weakref.WeakKeyDictionary()
"""Tokenizer -> what its templates read of it, and the process that renders them."""


def _rendering(tokenizer: Any) -> Killable[str]:
    """The process that renders templates with this tokenizer as it is now."""
    state = repr((getattr(tokenizer, "chat_template", None), getattr(tokenizer, "special_tokens_map", None)))
    before, process = _RENDERING.get(tokenizer, (None, None))
    if process is None or before != state or not type(tokenizer).__module__.startswith("transformers."):
        process = Killable(partial(_apply_template, weakref.ref(tokenizer)), RENDER_BYTES)
        _RENDERING[tokenizer] = state, process
    return process


def _apply_template(tokenizer: "weakref.ref[Any]", messages: list[Message], tools: Tools, options: Json) -> str:
    owner: Any = tokenizer()
    return owner.apply_chat_template(messages, tools=tools, **options)


class Renderer:
    """One tokenizer with one chat template: messages to text, and text to token ids.

    Args:
        tokenizer: a transformers tokenizer; `apply_chat_template`, `__call__` and its added tokens are used.
        chat_template: overrides the tokenizer's own; text, file or `chatml`.
    """

    def __init__(self, tokenizer: object, chat_template: str | None = None) -> None:
        if type(tokenizer) is str:
            expect("tokenizer", tokenizer, (), f"the tokenizer itself: tt.load_tokenizer({tokenizer!r})")
        self.tokenizer: Any = tokenizer
        self.is_fast = bool(getattr(tokenizer, "is_fast", False))
        self.template = chat_template_text(chat_template)
        self.source = str(self.template or getattr(tokenizer, "chat_template", None) or "")
        self._render = _rendering(tokenizer)
        self._renders_tools = False
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        markers = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        if CHATML_END in self.source:
            markers.add(CHATML_END)  # ends a turn even if the vocabulary has no single token for it
        self._endings = tuple(markers - {""})
        self._marker = re.compile(_alternatives(markers) or "(?!)")
        self._end_of_turn = re.compile(rf"\s*(?:{self._marker.pattern})")
        self._cache: dict[str, Encoded] = {}
        self._cached = 0
        self._pieces = self._piece_pattern(added)
        self.header = self._find_header()
        """The text that the template puts before every answer; empty if it cannot be determined."""

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """Render messages; `prompt` adds the generation prompt. Raises DataError where the template raises."""
        if not self.source:
            raise DataError("the tokenizer has no chat template; pass one, e.g. --chat-template chatml")
        options = {"chat_template": self.template, "add_generation_prompt": prompt, "tokenize": False}
        other = "pass another template, e.g. --chat-template chatml"
        try:
            return self._render(RENDER_SECONDS, list(messages), tools, options)
        except (TimeoutError, MemoryError) as error:
            most = f"{RENDER_SECONDS} s" if isinstance(error, TimeoutError) else f"{RENDER_BYTES:,} bytes"
            raise DataError(
                f"the chat template takes more than {most} for {len(messages)} messages; {other}"
            ) from error
        except ChildError as error:  # a template is third-party code: it may raise anything
            raise DataError(
                f"the chat template refuses these messages ({shortened(error)}); change the messages or {other}"
            ) from error

    def check_tools(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise DataError if the template renders these messages without the tools."""
        if not tools or self._renders_tools:
            return
        if self.render(messages, tools) == self.render(messages, None):
            raise DataError(
                "the chat template does not render `tools`; pass one that does, e.g. --chat-template chatml, or leave "
                "the tools out (--tools none)"
            )
        self._renders_tools = True

    def _find_header(self) -> str:
        question: list[Message] = [{"role": "user", "content": "a"}]
        try:
            bare, prompted = self.render(question, None), self.render(question, None, prompt=True)
        except DataError:
            return ""
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    def end_of_turn(self, text: str, start: int) -> int:
        """End of the special token at `start`, white space before it skipped; `start` if there is none."""
        found = self._end_of_turn.match(text, start)
        return found.end() if found else start

    def last_marker_end(self, text: str) -> int | None:
        """End of the special token that ends the text, trailing white space ignored; None if there is none."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._endings) else None

    def closing_start(self, text: str) -> int:
        """Start of the special token that ends the text; the length of the text if there is none."""
        stripped = text.rstrip()
        ending = max((one for one in self._endings if stripped.endswith(one)), key=len, default="")
        return len(stripped) - len(ending) if ending else len(text)

    def has_marker(self, text: str, start: int = 0, end: int | None = None) -> bool:
        """Whether a special token is spelled out in text[start:end]."""
        return self._marker.search(text[start:end]) is not None

    def row(
        self, text: str, spans: list[Span], messages: list[Message], facts: dict[str, Json], *, add_bos: bool = False
    ) -> ChatRow:
        """A row of one text. A slow tokenizer gives no character offsets, so each span is tokenised by itself."""
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        texts = (text,) if self.is_fast else tuple(text[start:end] for start, end in pairwise(edges))
        return ChatRow(texts=texts, spans=spans, messages=messages, facts=facts, add_bos=add_bos)

    def tokenised(self, row: ChatRow) -> Trajectory:
        """The trajectory of a row. Raises DataError if the tokenizer cannot read the text."""
        bos = self._bos() if row.add_bos else np.zeros(0, np.int32)
        ids, number, at = [bos], [np.full(bos.size, -1)], 0
        for text in row.texts:
            own, starts, ends = self.encode(text)
            of_span = np.full(own.size, -1)
            for index, (start, end) in enumerate(row.spans):
                whole = start <= at and at + len(text) <= end
                # A token with any character of the span is trained: half a token cannot be predicted.
                of_span[whole | ((ends + at > start) & (starts + at < end))] = index
            ids.append(own)
            number.append(of_span)
            at += len(text)
        given = [[message.get("weight", 1.0) for message in row.messages]]
        if any("advantage" in message for message in row.messages):
            given.append([message.get("advantage", 0.0) for message in row.messages])
        # The last entry is that of tokens in no span.
        facts = [np.array([*values, 0.0], np.float64)[np.concatenate(number)] for values in given]
        return Trajectory(np.concatenate(ids), **row.facts, **dict(zip(("loss_weights", "advantages"), facts)))

    def _bos(self) -> NDArray[np.int32]:
        """The tokens that the tokenizer puts before every text."""
        whole = self.tokenizer("a", verbose=False)["input_ids"]
        return np.array(whole[: whole.index(int(self.encode("a")[0][0]))], np.int32)

    def encode(self, text: str) -> Encoded:
        """Token ids of a text without added special tokens, and the characters [start, end) of each token."""
        parts, at = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))], 0
        for piece in self._split(text):
            if piece not in self._cache:
                self._encode([piece])
            ids, starts, ends = self._cache[piece]
            parts.append((ids, starts + at, ends + at))
            at += len(piece)
        ids, starts, ends = zip(*parts)
        return np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)

    def encode_ahead(self, rows: Iterable[ChatRow]) -> None:
        """Tokenise what is new in many rows in one call, which fast tokenizers run in parallel."""
        pieces = dict.fromkeys(piece for row in rows for text in row.texts for piece in self._split(text))
        with contextlib.suppress(DataError):  # it is raised again where its row is tokenised
            self._encode([piece for piece in pieces if piece not in self._cache])

    def _split(self, text: str) -> list[str]:
        return [text] if self._pieces is None else [piece for piece in self._pieces.split(text) if piece]

    def _encode(self, pieces: list[str]) -> None:
        if not pieces:
            return
        try:
            # `verbose=False`: the tokenizer would warn about a piece's length; `load` checks whole rows.
            output = self.tokenizer(
                pieces, add_special_tokens=False, return_offsets_mapping=self.is_fast, verbose=False
            )
        except (TypeError, UnicodeEncodeError) as error:
            lone = re.search("[\ud800-\udfff]", pieces[0])
            what = f"the lone surrogate {lone[0]!r}" if lone else quoted(pieces[0])
            raise DataError(f"the rendered text holds {what}, which the tokenizer cannot read; take it out") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, as where its regular expression gives up
                raise
            said = shortened(error)
            raise DataError(f"the tokenizer fails with the rendered text {quoted(pieces[0])} ({said})") from error
        self._cached += sum(map(len, pieces))
        if self._cached > CACHED_CHARACTERS:
            # Files may be larger than memory; shared pieces are cached again with the next rows.
            self._cache.clear()
            self._cached = sum(map(len, pieces))
        for number, piece in enumerate(pieces):
            ids = np.array(output["input_ids"][number], np.int32)
            offsets = output["offset_mapping"][number] if self.is_fast else [(0, len(piece))] * len(ids)
            starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
            self._cache[piece] = ids, starts, ends

    def _piece_pattern(self, added: "list[AddedToken]") -> "re.Pattern[str] | None":
        """A pattern to split a text into pieces that tokenise separately to the same tokens; None if there is none."""
        plain = {str(t) for t in added if not (t.lstrip or t.rstrip or t.single_word or t.normalized)}
        odd = any(t.lstrip or t.rstrip or t.single_word for t in added)
        if odd or not plain or not self.is_fast:
            return None
        pattern = re.compile("(" + _alternatives(plain) + ")")
        # Some tokenizers mark the start of a text (a dummy space), and so of every piece: test for it.
        word = max(plain, key=len)
        for probe in (f"a b{word}a{word} c {word}\n\nd{word}{word} ", f" a{word}\n", f"{word}a"):
            self._encode([probe, *filter(None, pattern.split(probe))])
            joined = [i for piece in pattern.split(probe) if piece for i in self._cache[piece][0].tolist()]
            if joined != self._cache[probe][0].tolist():
                return None
        return pattern


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
