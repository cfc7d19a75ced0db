"""OpenAI-style messages, checked and brought into the one form that chat templates expect."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetrain.data.notes import Notes
from treetrain.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
# Older and newer names of the same roles; templates know only the four above and skip others without a word.
ROLE_ALIASES = {"developer": "system", "function": "tool"}

Message = dict[str, Any]


def clean_messages(messages: Any, place: str, notes: Notes) -> list[Message]:
    """Messages as templates want them: text content, tool-call arguments as objects, no fields that are null.

    Raises:
        DataError: naming `place` and the message's index: unknown role, no text as content, bad tool calls.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: `messages` is {_short(messages)}, expected a list with at least one message")
    return [_clean(message, f"{place}: message {index}", notes) for index, message in enumerate(messages)]


def _clean(message: Any, where: str, notes: Notes) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {_short(message)}, expected an object with `role` and `content`")
    known = " (known: " + ", ".join((*ROLES, *ROLE_ALIASES)) + ")"
    role = message.get("role")
    if not isinstance(role, str) or role not in (*ROLES, *ROLE_ALIASES):
        raise DataError(f"{where} has the unknown role {role!r}{known}; rename it or take the row out")
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
    if "weight" in cleaned:
        _check_weight(cleaned["weight"], where)
    return cleaned


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where} has the content {_short(content)}, expected text, null or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{where}: content part {number} is of type {kind!r}; only text parts can be trained on")
        texts.append(text)
    return "".join(texts)


def _tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DataError(f"{where}: `tool_calls` is {_short(calls)}, expected a list")
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    cleaned = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: tool call {number} is {_short(call)}, expected `function` with a `name`")
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        cleaned.append({"type": "function", **call, "function": function} if "function" in call else function)
    return cleaned


def _arguments(arguments: Any) -> Any:
    """A string that holds a JSON object becomes that object, which templates iterate over; all else stays."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _check_weight(weight: Any, where: str) -> None:
    if isinstance(weight, int | float) and math.isfinite(weight):
        return
    raise DataError(f"{where} has the weight {weight!r}, expected a finite number (0 leaves the message out)")


def clean_tools(tools: Any, place: str) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of objects; a JSON string of such a list is read; None and [] mean no tools."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{place}: `tools` is a string but no JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{place}: `tools` is {_short(tools)}, expected a list of JSON schemas")
    return [dict(tool) for tool in tools]


def read_tools(path: str | Path) -> list[dict[str, Any]] | None:
    """Tool schemas of a whole file of rows, from a JSON file that holds a list of them."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: the tools file cannot be read ({error.strerror})") from error
    if not text.strip():
        raise DataError(f"{path}: the tools file is empty; expected a JSON list of tool schemas")
    return clean_tools(text, str(path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
