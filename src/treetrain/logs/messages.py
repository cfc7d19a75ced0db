"""Messages and tool schemas as all providers write them, in the one form that chat templates know: OpenAI's.

Content may be text or a list of parts: those of OpenAI's two APIs, of Anthropic and of OpenTelemetry. Thinking becomes
`reasoning_content`, calls become `tool_calls`, and every tool result a message of its own.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from treetrain.core.errors import DataError, quoted
from treetrain.logs.records import (
    Json,
    Notes,
    Record,
    Tools,
    first_of,
    first_path,
    look_up,
    objects,
    parse_json,
    parsed,
    picked,
)

Message = dict[str, Json]
PlaceImage = Callable[[Json, str], str]

ROLES = ("system", "user", "assistant", "tool")
# Other names of the same roles. Templates know only the four above and skip others silently.
ROLE_ALIASES = {"developer": "system", "human": "user", "gpt": "assistant", "ai": "assistant", "model": "assistant"}
ROLE_ALIASES |= dict.fromkeys(("function", "observation", "tool_response"), "tool")
ROLE_ALIASES |= {"tool-call": "assistant", "tool-response": "user"}  # smolagents, as it sends them
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
TRAIN_KEYS = ("train", "trainable", "training", "loss", "loss_mask", "step_loss_mask")
FINISH_KEYS = ("finish_reason", "stop_reason", "finishReason", "stopReason", "done_reason", "status")
CUT = ("length", "max_tokens", "max_output_tokens", "incomplete", "model_length", "model_context_window_exceeded")
CUT += (
    "content_filter",
    "content-filter",
    "content_filtered",
    "guardrail_intervened",
    "safety",
    "recitation",
    "abort",
    "error",
)
"""Finish reasons of answers that were cut off, in the words of several APIs."""
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "weight", "advantage", "reward", "cut"}
MESSAGE_KEYS |= set(REASONING_KEYS)
"""Keys that are used whatever the template."""
CONTENT_KEYS = ("content", "parts", "blocks", "refusal", "audio")
IGNORED_KEYS = (*FINISH_KEYS, *CONTENT_KEYS, *REASONING_KEYS, "tool_calls", "function_call", "annotations")
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
REASONING_PARTS = ("thinking", "reasoning")
CALL_PARTS = ("tool_use", "tool_call", "function_call")
RESULT_PARTS = ("tool_result", "tool_call_response", "function_call_output")
DASHED = {"tool-call": "tool_call", "tool-result": "tool_result", "tool-return": "tool_result"}
# Gemini's and Bedrock's parts have a field for each type.
KEYED_PARTS = {"text": "text", "inlineData": "image", "inline_data": "image", "image": "image"}
KEYED_PARTS |= dict.fromkeys(("functionCall", "function_call", "toolUse"), "tool_use")
KEYED_PARTS |= dict.fromkeys(("functionResponse", "function_response", "toolResult"), "tool_result")
KEYED_PARTS |= {"reasoningContent": "reasoning", "reasoningText": "reasoning"}
# LangChain's message types, as they are and as names of their classes
LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
LANGCHAIN_ROLES |= {f"{name.capitalize()}Message": role for name, role in LANGCHAIN_ROLES.items()}
LANGCHAIN_ROLES |= {f"{name}Chunk": role for name, role in LANGCHAIN_ROLES.items() if name.endswith("Message")}
THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
CALL_BLOCK = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
IMAGE_PARTS = ("image", "image_url", "input_image")


def clean_messages(messages: Json, notes: Notes, place_image: PlaceImage | None = None) -> list[Message]:
    """Normalise messages for templates: text content, tool-call arguments as objects, no null fields.

    Args:
        place_image: gives the text in the place of an image, from its part and where it is; None refuses images.

    Raises:
        DataError: an unknown role, content that is not text, bad tool calls; the message names the index.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"`messages` is {quoted(messages)}, expected a list with at least one message")
    return [clean for where, one in _steps(messages, notes) for clean in _clean(one, where, notes, place_image)]


