"""Conversations to trajectories: loss on the assistant's messages, one row per transcript or one per LLM call.

A chat template turns messages into text, and does not say which characters come from which message. So the text is
rendered again with placeholders for the assistant's messages: text that stays the same comes from the template, text
that changes comes from a message. The model is trained on what it would generate: the body, with the think block and
tool calls that the template writes, and the token that ends the turn, but not the header before them.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.records import Format, Notes, Reader, ReadSettings, Record, Tools
from treetrain.data.token_rows import EPISODE_KEYS, GROUP_KEYS, first_of
from treetrain.data.trajectory import Trajectory, common_prefix
from treetrain.errors import DataError, quoted, shortened

CHAT_KEYS = frozenset(("messages", "tools", "reward", "id", "trial", "key", *GROUP_KEYS, *EPISODE_KEYS))
ROLES = ("system", "user", "assistant", "tool")
# Older and newer names of the same roles. Templates know only the four above and skip others silently.
ROLE_ALIASES = {"developer": "system", "function": "tool"}
CHATML_END = "<|im_end|>"
CACHED_CHARACTERS = 1 << 24
"""Characters of text pieces whose tokens are cached; about 100 MB at most."""

Message = dict[str, Any]
Span = tuple[int, int]
# Token ids of a text, and the character offsets where each token starts and ends.
Encoded = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def chat_reader(settings: ReadSettings) -> Reader:
    """The reader of conversations.

    A record has `messages`; optional `tools`, `reward`, `group_id`/`group`/`task_id`, `id`, `trial`, `episode`. A
    message's `weight` multiplies its loss, as in OpenAI's fine-tuning files. In the "transcript" view the whole
    conversation is one row. In the "calls" view every assistant message is one row: its prompt is rendered from the
    messages before it, and its completion is tokenised separately, as RL loggers write them. The rows' `episode` is
    the conversation, and their ids end in `/0`, `/1`, ...

    Raises:
        DataError: no tokenizer, or one without a chat template where none is given.
    """
    if settings.tokenizer is None:
        raise DataError("conversations need a tokenizer; pass --model or --tokenizer")
    renderer = Renderer(settings.tokenizer, settings.chat_template)

    def read(record: Record, notes: Notes) -> list[Trajectory]:
        notes.unused_keys(record, CHAT_KEYS)
        messages = clean_messages(record.get("messages"), notes)
        tools = clean_tools(record.get("tools")) or settings.tools
        if not any(message["role"] == "assistant" for message in messages):
            notes.add("no assistant message, so nothing to train")
        group, episode = first_of(record, GROUP_KEYS), first_of(record, EPISODE_KEYS)
        facts: dict[str, Any] = {"reward": record.get("reward"), "group": group, "key": record.get("key")}
        name: Any = record.get("id")
        if name is None:
            name = notes.place if group is None or record.get("trial") is None else f"{group}/{record['trial']}"
        if settings.view == "transcript":
            return [_transcript(renderer, messages, tools, notes).replace(**facts, id=name, episode=episode)]
        facts["episode"] = notes.place if episode is None else episode
        calls = _calls(renderer, messages, tools, notes)
        return [call.replace(**facts, id=f"{name}/{number}") for number, call in enumerate(calls)]

    return read


CHAT = Format("chat", "`messages`", lambda record: "messages" in record, chat_reader)


def _transcript(renderer: "Renderer", messages: list[Message], tools: Tools, notes: Notes) -> Trajectory:
    text = renderer.render(messages, tools)
    _note_dropped(messages, text, notes)
    spans = assistant_spans(renderer, messages, tools, text)
    weights = [float(message.get("weight", 1.0)) for message in messages if message["role"] == "assistant"]
    if renderer.is_fast:
        ids, starts, ends = renderer.encode(text)
        loss_weights = np.zeros(ids.size)
        for (start, end), weight in zip(spans, weights):
            # A token with any character of the span is trained: half a token cannot be predicted.
            loss_weights[(ends > start) & (starts < end)] = weight
        return Trajectory(ids, loss_weights=loss_weights)
    # A slow tokenizer gives no character offsets, so each span is tokenised separately.
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [renderer.encode_ids(text[start:end]) for start, end in pairwise(edges)]
    weight_of = [0.0, *(each for weight in weights for each in (weight, 0.0))]
    return Trajectory(np.concatenate(pieces), loss_weights=np.repeat(weight_of, [piece.size for piece in pieces]))


def _calls(renderer: "Renderer", messages: list[Message], tools: Tools, notes: Notes) -> list[Trajectory]:
    calls: list[Trajectory] = []
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = completion = ""
    for turn in turns:
        prompt, completion = _call_texts(renderer, messages[: turn + 1], tools, notes)
        prompt_ids, completion_ids = renderer.encode_ids(prompt), renderer.encode_ids(completion)
        weights = np.zeros(prompt_ids.size + completion_ids.size)
        weights[prompt_ids.size :] = float(messages[turn].get("weight", 1.0))
        calls.append(Trajectory(np.concatenate([prompt_ids, completion_ids]), loss_weights=weights))
    if turns:
        _note_dropped(messages[: turns[-1] + 1], prompt + completion, notes)
        if turns[-1] + 1 < len(messages):
            notes.add("messages after the last assistant message are in no call")
    return calls


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


# Spans of assistant messages


def assistant_spans(renderer: "Renderer", messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
    """Characters [start, end) of every assistant message in `text`, the rendering of `messages`.

    Raises:
        DataError: the template drops an assistant message, or mixes it with its neighbours.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans = None
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
    start, end = _span_of(renderer, messages, tools, text, len(messages) - 1)
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
    edges, start = [len(between[0])], len(between[0])
    for piece in between[1:-1]:
        found = text.find(piece, start)
        if found < 0:
            return None
        start = found + len(piece)
        edges += [found, start]
    edges.append(len(text) - len(between[-1]))
    spans = list(zip(edges[::2], edges[1::2])) if turns else []
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
    # Otherwise render with a mark in its place, and strip the common prefix and suffix from the text.
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
    """Number of leading characters that are the same."""
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


