"""Sessions of agents, logged event by event: Claude Code, Codex, OpenHands, ATIF, and bare lists of messages.

What is not in such logs is said in a note: system prompts, tools, how a harness renders results for the model.
"""

import re
from collections.abc import Iterable, Mapping

from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.conversations import items_to_messages, with_items
from treetrain.logs.formats.tokens import sampled_row, sets_of
from treetrain.logs.records import Json, Notes, Record, facts, field, first_path, look_up, objects, picked


def of_file(place: str, record: Record) -> str:
    """The session of a record is its file; events that lie in files of their own have a folder."""
    file = re.sub(r"( line \d+)?( element \d+)?( data\.\d+)?$|(^| )row \d+$", "", place)
    folder, _, name = file.rpartition("/")
    return folder if re.match(r"event|\d+\.json$", name) else file


# Claude Code

INTERRUPTED = "[Request interrupted by user]"


def read_claude_code(record: Record, notes: Notes) -> list[Record]:
    """A session file: user and assistant lines. Its sub-agents, its rewinds and what follows a compaction are rows.

    A message of the assistant has one line for each of its parts. Results of parallel calls have different parents, so
    the order of the lines is the order of the messages, except where the user went back: there, the parent of the
    user's next message is an earlier line.
    """
    threads: dict[Json, list[Record]] = {}
    thread_of: dict[Json, Json] = {}
    rows: list[Record] = []
    lines = objects(record, "records")
    branches = any("parentUuid" in line for line in lines)  # otherwise each line follows the one before it
    for line in lines:
        kind, parent = line.get("type"), line.get("parentUuid")
        if kind not in ("user", "assistant") and line.get("uuid") is None:
            notes.add(f"a line of type {quoted(kind)} is no message and not in the rows")
            continue
        agent = line.get("agentId") if line.get("isSidechain") else ""
        thread = thread_of.get(parent, line.get("uuid")) if agent is None else agent
        thread_of[line.get("uuid")] = thread
        path = threads.setdefault(thread, [])
        asked = kind == "user" and not _is_result(line)
        if branches and path and (asked or parent is None):
            at = next((number for number, above in enumerate(path, 1) if above.get("uuid") == parent), 0)
            if any(above.get("type") == "assistant" for above in path[at:]):
                rows.append(_claude_row(path, line, len(rows), notes))
                path[:] = path[:at]
        path.append(line)
    rows += [_claude_row(path, path[0], len(rows) + number, notes) for number, path in enumerate(threads.values())]
    notes.add("Claude Code does not log its system prompt and tools (--tools FILE adds tools)")
    return [row for row in rows if any(one["role"] == "assistant" for one in row["messages"])]


def _is_result(line: Record) -> bool:
    content = look_up(line, "message.content")
    return isinstance(content, list) and any(look_up(part, "type") == "tool_result" for part in content)


def _claude_row(path: Iterable[Record], line: Record, number: int, notes: Notes) -> dict[str, Json]:
    messages: list[dict[str, Json]] = []
    model = last = None
    for one in path:
        if one.get("type") == "attachment":
            notes.add("an attachment is not in the row: Claude Code does not log how it writes it in the prompt")
        if one.get("type") not in ("user", "assistant"):
            continue
        message = field(one, "message", dict)
        if message.get("model") == "<synthetic>" or one.get("isApiErrorMessage"):
            notes.add("a message that Claude Code wrote in place of the model is not in the row")
            continue
        content = message.get("content")
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if messages and look_up(content, "0.text") == INTERRUPTED:
            messages[-1]["stop_reason"] = "incomplete"
        if message.get("id") is not None and message["id"] == last:
            messages[-1]["content"] += objects(message, "content")
        else:
            messages.append({"role": message.get("role"), "content": content})
        messages[-1]["stop_reason"] = message.get("stop_reason")
        last, model = message.get("id"), model or message.get("model")
    session = first_path(line, "sessionId", "session_id")
    return {"messages": messages, "episode": session, "id": f"{session}/{number}", "model": model}


# Codex