def _steps(messages: list[Json], notes: Notes) -> Iterator[tuple[str, Json]]:
    """Messages with their places; UI messages of Vercel's AI SDK step by step, pydantic-ai's requests part by part."""
    given = None
    for number, one in enumerate(messages):
        where, parts = f"message {number}", look_up(one, "parts")
        kinds = [_kind_of(part) for part in parts] if isinstance(parts, list) else []
        if kinds and "role" not in one and one.get("kind") in ("request", "response"):
            instructions = one.get("instructions")
            if given is not None and instructions not in (None, given):
                raise DataError(f"{where} has other `instructions` than the first; read the spans of its calls instead")
            if given is None and instructions is not None:
                yield where, {"role": "system", "content": (given := instructions)}
            if one["kind"] == "response":
                yield where, {"role": "assistant", "content": parts, "finish_reason": one.get("finish_reason")}
                continue
            for part, kind in zip(objects(one, "parts"), kinds):
                if kind == "retry-prompt":
                    notes.add("pydantic-ai's log lacks the words that it writes around a retry prompt", where)
                    kind = "tool-return" if part.get("tool_name") else "user-prompt"
                content = [part | {"type": "tool-result"}] if kind == "tool-return" else part.get("content")
                role = {"system-prompt": "system", "user-prompt": "user", "tool-return": "user"}.get(str(kind))
                if role is None:
                    raise DataError(f"{where} has a part of the kind {quoted(kind)}, which is not known in a request")
                yield where, {"role": role, "content": content}
        elif any("-" in str(kind) for kind in kinds):
            yield from ((where, step) for step in _ui_steps(one, where, notes))
        else:
            yield where, one


def _ui_steps(message: Record, where: str, notes: Notes) -> Iterator[Message]:
    """The LLM calls that one UI message holds, each followed by the results of its tools."""
    rest = {name: value for name, value in message.items() if name not in ("parts", "content", "toolInvocations")}
    said: list[Json] = []
    results: list[Json] = []
    for part in [*objects(message, "parts"), {"type": "step-start"}]:
        kind = str(_kind_of(part))
        if kind == "step-start":
            yield from [rest | {"content": said}] if said else []
            yield from [{"role": "user", "content": results}] if results else []
            said, results = [], []
        elif kind.startswith(("tool-", "dynamic-tool")):
            inner = "toolInvocation"  # before version 5
            name = first_path(part, "toolName", f"{inner}.toolName") or kind.removeprefix("tool-")
            call = {"name": name, "id": first_path(part, "toolCallId", f"{inner}.toolCallId")}
            given, value = first_path(part, "input", f"{inner}.args"), first_path(part, "output", f"{inner}.result")
            said.append(call | {"type": "tool_call", "input": given})
            if (value := part.get("errorText") if value is None else value) is not None:
                results.append(call | {"type": "tool_result", "content": value})
        elif kind.startswith(("source-", "data-")):
            notes.add(f"a part of type {kind} of a UI message is not in the row", where)
        else:
            said.append(part)


