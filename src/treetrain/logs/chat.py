"""Conversations to trajectories: loss on the assistant's messages, one row per transcript or one per LLM call.

The model is trained on what it generated: the body, with its think block and tool calls as the template writes them,
and the token that ends the turn (`spans` finds them). It is not trained on the header, on an empty think block that the
message does not have, or on the end of a turn that was cut off. A part of an answer that the template drops is refused,
or noted where it is thinking; so is a message of others.
"""

import contextlib
import dataclasses
import json
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.core.digest import digest
from treetrain.core.errors import DataError, expect, quoted, shortened
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.killable import ChildError, Killable
from treetrain.logs.log_images import PlacedImage, images_in, listed_images
from treetrain.logs.messages import (
    MESSAGE_KEYS,
    REASONING_KEYS,
    Message,
    PlaceImage,
    clean_messages,
    clean_tools,
    is_number,
    says_nothing,
)
from treetrain.logs.records import (
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
from treetrain.logs.spans import Found, Span, common_start, find_messages, missing

if TYPE_CHECKING:
    from tokenizers import AddedToken

CHAT_KEYS = frozenset(("messages", "system", "tools", "functions", "parallel_tool_calls", "train", "trial", "model"))
CHAT_KEYS |= {"advantage", "system_prompt", *ROW_KEYS}
NO_TOKENIZER = "conversations need a tokenizer, your model's: tokenizer=tt.load_tokenizer(...)"
TEXT_KEYS = frozenset(("prompt", "completion", "finish_reason", "advantage", "model", *ROW_KEYS))
IMAGE_KEYS = ("images", "image", "multi_modal_data")
"""Keys of the images that a record has beside its messages or token ids."""
CHAT_KEYS |= set(IMAGE_KEYS)
IMAGE_TEXT = "<image>"
"""Stands for an image in a conversation that is inspected."""
SPECIAL = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<\|[^<>|\s]+>|<[^<>|\s]+\|>")
"""Special tokens as chat templates spell them."""
ENDED = ("stop", "end_turn", "eos")
"""Finish reasons of texts that the model ended itself."""
CACHED_CHARACTERS = 1 << 24
"""Characters of text pieces whose tokens are cached; about 100 MB at most."""
RENDER_SECONDS = 10
"""A chat template that takes longer for one conversation is refused; it may loop without end."""
RENDER_BYTES = 1 << 30
"""A chat template that takes more memory for one conversation is refused."""
EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>\n*")
"""Texts that templates write in place of thinking that a message does not have."""

# Token ids of a text, and the character offsets where each token starts and ends.
Encoded = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """A row that is rendered and not tokenised yet."""

    texts: tuple[str, ...]
    """Tokenised each by itself, and joined."""
    spans: list[tuple[int, int]]
    """Characters [start, end) of the joined texts that are trained."""
    messages: list[Message]
    """The message of each span, with its `weight` and `advantage`."""
    facts: dict[str, Json]
    """Facts of the whole row, as arguments of `Trajectory`."""
    add_bos: bool = False
    """Whether the tokens that the tokenizer puts before every text come first."""

    def __len__(self) -> int:
        return sum(map(len, self.texts))


class Request(NamedTuple):
    """The arguments of one rendering."""

    messages: list[Message]
    tools: Tools
    options: dict[str, Json]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages that are ready to be rendered."""

    messages: list[Message]
    tools: Tools
    facts: dict[str, Json]
    """Facts of the row that the whole conversation is, as arguments of `Trajectory`."""
    calls: dict[int, dict[str, Json]] | None
    """The numbers of the answers that are rows by themselves, and the facts of these; None: there is one row."""
    requests: list[Request]
    """The renderings: the conversation, or for every call what it had said in the end and its prompt."""

    size: int
    """About the number of characters of its renderings."""

    def __len__(self) -> int:
        return self.size


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
            raise DataError(NO_TOKENIZER)
        self.settings = settings
        self.renderer = Renderer(settings.tokenizer, settings.chat_template)

    def __call__(self, record: Record, notes: Notes) -> list[Trajectory]:
        """The trajectories of one record. Raises DataError without the place."""
        prepared = self.prepared(record, notes)
        if isinstance(prepared, ChatRow):
            return [self.renderer.tokenised(prepared, notes)]
        (texts,) = self.renderer.render_ahead([prepared.requests])
        return [self.renderer.tokenised(row, notes) for row in self.rows(prepared, iter(texts), notes)]

    def rows(self, conversation: Conversation, texts: Iterator[str | DataError], notes: Notes) -> list[ChatRow]:
        """The rows of a conversation, whose renderings come next in `texts`. Raises DataError without the place."""
        if conversation.calls is None:
            return [_transcript(self.renderer, conversation, _text(texts), notes)]
        return _calls(self.renderer, conversation, conversation.calls, texts, notes)

    def prepared(self, record: Record, notes: Notes) -> Conversation | ChatRow:
        """One record as messages to be rendered, or as text. Raises DataError without the place."""
        settings = self.settings
        renderer = self.renderer
        facts = row_facts(record, notes)
        notes.masks = "the completion"
        if "messages" not in record:
            notes.unused_keys(unknown(record, TEXT_KEYS))
            return _text_row(renderer, record, notes, facts)
        notes.unused_keys(unknown(record, CHAT_KEYS))
        keys: list[str] = []
        placed: list[PlacedImage] = []
        listed = [] if settings.image_reader is None else listed_images(record)
        notes.masks = "the answers, as the chat template writes them"
        messages = clean_messages(record["messages"], notes, self._place_image(keys, placed, listed))
        if listed:  # as TRL does where messages do not say where images stand
            messages = self._placed_first(messages, placed, listed)
        if images_in(messages, placed) != len(placed):
            raise DataError("messages have images at places that are not known; prepare the rows yourself")
        messages = [*_system(record, messages), *messages]
        messages = [_with_advantage(one, record) if one["role"] == "assistant" else one for one in messages]
        messages = renderer.fitted([_unsaid(one, number, notes) for number, one in enumerate(messages)])
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
            others = unknown(message, MESSAGE_KEYS)
            notes.unused_keys(((name, one) for name, one in others if name not in renderer.source), "message keys")
        for number, (one, after) in enumerate(pairwise(messages)):
            if one["role"] == after["role"] == "assistant" and "tool_calls" in one:
                notes.add("the log has no result of a call before the next answer", f"message {number}")
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
            requests, calls = [renderer.request(messages, tools)], None
            facts |= self._images(placed)
        else:
            calls = self._call_facts(messages, facts, placed, notes, only_last=only_last)
            requests = [one for turn in calls for one in renderer.call_requests(messages[: turn + 1], tools)]
        size = len(str(messages)) * len(requests)
        return Conversation(messages=messages, tools=tools, facts=facts, calls=calls, requests=requests, size=size)

    def _call_facts(
        self,
        messages: list[Message],
        facts: dict[str, Json],
        placed: list[PlacedImage],
        notes: Notes,
        *,
        only_last: bool,
    ) -> dict[int, dict[str, Json]]:
        """The answers that are calls: their numbers, and the facts of their rows."""
        turns = _turns(messages)
        episode = notes.place if facts["episode"] is None else facts["episode"]
        calls: dict[int, dict[str, Json]] = {}
        for number, turn in enumerate(turns[-1:] if only_last else turns):
            answer = messages[turn]
            if answer.get("weight") == 0 and (not only_last or answer.get("cut")):
                notes.add("an assistant message that is not trained is no call", f"message {turn}")
                continue
            calls[turn] = dict(facts)
            if not only_last:
                calls[turn] |= {"episode": episode, "id": f"{facts['id']}/{number}"}
            if "reward" in answer:  # a call with a reward of its own is an episode by itself
                calls[turn] |= {"reward": answer["reward"], "episode": None}
            if placed:
                calls[turn] |= self._images(placed[: images_in(messages[:turn], placed)])
        if calls and turns[-1] + 1 < len(messages):
            notes.add("messages after the last assistant message are in no call")
        return calls

    def _place_image(self, keys: list[str], placed: list[PlacedImage], listed: list[object]) -> PlaceImage | None:
        """Return what to call for the text in place of an image; it adds a digest to `keys` or an image to `placed`."""

        def key(part: object, _here: str) -> str:
            keys.append(digest(json.dumps(part, sort_keys=True, default=str)))
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
    name = next((name for name in ("system", "system_prompt") if record.get(name)), None)
    if name is None:
        return []
    if messages[0]["role"] == "system" and messages[0]["content"] == record[name]:
        return []
    if any(message["role"] == "system" for message in messages):
        raise DataError(f"the record has `{name}` and a system message; a template renders one: keep one of them")
    return clean_messages([{"role": "system", "content": record[name]}], Notes())


def _unsaid(message: Message, number: int, notes: Notes) -> Message:
    """The message, with weight 0 if it is an answer that ended before it said anything."""
    if message["role"] != "assistant" or not says_nothing(message) or not message.get("weight", 1.0):
        return message
    if message.get("cut"):
        notes.add("an answer that was cut off, or failed, before it said anything is not trained", f"message {number}")
        return message | {"weight": 0}
    notes.add("an empty answer: only the end of its turn is trained; `weight: 0` leaves it out", f"message {number}")
    return message


def _text_row(renderer: "Renderer", record: Record, notes: Notes, facts: dict[str, Json]) -> ChatRow:
    """Prompt and completion as plain text, tokenised as one; the completion is trained.

    The EOS token is added only where `finish_reason` says that the model ended the text ("stop"): a log without special
    tokens does not show whether it was sampled.
    """
    prompt, completion = field(record, "prompt", str), field(record, "completion", str)
    if not renderer.ends(completion):
        if record.get("finish_reason") in ENDED:
            completion += getattr(renderer.tokenizer, "eos_token", None) or ""
        elif record.get("finish_reason") is None:
            notes.add(
                "the completion ends without an end-of-text token, and none is added or trained; write it in the text, "
                'or `"finish_reason": "stop"` where the model ended by itself'
            )
    text = prompt + completion
    spans = [(len(prompt), len(text))]
    bos = getattr(renderer.tokenizer, "bos_token", None)
    add_bos = not (bos and text.startswith(bos))
    return renderer.row(text, spans, [_with_advantage({}, record)], facts, add_bos=add_bos)


def _with_advantage(message: Message, record: Record) -> Message:
    """The message with the advantage of its record, if it has none of its own."""
    advantage = record.get("advantage")
    if advantage is None or "advantage" in message:
        return message
    if not is_number(advantage):
        raise DataError(f"`advantage` is {quoted(advantage)}, expected a finite number")
    return message | {"advantage": advantage}


def _text(texts: Iterator[str | DataError]) -> str:
    """The next rendering; raises the error of one that failed."""
    text = next(texts)
    if isinstance(text, DataError):
        raise text
    return text


def _transcript(renderer: "Renderer", conversation: Conversation, text: str, notes: Notes) -> ChatRow:
    messages = conversation.messages
    found = find_messages(renderer, messages, conversation.tools, text)
    _check_found(messages, found, notes, "; --view calls renders every answer as the last message")
    turns = _turns(messages)
    places = Counter(span.message for span in found.spans)
    some = any("advantage" in messages[turn] for turn in turns)
    for turn in turns:
        message = messages[turn]
        if message.get("weight") == 0 and not message.get("cut"):
            notes.add(NOT_TRAINED, f"message {turn}")
        if not places[turn] and message.get("weight", 1.0):  # others that are not found are refused
            notes.add("the template writes nothing for an empty answer, so it is not trained", f"message {turn}")
        if places[turn] > 1:
            notes.add("the template writes one answer in several places; all of them are trained", f"message {turn}")
        if "reward" in message:
            raise DataError(
                f"message {turn} has a reward, but a transcript is one row with one reward; read every call as a row "
                "(--view calls), or give `advantage`"
            )
        if some and "advantage" not in message and message.get("weight", 1.0):
            raise DataError(f"message {turn} has no `advantage` and other assistant messages have one; give all one")
    spans = [_sampled(renderer, text, messages[span.message], span, found, notes) for span in found.spans]
    return renderer.row(text, spans, [messages[span.message] for span in found.spans], conversation.facts)


def _sampled(
    renderer: "Renderer", text: str, answer: Message, span: Span, found: Found, notes: Notes
) -> tuple[int, int]:
    """A span without what the template wrote and the model did not: an empty think block, the end of a cut turn."""
    start, end = span.start, span.end
    if not _thinks(renderer, answer, span, found) and (empty := EMPTY_THINK.match(text, start, end)):
        notes.add("the template writes an empty think block that the log does not have; it is not trained")
        start = empty.end()
    if answer.get("cut"):
        notes.add("an answer was cut off, so the end of its turn is not trained")
        end = span.said
    elif not renderer.ends(text[span.said : end]):
        notes.add("the template writes no special token at the end of an answer, so its end is not trained")
    return start, max(start, end)


def _thinks(renderer: "Renderer", answer: Message, span: Span, found: Found) -> bool:
    """Whether the rendering has the thinking of an answer."""
    thought = answer.get(renderer.reasoning_key) or "</think>" in answer["content"]
    return bool(thought) and "thinking" not in found.dropped.get(span.message, ())


def _calls(
    renderer: "Renderer",
    conversation: Conversation,
    calls: dict[int, dict[str, Json]],
    texts: Iterator[str | DataError],
    notes: Notes,
) -> list[ChatRow]:
    messages, rows = conversation.messages, []
    for turn, facts in calls.items():
        whole, prompt = _text(texts), _text(texts) if turn else None
        rows.append(_call(renderer, messages[: turn + 1], conversation.tools, whole, prompt, notes, facts))
        if turn == max(calls):
            for number in missing(messages[:turn], whole):
                notes.add(NOT_RENDERED.format(messages[number]["role"]), f"message {number}")
    return rows


def _turns(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _call(
    renderer: "Renderer",
    messages: list[Message],
    tools: Tools,
    whole: str,
    prompt: str | None,
    notes: Notes,
    facts: dict[str, Json],
) -> ChatRow:
    """The call that the last message answers; `whole` is the rendering of all messages, `prompt` of the others."""
    answer = messages[-1]
    found = find_messages(renderer, messages, tools, whole, prompt=prompt)
    _check_found(messages, found, notes)
    if not found.spans:
        raise DataError(f"message {len(messages) - 1} (assistant) {LOST}")
    span = found.spans[0]._replace(end=found.spans[-1].end, said=found.spans[-1].said)
    if prompt is not None and not whole.startswith(prompt):
        notes.add("the template writes a call's prompt differently once it is answered", f"message {len(messages) - 1}")
        if _thinks(renderer, answer, span, found) and whole.startswith(prompt.removesuffix(renderer.header)):
            prompt = None  # it may ask for an answer without thinking, by an empty block that ends it
    texts = (whole[: span.start] if prompt is None else prompt, whole[span.start : span.end])
    start, end = _sampled(renderer, whole, answer, span, found, notes)
    moved = len(texts[0]) - span.start
    return ChatRow(texts=texts, spans=[(start + moved, end + moved)], messages=[answer], facts=facts)


NOT_TRAINED = "an assistant message is not trained: the log masks it, or it is part of a prompt"
SHARED_TOKEN = (
    "a token holds the edge of an answer and text beside it, and is trained: the template is that of another "
    "tokenizer, or a text begins within a word"
)
NOT_RENDERED = "a {} message does not appear in the rendered text as it is: the template drops or rewrites it"
LOST = (
    "cannot be found in what the chat template renders; pass another template, e.g. --chat-template chatml, or leave "
    "the message out of the loss (`weight: 0`)"
)
LOST_CALLS = (
    "calls tools, and the chat template writes none or not all of the calls; pass one that does, e.g. --chat-template "
    "chatml, or leave the message out of the loss (`weight: 0`)"
)


def _check_found(messages: Sequence[Message], found: Found, notes: Notes, cure: str = "") -> None:
    """Note what the template drops, and raise DataError if that is a part of a trained answer.

    Args:
        messages: those to be checked.
        found: the messages in the rendering.
        notes: receives the remarks.
        cure: what else helps against lost parts of answers.
    """
    for number, parts in sorted(found.dropped.items()):
        message, where = messages[number], f"message {number}"
        if message["role"] != "assistant":
            notes.add(NOT_RENDERED.format(message["role"]), where)
            continue
        if "thinking" in parts:
            notes.add(f"the template drops the thinking of an assistant message, so it is not trained{cure}", where)
        lost = LOST if "text" in parts else LOST_CALLS if "call" in parts else None
        if lost and message.get("weight", 1.0) and not says_nothing(message):
            raise DataError(f"{where} (assistant) {lost}{cure}")
        if lost and not says_nothing(message):
            notes.add("the template drops an assistant message that is not trained, or its calls", where)


# Templates and tokenizers


def chat_template_text(template: str | None) -> str | None:
    """The text of a template given as text, as a file, or as `chatml` (built in, prefix-preserving)."""
    if template is None or "{" in template:
        return template
    if template == "chatml":
        return resources.files("treetrain.logs").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
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


def _not_rendered(error: Exception, request: Request) -> DataError:
    """The error for a rendering that failed. A template is third-party code: it may raise anything."""
    other = "pass another template, e.g. --chat-template chatml"
    if isinstance(error, ChildError):
        return DataError(
            f"the chat template refuses these messages ({shortened(error)}); change the messages or {other}"
        )
    most = f"{RENDER_SECONDS} s" if isinstance(error, TimeoutError) else f"{RENDER_BYTES:,} bytes"
    return DataError(f"the chat template takes more than {most} for {len(request.messages)} messages; {other}")


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
        self._joins_arguments: bool | None = None
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        markers = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        markers |= set(SPECIAL.findall(self.source))  # they end turns even if the vocabulary has no tokens for them
        self.marker = re.compile(_alternatives(markers) or "(?!)")
        self.reasoning_key = next((key for key in REASONING_KEYS if re.search(rf"\b{key}\b", self.source)), "")
        self.reasoning_key = self.reasoning_key or REASONING_KEYS[0]
        self.edges: dict[tuple[Json, ...], int] = {}
        self.shapes: dict[str, list[str]] = {}
        self._cache: dict[str, Encoded] = {}
        self._cached = 0
        self._wants_parts = False
        self._pieces = self._piece_pattern(added)
        self._wants_parts = not self._writes_text("word")
        self._wants_parts = self._wants_parts and self._writes_text("word")
        self.header, self.end_of_turn = self._find_turn()
        """Either is empty if there is none, or if it cannot be determined."""

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """Render messages; `prompt` adds the generation prompt. Raises DataError where the template raises."""
        request = self.request(messages, tools, prompt=prompt)
        try:
            return self._render(RENDER_SECONDS, *request)
        except (TimeoutError, MemoryError, ChildError) as error:
            raise _not_rendered(error, request) from error

    def request(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> Request:
        """The arguments of `render`. Raises DataError if there is no template."""
        if not self.source:
            raise DataError("the tokenizer has no chat template; pass one, e.g. --chat-template chatml")
        options = {"chat_template": self.template, "add_generation_prompt": prompt, "tokenize": False}
        return Request(self.templated(messages), tools, options)

    def call_requests(self, messages: Sequence[Message], tools: Tools) -> Iterator[Request]:
        """For a call that the last message answers: all messages, and if there are others those as its prompt."""
        yield self.request(messages, tools)
        if len(messages) > 1:  # many templates cannot render an empty conversation
            yield self.request(messages[:-1], tools, prompt=True)

    def render_ahead(self, groups: Sequence[Sequence[Request]]) -> Iterator[list[str | DataError]]:
        """The texts of every group of requests, up to the first error; they are rendered while others are used."""
        return (  # an iterator whose requests are sent at once, unlike those of a generator function
            [
                _not_rendered(answer, request) if isinstance(answer, Exception) else answer
                for answer, request in zip(answers, group)
            ]
            for group, answers in zip(groups, self._render.map(RENDER_SECONDS, groups))
        )

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

    def _writes_text(self, text: str) -> bool:
        """Whether the template writes the text of a message."""
        return text in self._tried([{"role": "user", "content": text}])

    def _find_turn(self) -> tuple[str, str]:
        """The text that the template puts before every answer, and the special token that ends an answer of text."""
        sign = "\ue000"
        question: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": sign}
        bare, prompted, answered, followed = (
            self._tried([question]),
            self._tried([question], prompt=True),
            self._tried([question, answer]),
            self._tried([question, answer, question]),
        )
        before, _, behind = answered.rpartition(sign)
        # Some write a header behind every conversation: what a longer one does not have there.
        tail, longer = "", followed.rpartition(sign)[2]
        if longer and before.startswith(bare) and not longer.startswith(behind):
            same = common_start(behind, longer)
            same = next((one.start() for one in self.marker.finditer(behind) if one.start() < same < one.end()), same)
            # The header of a user may begin as that of an answer does, with the token that begins the conversation.
            bos = getattr(self.tokenizer, "bos_token", None)
            turn = next((marker for marker in self.marker.findall(bare) if marker != bos), "")
            tail = behind[same - len(turn) if behind[:same].endswith(turn) else same :]
            tail = tail if bare.endswith(tail) else ""
        header = tail + prompted[len(bare) :] if bare and prompted.startswith(bare) else ""
        return header, (self.marker.findall(behind.removesuffix(tail or header)) or [""])[-1]

    def _tried(self, messages: list[Message], *, prompt: bool = False) -> str:
        """The text of messages; empty if the template refuses them."""
        with contextlib.suppress(DataError):
            return self.render(messages, None, prompt=prompt)
        return ""

    def fitted(self, messages: list[Message]) -> list[Message]:
        """The messages with thinking, and arguments of calls, in the form that the template reads."""
        key = self.reasoning_key
        if key != REASONING_KEYS[0]:
            messages = [
                {key if name == REASONING_KEYS[0] else name: value for name, value in one.items()} for one in messages
            ]
        if self._joins_arguments is None and any("tool_calls" in one for one in messages):
            self._joins_arguments = self._find_arguments()
        return [_with_texts(one) for one in messages] if self._joins_arguments else messages

    def _find_arguments(self) -> bool:
        """Whether the template writes the arguments of a call as they are, so that they must be JSON text."""

        def written(arguments: Json) -> str:
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            return self._tried([{"role": "user", "content": "a"}, answer])

        text, parsed = '{"a": "b"}', written({"a": "b"})
        return (not parsed or "{'a': 'b'}" in parsed) and text in written(text)

    def templated(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with texts as lists of parts, if the template reads nothing else."""
        if not self._wants_parts:
            return list(messages)
        texts = ([{"type": "text", "text": one["content"]}] for one in messages)
        pairs = zip(messages, texts)
        return [one | ({"content": parts} if isinstance(one["content"], str) else {}) for one, parts in pairs]

    def ends(self, text: str) -> bool:
        """Whether a special token ends the text, trailing white space ignored."""
        return bool(re.search(rf"(?:{self.marker.pattern})\s*$", text))

    def row(
        self,
        text: str,
        spans: list[tuple[int, int]],
        messages: list[Message],
        facts: dict[str, Json],
        *,
        add_bos: bool = False,
    ) -> ChatRow:
        """A row of one text. A slow tokenizer gives no character offsets, so each span is tokenised by itself."""
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        texts = (text,) if self.is_fast else tuple(text[start:end] for start, end in pairwise(edges))
        return ChatRow(texts=texts, spans=spans, messages=messages, facts=facts, add_bos=add_bos)

    def tokenised(self, row: ChatRow, notes: Notes) -> Trajectory:
        """The trajectory of a row. Raises DataError if the tokenizer cannot read the text."""
        bos = self._bos() if row.add_bos else np.zeros(0, np.int32)
        ids = [bos]
        number = [np.full(bos.size, -1)]
        at = 0
        for text in row.texts:
            own, starts, ends = self.encode(text)
            of_span = np.full(own.size, -1)
            for index, (start, end) in enumerate(row.spans):
                whole = start <= at and at + len(text) <= end
                # A token with any character of the span is trained: half a token cannot be predicted.
                inside = np.flatnonzero(whole | ((ends + at > start) & (starts + at < end)))
                of_span[inside] = index
                if not whole and inside.size and (starts[inside[0]] + at < start or ends[inside[-1]] + at > end):
                    notes.add(SHARED_TOKEN)
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


def _with_texts(message: Message) -> Message:
    """The message with arguments of calls as the text that the log has."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else getattr(given, "text", "") or json.dumps(given, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