def read_codex(record: Record, notes: Notes) -> list[Record]:
    """A rollout file of Codex: items of the responses API. What follows a compaction is a row of its own."""
    rows: list[Record] = []
    known: dict[str, Json] = {}
    items: list[Json] = []
    for line in objects(record, "records"):
        kind, payload = line.get("type"), field(line, "payload", dict)
        if kind == "session_meta":
            known = picked(payload, episode="id", system=("base_instructions.text", "instructions"))
        elif kind == "turn_context":
            known |= picked(payload, model="model")
        elif kind == "response_item" and payload.get("type") != "ghost_snapshot":
            items.append(payload)
        elif kind == "compacted":
            rows.append(_codex_row(known, items, len(rows), notes))
            summary = [{"role": "user", "content": payload.get("message")}]
            items = [one | {"weight": 0} for one in objects(payload, "replacement_history") or summary]
        else:
            kind = payload.get("type") if kind == "response_item" else kind
            notes.add(f"a line of type {quoted(kind)} is not in rows")
    notes.add("Codex does not log its tools (--tools FILE adds them)")
    return [*rows, _codex_row(known, items, len(rows), notes)]


def _codex_row(known: Record, items: list[Json], number: int, notes: Notes) -> dict[str, Json]:
    return {**known, "messages": items_to_messages(items, notes), "id": f"{known.get('episode')}/{number}"}


# OpenHands

HARNESS_ACTIONS = ("change_agent_state", "recall", "condensation")


def read_openhands(record: Record, notes: Notes) -> list[Record]:
    """Events of a conversation, or a line of output.jsonl with its `history`. Logged completions are `requests`.

    An answer with several calls has an event for each call.
    """
    events = record["records"] if "records" in record else field(record, "history", list)
    events = [one for event in events for one in (event if isinstance(event, list) else [event])]  # older: pairs
    if all(isinstance(look_up(event, "id"), int) for event in events):  # files 10.json and 2.json
        events.sort(key=lambda event: event["id"])
    messages: list[Json] = []
    answers: dict[Json, dict[str, Json]] = {}
    tools = None
    for number, event in enumerate(events):
        tools = first_path(event, "args.tools", "tools") or tools
        message, answer = _openhands_message(event, number)
        if message is None:
            what = [event[name] for name in ("action", "kind", "observation") if isinstance(event.get(name), str)]
            notes.add(f"an event {quoted(''.join(what[:1]))} is no message and not in the rows")
        elif answer is None or answer not in answers:
            messages.append(message)
            answers |= {} if answer is None else {answer: message}
        elif "kind" in event:  # the SDK's: each event has one call, and the first has the text
            answers[answer]["tool_calls"] += message["tool_calls"]
    notes.add("OpenHands' events are not the prompts as they were sent; logged completions are (`log_completions`)")
    known = picked(record, group="instance_id", reward="test_result.report.resolved", model="metadata.llm_config.model")
    return [known | ({"tools": tools} if tools else {}) | {"messages": messages}]


def _openhands_message(event: Json, number: int) -> tuple[dict[str, Json] | None, Json]:
    """The message of an event, and the id of the response that an event of the agent is a part of."""
    if not isinstance(event, Mapping):
        raise DataError(f"event {number} is {quoted(event)}, expected an object")
    kind = event.get("kind")
    action = event.get("action")
    source = event.get("source")
    name = first_path(event, "tool_call_metadata.tool_call_id", "tool_call_id")
    if kind == "SystemPromptEvent" or action == "system":
        return {"role": "system", "content": first_path(event, "system_prompt.text", "args.content")}, None
    if kind == "MessageEvent":
        return dict(field(event, "llm_message", dict)), event.get("llm_response_id")
    if kind == "ActionEvent":
        parts = [*objects(event, "thinking_blocks"), *objects(event, "thought")]
        message = {"role": "assistant", "content": parts, "tool_calls": [field(event, "tool_call", dict)]}
        return message | {"reasoning_content": event.get("reasoning_content")}, event.get("llm_response_id")
    if kind is not None:
        content = first_path(event, "observation.content", "observation.output", "error", "rejection_reason")
        content = event.get("observation") if content is None else content
        result = {"type": "tool_result", "id": name, "content": content}
        return (None, None) if name is None else ({"role": "user", "content": [result]}, None)
    response = look_up(event, "tool_call_metadata.model_response")
    if isinstance(action, str) and source == "agent" and response is not None:
        choice = first_path(response, "choices.0")
        message = dict(field(choice, "message", dict)) | {"finish_reason": look_up(choice, "finish_reason")}
        return message, look_up(response, "id")
    if action == "message":
        role = "assistant" if source == "agent" else "user"
        return {"role": role, "content": first_path(event, "args.content", "message")}, None
    if isinstance(action, str) and source == "agent" and action not in HARNESS_ACTIONS:
        raise DataError(
            f"event {number} is the action {quoted(action)} without the model's response, so what the model wrote is "
            "not in the log; log completions (`log_completions`)"
        )
    if event.get("observation") is not None and name is not None:
        return {"role": "tool", "content": event.get("content"), "tool_call_id": name}, None
    return None, None