def _clean(message: Json, where: str, notes: Notes, place_image: PlaceImage | None) -> Iterator[Message]:
    """The message, and before it a message for every tool result in it."""
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {quoted(message)}, expected an object with `role` and `content`")
    message = unwrapped(message)
    cleaned = _with_weight(message, where, notes)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    results = 0
    for number, part in enumerate(_content(message, where)):
        here = f"{where}: content part {number}"
        part = _typed(part)
        kind = _kind_of(part)
        if kind in RESULT_PARTS:
            if texts:
                yield cleaned | {"content": "".join(texts)}
            texts, results = [], results + 1
            value = first_of(part, "content", "response", "result", "output", "tools")
            name = first_of(part, "tool_use_id", "toolUseId", "call_id", "id")
            result = {"role": "tool", "content": _result(value, here, place_image)}
            yield result if name is None else result | {"tool_call_id": name}
        elif kind in CALL_PARTS:
            arguments = first_of(part, "input", "arguments", "args")
            name = first_of(part, "call_id", "toolUseId", "id")
            calls.append({"id": name, "name": part.get("name"), "arguments": arguments})
        elif kind == "redacted_thinking":
            notes.add("redacted thinking is not in the log, so it is not in the row", where)
        else:
            (thoughts if kind in REASONING_PARTS else texts).append(_part(part, kind, here, place_image))
    if thoughts:
        cleaned["reasoning_content"] = "\n".join(thoughts)
    elif (reasoning := first_of(message, *REASONING_KEYS)) is not None:
        cleaned["reasoning_content"] = reasoning
    if not isinstance(cleaned.get("reasoning_content", ""), str):
        raise DataError(f"{where} has the reasoning {quoted(cleaned['reasoning_content'])}, expected text")
    function = message.get("function_call")  # the form before `tool_calls`
    beside = message.get("tool_calls") or ([{"function": function}] if function else [])
    if not isinstance(beside, list):
        raise DataError(f"{where}: `tool_calls` is {quoted(beside)}, expected a list")
    names = [look_up(call, "id") for call in beside]  # LangChain lists Anthropic's calls in both places
    if calls := [*beside, *(call for call in calls if call["id"] is None or call["id"] not in names)]:
        cleaned["tool_calls"] = [_tool_call(call, f"{where}: tool call {number}") for number, call in enumerate(calls)]
    if texts or not results or calls:
        yield _said_once(cleaned | {"content": "".join(texts)}, where, notes)


def _with_weight(message: Record, where: str, notes: Notes) -> Message:
    """The message without what is said in it: its role as templates know it, and its weight in the loss."""
    role = message.get("role")
    if not isinstance(role, str) or role not in (*ROLES, *ROLE_ALIASES):
        known = ", ".join((*ROLES, *ROLE_ALIASES))
        raise DataError(f"{where} has the unknown role {quoted(role)} (known: {known}); rename it or take the row out")
    if role in ROLE_ALIASES:
        notes.add(f"role {role!r} is read as {ROLE_ALIASES[role]!r}", where)
    cleaned = {name: value for name, value in message.items() if value is not None and name not in IGNORED_KEYS}
    if str(first_of(message, *FINISH_KEYS)).lower() in CUT:
        cleaned["cut"] = True
    if role == "tool-call":  # the harness wrote it
        cleaned["weight"] = 0
    cleaned["role"] = ROLE_ALIASES.get(role, role)
    if "train_detail" in cleaned:
        raise DataError(
            f"{where} has `train_detail`, parts of a message that are trained, which is not read; take token rows"
        )
    if "loss_weight" in cleaned and "weight" not in cleaned:
        cleaned["weight"] = cleaned.pop("loss_weight")
    for name in ("weight", "advantage", "reward"):
        if name in cleaned and not is_number(cleaned[name]):
            cure = " (0 leaves the message out)" if name == "weight" else ""
            raise DataError(f"{where} has the {name} {quoted(cleaned[name])}, expected a finite number{cure}")
    for name in [name for name in TRAIN_KEYS if name in cleaned]:
        trained = cleaned.pop(name)
        if not isinstance(trained, bool) and trained not in (0, 1):
            raise DataError(f"{where}: `{name}` is {quoted(trained)}, expected true or false, or 1 or 0")
        if trained and cleaned["role"] != "assistant":
            notes.add(f"a {cleaned['role']} message is marked to be trained; only assistant messages are", where)
        cleaned["weight"] = cleaned.get("weight", 1.0) * trained
    return cleaned