# Normalised messages


def clean_messages(messages: Any, notes: Notes) -> list[Message]:
    """Normalise messages for templates: text content, tool-call arguments as objects, no null fields.

    Raises:
        DataError: an unknown role, content that is not text, bad tool calls; the message names the index.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"`messages` is {quoted(messages)}, expected a list with at least one message")
    return [_clean(message, f"message {index}", notes) for index, message in enumerate(messages)]


def _clean(message: Any, where: str, notes: Notes) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {quoted(message)}, expected an object with `role` and `content`")
    role = message.get("role")
    if not isinstance(role, str) or role not in (*ROLES, *ROLE_ALIASES):
        known = ", ".join((*ROLES, *ROLE_ALIASES))
        raise DataError(f"{where} has the unknown role {quoted(role)} (known: {known}); rename it or take the row out")
    if role in ROLE_ALIASES:
        notes.add(f"role {role!r} is read as {ROLE_ALIASES[role]!r}", where)
    cleaned = {name: value for name, value in message.items() if value is not None}
    cleaned["role"] = ROLE_ALIASES.get(role, role)
    cleaned["content"] = _text(message.get("content"), where)
    calls = _tool_calls(message, where)
    for name in ("tool_calls", "function_call"):
        cleaned.pop(name, None)
    if calls:
        cleaned["tool_calls"] = calls
    weight = cleaned.get("weight", 1.0)
    try:
        fits = isinstance(weight, int | float) and math.isfinite(weight)
    except OverflowError:
        fits = False
    if not fits:
        raise DataError(f"{where} has the weight {quoted(weight)}, expected a finite number (0 leaves the message out)")
    return cleaned


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where} has the content {quoted(content)}, expected text, null or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(
                f"{where}: content part {number} is of type {quoted(kind)}; only text parts can be trained on"
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(message: Record, where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DataError(f"{where}: `tool_calls` is {quoted(calls)}, expected a list")
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    cleaned = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: tool call {number} is {quoted(call)}, expected `function` with a `name`")
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        cleaned.append({"type": "function", **call, "function": function} if "function" in call else function)
    return cleaned


def _arguments(arguments: Any) -> Any:
    """Parse a string that holds a JSON object, since templates iterate over it; other values stay."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def clean_tools(tools: Any) -> Tools:
    """Tool schemas as a list of objects, also from a JSON string; None and [] mean no tools."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`tools` is a string but no JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"`tools` is {quoted(tools)}, expected a list of JSON schemas")
    return [dict(tool) for tool in tools]


def read_tools(path: str | Path) -> Tools:
    """Read tool schemas from a JSON file that holds a list."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the tools file cannot be read ({error})") from error
    if not text.strip():
        raise DataError(f"{path}: the tools file is empty; expected a JSON list of tool schemas")
    try:
        return clean_tools(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


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


def tokenizer_settings(tokenizer: Any, chat_template: str | None) -> list[Any]:
    """Everything in a tokenizer that affects how a conversation is tokenised, as plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    template = chat_template_text(chat_template) or getattr(tokenizer, "chat_template", None)
    return [type(tokenizer).__name__, vocabulary, template, tokenizer.special_tokens_map]


class Renderer:
    """One tokenizer with one chat template: messages to text, and text to token ids.

    Args:
        tokenizer: a transformers tokenizer; `apply_chat_template`, `__call__` and its added tokens are used.
        chat_template: overrides the tokenizer's own; text, file or `chatml`.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.is_fast = bool(getattr(tokenizer, "is_fast", False))
        self.template = chat_template_text(chat_template)
        own = getattr(tokenizer, "chat_template", None)
        if self.template is None and not own:
            raise DataError("the tokenizer has no chat template; pass one, e.g. --chat-template chatml")
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        markers = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        if CHATML_END in str(self.template or own):
            markers.add(CHATML_END)  # ends a turn even if the vocabulary has no single token for it
        self._endings = tuple(markers - {""})
        self._marker = re.compile(_alternatives(markers) or "(?!)")
        self._end_of_turn = re.compile(rf"\s*(?:{self._marker.pattern})")
        self._pieces = self._piece_pattern(added)
        self._cache: dict[str, Encoded] = {}
        self._cached = 0
        self.header = self._find_header()
        """The text that the template puts before every answer; empty if it cannot be determined."""

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """Render messages; `prompt` adds the generation prompt. Raises DataError where the template raises."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is third-party code: it may raise anything
            raise DataError(
                f"the chat template refuses these messages ({type(error).__name__}: {shortened(error)}); "
                "change the messages or pass another template, e.g. --chat-template chatml"
            ) from error

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

    def has_marker(self, text: str, start: int = 0, end: int | None = None) -> bool:
        """Whether a special token is spelled out in text[start:end]."""
        return self._marker.search(text[start:end]) is not None

    def encode(self, text: str) -> Encoded:
        """Token ids of a text without added special tokens, and the characters [start, end) of each token."""
        parts, at = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))], 0
        for piece in self._split(text):
            ids, starts, ends = self._encode_piece(piece)
            parts.append((ids, starts + at, ends + at))
            at += len(piece)
        ids, starts, ends = zip(*parts)
        return np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)

    def encode_ids(self, text: str) -> NDArray[np.int32]:
        """The token ids alone."""
        return np.concatenate([np.zeros(0, np.int32), *(self._encode_piece(piece)[0] for piece in self._split(text))])

    def _split(self, text: str) -> list[str]:
        return [text] if self._pieces is None else [piece for piece in self._pieces.split(text) if piece]

    def _encode_piece(self, piece: str) -> Encoded:
        """The tokens of a piece, cached."""
        encoded = self._cache.get(piece)
        if encoded is None:
            encoded = self._encode_whole(piece)
            self._cached += len(piece)
            if self._cached > CACHED_CHARACTERS:
                # Files may be larger than memory; shared pieces are cached again with the next row.
                self._cache.clear()
                self._cached = len(piece)
            self._cache[piece] = encoded
        return encoded

    def _encode_whole(self, text: str) -> Encoded:
        try:
            # `verbose=False`: the tokenizer would warn about a piece's length; `load` checks whole rows.
            output = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=self.is_fast, verbose=False)
        except (TypeError, UnicodeEncodeError) as error:
            lone = re.search("[\ud800-\udfff]", text)
            what = f"the lone surrogate {lone[0]!r}" if lone else quoted(text)
            raise DataError(f"the rendered text holds {what}, which the tokenizer cannot read; take it out") from error
        ids = np.array(output["input_ids"], np.int32)
        offsets = output["offset_mapping"] if self.is_fast else [(0, len(text))] * len(ids)
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        return ids, starts, ends

    def _piece_pattern(self, added: list[Any]) -> "re.Pattern[str] | None":
        """A pattern to split a text into pieces that tokenise separately to the same tokens; None if there is none."""
        plain = {str(t) for t in added if not (t.lstrip or t.rstrip or t.single_word or t.normalized)}
        odd = any(t.lstrip or t.rstrip or t.single_word for t in added)
        if odd or not plain or not self.is_fast:
            return None
        pattern = re.compile("(" + _alternatives(plain) + ")")
        # Some tokenizers mark the start of a text (a dummy space), and so of every piece: test for it.
        word = max(plain, key=len)
        for probe in (f"a b{word}a{word} c {word}\n\nd{word}{word} ", f" a{word}\n", f"{word}a"):
            joined = [i for piece in pattern.split(probe) if piece for i in self._encode_whole(piece)[0]]
            if joined != self._encode_whole(probe)[0].tolist():
                return None
        return pattern


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