# ATIF, the format of Harbor and terminal-bench


def read_atif(record: Record, notes: Notes) -> list[Record]:
    """A trajectory and those of its sub-agents. Steps that were copied or that no model made are not trained.

    If every sampled step has the ids of its prompt and its completion, each is a row of tokens.
    """
    messages: list[Json] = []
    sampled: list[Record] = []
    for step in objects(record, "steps"):
        role = {"agent": "assistant"}.get(str(step.get("source")), step.get("source"))
        message = {"role": role, "content": step.get("message"), "reasoning_content": step.get("reasoning_content")}
        calls = [
            {"id": one.get("tool_call_id"), "name": one.get("function_name"), "arguments": one.get("arguments")}
            for one in objects(step, "tool_calls")
        ]
        message |= {"tool_calls": calls} if calls else {}
        if step.get("is_copied_context") or step.get("llm_call_count") == 0:
            notes.add("a step that was copied or made without a model is not trained")
            message["weight"] = 0
        elif role == "assistant":
            sampled.append(step)
        messages.append(message)
        for result in objects(step, "observation.results"):
            told = {"role": "user", "content": result.get("content")}
            name = result.get("source_call_id")
            messages.append(told if name is None else told | {"role": "tool", "tool_call_id": name})
    known = picked(
        record,
        episode="session_id",
        model="agent.model_name",
        id=("trajectory_id", "session_id"),
        tools="agent.tool_definitions",
    )
    known |= facts(record)
    rows: list[Record] = [known | {"messages": messages}]
    ids = [first_path(step, "metrics.completion_token_ids") is not None for step in sampled]
    if sampled and all(ids) and all(look_up(step, "metrics.prompt_token_ids") is not None for step in sampled):
        known = {name: value for name, value in known.items() if name not in ("tools", "model")}
        rows = [known | {"id": f"{known.get('id')}/{n}"} | _atif_call(step) for n, step in enumerate(sampled)]
    elif any(ids):
        notes.add("not every sampled step has the ids of its prompt and its completion: all are tokenised again")
    return rows + [row for one in objects(record, "subagent_trajectories") for row in read_atif(one, notes)]


def _atif_call(step: Record) -> dict[str, Json]:
    metrics = field(step, "metrics", dict)
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    return sampled_row(step, *(metrics.get(name) for name in names), sets=sets_of(metrics))


def read_messages(record: Record, notes: Notes) -> list[Record]:
    """The messages of one conversation, each a record: Cline's history, Cursor's transcripts, Gemini's contents."""
    messages = []
    for one in objects(record, "records"):
        held, kind = one.get("message"), one.get("type")
        if isinstance(held, dict) and "role" in one:
            notes.add("Cursor does not log its system prompt, its tools, and in most versions their results")
            parts = objects(held, "content") if isinstance(held.get("content"), list) else held.get("content")
            if isinstance(parts, list):
                parts = [part for part in parts if part.get("type") != "turn_ended"]
            messages += [{**held, "role": one["role"], "content": parts}] if parts else []
        elif kind == "turn_ended":
            notes.add("a line of type 'turn_ended' is no message and not in the row")
        else:
            messages.append(one)
    return [{"messages": with_items(messages, notes)}]