def _content(message: Record, where: str) -> list[Json]:
    """The contents of a message as a list of parts; a text is one part."""
    content = next((message[name] for name in CONTENT_KEYS if message.get(name) is not None), "")
    if message.keys().isdisjoint((*CONTENT_KEYS, *REASONING_KEYS, "tool_calls", "function_call")):
        known = (*MESSAGE_KEYS, *FINISH_KEYS, "id", "type", "model")  # a table drops a `content` that is null
        if others := [name for name in message if name not in known and isinstance(message[name], str | list)]:
            raise DataError(f"{where} has no `content`, but {', '.join(map(quoted, others))}; name the text `content`")
    if not isinstance(content, str | list):
        raise DataError(f"{where} has the content {quoted(content)}, expected text, null or a list of parts")
    return [content] if isinstance(content, str) else content


def _said_once(message: Message, where: str, notes: Notes) -> Message:
    """The message without a thought or calls in its text that it also has beside the text."""
    text, thought = message["content"], message.get("reasoning_content", "").strip()
    if thought and (block := THINK_BLOCK.match(text)) and block[1].strip() == thought:
        text = text[block.end() :]
        notes.add("an answer has its thinking in the text and beside it; it is read once", where)
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    for block in CALL_BLOCK.finditer(text) if calls else ():
        call = parsed(block[1])
        if isinstance(call, dict) and (call.get("name"), call.get("arguments")) in calls:
            text = text.replace(block[0], "", 1)
            notes.add("an answer has a call in the text and beside it; it is read once", where)
    if any(len(getattr(arguments, "text", "")) > 8 and arguments.text in text for _, arguments in calls):
        notes.add("the text of an answer has the arguments of a call that is also beside it; the row has both", where)
    return message | {"content": text}


def unwrapped(message: Record) -> dict[str, Json]:
    """A message in OpenAI's form where it is one of LangChain's, as objects or serialised; others as they are."""
    if "role" not in message and isinstance(message.get("content"), Mapping):  # events of Google's ADK
        message = message["content"]
    content = first_of(message, "kwargs", "data")
    content = content if isinstance(content, Mapping) and "role" not in message else message
    kind = content.get("type") or message.get("type")
    if kind in (None, "constructor") and isinstance(message.get("id"), list):  # serialised: the path of its class
        kind = look_up(message["id"], str(len(message["id"]) - 1))
    if "role" in content or not isinstance(kind, str) or kind not in LANGCHAIN_ROLES or "content" not in content:
        return dict(content if content.get("role") else message)
    made = {name: content[name] for name in ("content", "tool_call_id", "name") if content.get(name) is not None}
    calls = content.get("tool_calls") or look_up(content, "additional_kwargs.tool_calls")
    if invalid := objects(content, "invalid_tool_calls"):
        calls = [*objects({"tool_calls": calls}, "tool_calls"), *invalid]
    made |= {"role": LANGCHAIN_ROLES[kind]} | ({"tool_calls": calls} if calls else {})
    finish = tuple(f"response_metadata.{name}" for name in FINISH_KEYS)
    return made | picked(content, finish_reason=finish, reasoning_content="additional_kwargs.reasoning_content")


