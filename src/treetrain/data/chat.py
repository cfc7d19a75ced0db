"""Conversations to trajectories: loss on what the model said, one row per transcript or one per LLM call."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treetrain.data.messages import Message, clean_messages, clean_tools
from treetrain.data.notes import Notes
from treetrain.data.rendering import Renderer
from treetrain.data.spans import Tools, assistant_spans, completion_span
from treetrain.data.token_rows import EPISODE_KEYS, GROUP_KEYS, first_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

View = Literal["transcript", "calls"]
CHAT_KEYS = frozenset(("messages", "tools", "reward", "id", "trial", "key", *GROUP_KEYS, *EPISODE_KEYS))


def trajectories_from_chat_row(
    row: Mapping[str, Any],
    renderer: Renderer,
    place: str,
    *,
    view: View = "transcript",
    tools: Tools = None,
    notes: Notes | None = None,
) -> list[Trajectory]:
    """Read one conversation.

    Args:
        row: `messages`; optional `tools`, `reward`, `group_id`/`group`/`task_id`, `id`, `trial`, `episode`.
            A message's `weight` multiplies its loss, as in OpenAI's fine-tuning files.
        renderer: tokenizer and template.
        place: where the row is, for messages.
        view: "transcript": the whole conversation is one row. "calls": one row per assistant message, its
            prompt rendered from the messages before it and its completion tokenised by itself, as RL loggers
            write them; the rows' `episode` is the conversation, their ids end in `/0`, `/1`, ...
        tools: schemas for rows that bring none.
        notes: collects what was ignored or looks odd.

    Raises:
        DataError: naming `place` and the message.
    """
    notes = notes or Notes()
    for name in (name for name in row if name not in CHAT_KEYS):
        notes.add(f"key {name!r} is not used", place)
    messages = clean_messages(row.get("messages"), place, notes)
    tools = clean_tools(row.get("tools"), place) or tools
    try:
        facts = {"reward": row.get("reward"), "group": first_of(row, GROUP_KEYS), "key": row.get("key")}
        if not any(message["role"] == "assistant" for message in messages):
            notes.add("no assistant message, so nothing to train", place)
        name = _name(row, place)
        if view == "transcript":
            transcript = _transcript(renderer, messages, tools, place, notes)
            return [transcript.replace(**facts, id=name, episode=first_of(row, EPISODE_KEYS))]
        episode = first_of(row, EPISODE_KEYS)
        facts["episode"] = place if episode is None else episode
        calls = _calls(renderer, messages, tools, place, notes)
        return [call.replace(**facts, id=f"{name}/{number}") for number, call in enumerate(calls)]
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _name(row: Mapping[str, Any], place: str) -> Any:
    if row.get("id") is not None:
        return row["id"]
    group = first_of(row, GROUP_KEYS)
    return place if group is None or row.get("trial") is None else f"{group}/{row['trial']}"


def _transcript(renderer: Renderer, messages: list[Message], tools: Tools, place: str, notes: Notes) -> Trajectory:
    text = renderer.render(messages, tools)
    _note_dropped(messages, text, place, notes)
    spans = assistant_spans(renderer, messages, tools, text)
    weights = [float(m.get("weight", 1.0)) for m in messages if m["role"] == "assistant"]
    if not getattr(renderer.tokenizer, "is_fast", False):
        return _by_pieces(renderer, text, spans, weights)
    ids, starts, ends = renderer.encode(text)
    loss_weights = np.zeros(ids.size)
    for (start, end), weight in zip(spans, weights):
        # A token that holds any character of the span counts: it cannot be predicted in halves.
        loss_weights[(ends > start) & (starts < end)] = weight
    return Trajectory(ids, loss_weights=loss_weights)


def _by_pieces(renderer: Renderer, text: str, spans: list[tuple[int, int]], weights: list[float]) -> Trajectory:
    """For tokenizers that do not tell where a token lies in the text: each span is tokenised by itself."""
    parts: list[tuple[NDArray[np.int32], float]] = []
    at = 0
    for (start, end), weight in zip(spans, weights):
        parts += [(renderer.encode_ids(text[at:start]), 0.0), (renderer.encode_ids(text[start:end]), weight)]
        at = end
    parts.append((renderer.encode_ids(text[at:]), 0.0))
    ids = np.concatenate([ids for ids, _ in parts])
    return Trajectory(ids, loss_weights=np.repeat([w for _, w in parts], [ids.size for ids, _ in parts]))


def _calls(renderer: Renderer, messages: list[Message], tools: Tools, place: str, notes: Notes) -> list[Trajectory]:
    calls: list[Trajectory] = []
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = completion = ""
    for turn in turns:
        prompt, completion = _call_texts(renderer, messages[: turn + 1], tools, f"{place}: message {turn}", notes)
        prompt_ids, completion_ids = renderer.encode_ids(prompt), renderer.encode_ids(completion)
        weights = np.zeros(prompt_ids.size + completion_ids.size)
        weights[prompt_ids.size :] = float(messages[turn].get("weight", 1.0))
        calls.append(Trajectory(np.concatenate([prompt_ids, completion_ids]), loss_weights=weights))
    if turns:
        _note_dropped(messages[: turns[-1] + 1], prompt + completion, place, notes)
        if turns[-1] + 1 < len(messages):
            notes.add("messages after the last assistant message are in no call", place)
    return calls


def _call_texts(renderer: Renderer, messages: list[Message], tools: Tools, where: str, notes: Notes) -> tuple[str, str]:
    """Prompt and completion of the call whose answer is the last message."""
    whole = renderer.render(messages, tools)
    if len(messages) == 1:  # an answer to nothing: many templates cannot render an empty conversation
        start, end = completion_span(renderer, messages, tools, whole)
        return whole[:start], whole[start:end]
    prompt = renderer.render(messages[:-1], tools, prompt=True)
    if whole.startswith(prompt):
        closed = renderer.last_marker_end(whole)
        if closed is not None and closed >= len(prompt):
            return prompt, whole[len(prompt) : closed]
    else:
        notes.add("the template writes a call's prompt differently once it is answered", where)
    start, end = completion_span(renderer, messages, tools, whole)
    return prompt, whole[max(start, len(prompt)) if whole.startswith(prompt) else start : end]


def _note_dropped(messages: list[Message], text: str, place: str, notes: Notes) -> None:
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"].strip()[:60] not in text:
            what = f"a {message['role']} message does not appear in the rendered text as it is"
            notes.add(f"{what}: the template drops or rewrites it", f"{place} message {index}")