def _typed(part: Json) -> Json:
    """A content part with its `type`, which Gemini's and Bedrock's have as the name of a field."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and (kind := str(_kind_of(part))) in DASHED:  # the AI SDK's and pydantic-ai's
        value = first_of(part, "output", "result", "content")
        value = value["value"] if isinstance(value, Mapping) and {"type", "value"} <= value.keys() else value
        name, call = first_of(part, "toolName", "tool_name"), first_of(part, "toolCallId", "tool_call_id")
        return {**part, "type": DASHED[kind], "name": name, "id": call, "content": value}
    if not isinstance(part, Mapping) or _kind_of(part) is not None:
        return part
    name = next((name for name in KEYED_PARTS if part.get(name) is not None), None)
    if name is None:
        return part
    held = part[name]
    if name == "text":
        return {"type": "reasoning" if part.get("thought") else "text", "text": held}
    return {**(held if isinstance(held, Mapping) else {"content": held}), "type": KEYED_PARTS[name]}


def _part(part: Json, kind: Json, here: str, place_image: PlaceImage | None) -> str:
    is_image = kind in IMAGE_PARTS or (kind in ("blob", "uri", "file") and part.get("modality") == "image")
    if is_image and place_image is not None:
        return place_image(part, here)
    text = None
    if kind in (*TEXT_PARTS, *REASONING_PARTS):
        text = first_of(part, "text", "content", "value", "thinking", "reasoning", "refusal", "summary")
        if isinstance(text, list):  # the summary of the responses API
            text = "\n".join(_part(one, _kind_of(one), here, place_image) for one in text)
    if not isinstance(text, str):
        hint = (
            "; in Python a processor as the tokenizer prepares images, and --images key inspects them"
            if is_image
            else ""
        )
        raise DataError(f"{here} is of type {quoted(kind)}; only text parts can be trained on{hint}")
    return text


def _kind_of(part: Json) -> Json:
    return first_of(part, "type", "part_kind", "block_type") if isinstance(part, Mapping) else None


def _result(value: Json, here: str, place_image: PlaceImage | None) -> str:
    """A tool's result as text: text parts are joined, other values written as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(look_up(part, "type"), str) for part in value):
        return "".join(_part(part, _kind_of(part), here, place_image) for part in value)
    return json.dumps(value, ensure_ascii=False)


def says_nothing(message: Message) -> bool:
    """Whether an answer has no text, no thinking and no calls."""
    return not message["content"].strip() and not any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))


def is_number(value: Json) -> bool:
    """Whether a value is a finite number."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _tool_call(call: Json, where: str) -> dict[str, Json]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, str):  # Inspect AI
        function = {"name": function, "arguments": call.get("arguments")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} is {quoted(call)}, expected `function` with a `name`")
    cleaned = {"type": "function"} | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
    try:
        arguments = _arguments(first_of(function, "arguments", "args"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return cleaned | {"function": {"name": function["name"], "arguments": arguments}}


class Arguments(dict[str, Json]):
    """The arguments of a call, and the JSON text that a log has for them, which some templates write as it is."""

    def __init__(self, arguments: Record, text: str) -> None:
        super().__init__(arguments)
        self.text = str(text)


def _arguments(arguments: Json) -> Json:
    """Parse a string that holds a JSON object, since templates iterate over it; other values stay."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    found = parsed(arguments, strict=True)
    return Arguments(found, arguments) if isinstance(found, dict) else arguments


def clean_tools(tools: Json) -> Tools:
    """Tool schemas in OpenAI's form as a list of objects, also from a JSON string; None and [] mean no tools.

    Anthropic's tools (`input_schema`) and those of the responses API (no `function`) are rewritten. Other objects stay
    as they are, since templates write them as JSON.
    """
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except DataError as error:
            raise DataError(f"`tools`: {error}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"`tools` is no JSON list of tool schemas ({error})") from error
    if not tools:
        return None
    if isinstance(tools, Sequence) and len(tools) == 1:  # Gemini's
        tools = first_path(tools, "0.functionDeclarations", "0.function_declarations") or tools
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"`tools` is {quoted(tools)}, expected a list of JSON schemas")
    return [_clean_tool(tool) for tool in tools]


def _clean_tool(tool: Record) -> dict[str, Json]:
    tool = tool.get("toolSpec", tool)  # Bedrock's
    schema = first_of(tool, "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")
    schema = first_path(schema, "json") or schema
    if "name" not in tool or "function" in tool or (schema is None and "parameters" not in tool):
        return dict(tool)
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": parsed(schema or tool.get("parameters") or {})}}


def read_tools(path: str | Path) -> Tools:
    """Read tool schemas from a JSON file that holds a list."""
    try:
        return clean_tools(Path(path).read_text(encoding="utf-8") or " ")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the tools file cannot be read ({error})") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
