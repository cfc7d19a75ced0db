"""Traces: spans of OpenTelemetry GenAI and OpenInference, runs of LangSmith, observations of Langfuse.

Every LLM call of a trace is a row, and the trace is its episode. Spans of other kinds (tools, chains, agents) hold
nothing that is not in the calls' messages. Parents of spans are not needed: tokens show which call extends which.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from treetrain.data.formats.conversations import messages_in, read_requests
from treetrain.data.records import Format, Notes, Record, facts, field, look_up, objects, parsed
from treetrain.errors import DataError, quoted

OTHER = "spans and runs that are no LLM call are not rows"
UNANSWERED = "an LLM call without an answer is no row"
LANGCHAIN_ROLES = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}


# OpenTelemetry: GenAI and OpenInference


def read_spans(record: Record, notes: Notes) -> list[Record]:
    """A span, or an OTLP export with many."""
    rows = []
    for span in _spans(record):
        attributes = _attributes(span)
        if "gen_ai.output.messages" in attributes:
            prompt, answers, tools = _gen_ai(attributes)
        elif _nested(attributes, "llm.output_messages"):
            prompt, answers, tools = _open_inference(attributes)
        else:
            notes.add(OTHER)
            continue
        if not answers:
            notes.add(UNANSWERED)
        trace = next(
            (found for path in ("trace_id", "traceId", "context.trace_id") if (found := look_up(span, path))), None
        )
        known = (
            facts(record, span)
            | ({"episode": trace} if trace is not None else {})
            | ({"tools": tools} if tools else {})
        )
        rows += [known | {"messages": [*prompt, answer], "train": "last"} for answer in answers]
    return rows


def _spans(record: Record) -> Iterator[Record]:
    if "resourceSpans" not in record:
        yield record
        return
    for resource in objects(record, "resourceSpans"):
        for scope in objects(resource, "scopeSpans"):
            yield from objects(scope, "spans")


def _attributes(span: Record) -> dict[str, Any]:
    """The attributes by name; OTLP writes `{key, value: {stringValue: ...}}`, tables one column each."""
    given = span.get("attributes")
    if isinstance(given, list):
        return {str(look_up(entry, "key")): _otlp_value(look_up(entry, "value")) for entry in given}
    columns = {
        name.removeprefix("attributes."): value for name, value in span.items() if name.startswith("attributes.")
    }
    return columns | (dict(given) if isinstance(given, Mapping) else {})


def _otlp_value(value: Any) -> Any:
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    (kind, content), *_ = value.items()
    if kind == "arrayValue":
        return [_otlp_value(entry) for entry in objects(content, "values")]
    if kind == "kvlistValue":
        return {
            str(look_up(entry, "key")): _otlp_value(look_up(entry, "value")) for entry in objects(content, "values")
        }
    return content


def _gen_ai(attributes: Record) -> tuple[list[Any], list[Any], Any]:
    """Messages of `role` and `parts`; every output message is one choice."""
    values = {name.removeprefix("gen_ai."): parsed(value) for name, value in attributes.items()}
    prompt, answers = values.get("input.messages") or [], values["output.messages"]
    for name, value in (("input", prompt), ("output", answers)):
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise DataError(f"`gen_ai.{name}.messages` is {quoted(value)}, expected a list of messages")
    if instructions := values.get("system_instructions"):
        prompt = [{"role": "system", "content": instructions}, *prompt]
    answers = [{name: answer[name] for name in answer if name != "finish_reason"} for answer in answers]
    return prompt, answers, values.get("tool.definitions")


def _open_inference(attributes: Record) -> tuple[list[Any], list[Any], Any]:
    prompt, answers, tools = (
        _nested(attributes, f"llm.{name}") or [] for name in ("input_messages", "output_messages", "tools")
    )
    schemas = [parsed(look_up(tool, "tool.json_schema") or look_up(tool, "json_schema")) for tool in tools]
    return [_oi_message(one) for one in prompt], [_oi_message(one) for one in answers], schemas


def _nested(attributes: Record, prefix: str) -> Any:
    """Attributes `prefix.0.message.role` as nested lists and objects; exporters also write them nested already."""
    root: dict[str, Any] = {}
    for name, value in attributes.items():
        if name == prefix and value is not None:
            return _unflattened(parsed(value))
        if name.startswith(prefix + "."):
            at = root
            *path, last = name[len(prefix) + 1 :].split(".")
            for step in path:
                at = at.setdefault(step, {})
                if not isinstance(at, dict):
                    raise DataError(f"`{name}` is below `{step}`, which is a value")
            at[last] = value
    if not root:
        return look_up(attributes, prefix)
    return _lists(root)


def _unflattened(value: Any) -> Any:
    """Objects with dotted keys, as in `[{"message.role": ...}]`, nested."""
    if isinstance(value, list):
        return [_unflattened(entry) for entry in value]
    if isinstance(value, Mapping) and any("." in name for name in value):
        return _nested({f"x.{name}": entry for name, entry in value.items()}, "x")
    return value


def _lists(value: Any) -> Any:
    """Objects whose keys are numbers become lists."""
    if not isinstance(value, dict):
        return value
    if value and all(name.isdigit() for name in value):
        return [_lists(value[name]) for name in sorted(value, key=int)]
    return {name: _lists(entry) for name, entry in value.items()}


def _oi_message(entry: Any) -> dict[str, Any]:
    message = look_up(entry, "message") or entry
    if not isinstance(message, Mapping):
        raise DataError(f"a message is {quoted(message)}, expected `message.role` and `message.content`")
    made: dict[str, Any] = {
        name: message[name] for name in ("role", "content", "tool_call_id", "name") if name in message
    }
    calls = [look_up(call, "tool_call") or call for call in objects(message, "tool_calls")]
    parts: list[Any] = []
    for entry in objects(message, "contents"):
        part = look_up(entry, "message_content") or entry
        call = look_up(entry, "tool_call")
        if call is not None:
            calls = [one for one in calls if one.get("id") != look_up(call, "id")] + [call]
        elif part.get("type") == "image":
            parts.append({"type": "image", "image": part.get("image")})
        else:
            parts.append({"type": part.get("type"), "text": part.get("text")})
    if parts:
        made["content"] = parts
    return made | ({"tool_calls": calls} if calls else {})


def is_spans(record: Record) -> bool:
    """Whether a record is a span with attributes of either convention, or an OTLP export."""
    if "resourceSpans" in record:
        return True
    names = _attributes(record)
    return any(
        str(name).startswith(("gen_ai.", "llm.", "openinference.")) or name in ("llm", "openinference")
        for name in names
    )


# LangSmith and Langfuse


def read_langsmith(record: Record, notes: Notes) -> list[Record]:
    """A run with the runs below it (`child_runs`); the LLM runs are rows."""
    rows, pending = [], [record]
    while pending:
        run = pending.pop()
        pending += reversed(objects(run, "child_runs"))
        if run.get("run_type") != "llm":
            notes.add(OTHER)
            continue
        inputs, outputs = field(run, "inputs", dict), field(run, "outputs", dict)
        known = {"episode": run.get("trace_id"), "id": run.get("id")} | facts(run)
        tools = look_up(run, "extra.invocation_params.tools") or inputs.get("tools")
        messages = field(inputs, "messages", list)
        messages = messages[0] if messages and isinstance(messages[0], list) else messages  # LangChain: a batch of one
        if "generations" in outputs:
            first = look_up(outputs, "generations.0")
            choices = first if isinstance(first, list) else objects(outputs, "generations")
            answers = [look_up(choice, "message") for choice in choices]
        elif "choices" in outputs:
            answers = [look_up(choice, "message") for choice in objects(outputs, "choices")]
        else:
            answers = [outputs.get("output", outputs.get("message", outputs))]
        prompt = [_langchain(message) for message in messages]
        if not answers:
            notes.add(UNANSWERED)
        known |= {"tools": tools} if tools else {}
        rows += [known | {"messages": [*prompt, _langchain(answer)], "train": "last"} for answer in answers]
    return rows


def _langchain(message: Any) -> Any:
    """LangChain's serialised messages (`kwargs`, `type`) in OpenAI's form; others as they are."""
    content = look_up(message, "kwargs") or look_up(message, "data") or message
    if not isinstance(content, Mapping):
        raise DataError(f"a message is {quoted(message)}, expected an object")
    kind = content.get("type") or look_up(message, "type")
    if "role" in content or not isinstance(kind, str) or kind not in LANGCHAIN_ROLES:
        return dict(content)
    made = {"role": LANGCHAIN_ROLES[kind], "content": content.get("content")}
    made |= {name: content[name] for name in ("tool_call_id", "name") if content.get(name)}
    calls = content.get("tool_calls") or look_up(content, "additional_kwargs.tool_calls")
    return made | ({"tool_calls": calls} if calls else {})


def read_langfuse(record: Record, notes: Notes) -> list[Record]:
    """An observation, or a trace with its `observations`; the generations are rows."""
    rows = []
    scores = {str(score.get("name")): score.get("value") for score in objects(record, "scores")}
    reward = next((value for value in scores.values() if isinstance(value, int | float)), None)
    if len(scores) > 1:
        notes.add("the first of several scores is the reward")
    for one in objects(record, "observations") if "observations" in record else [record]:
        if one.get("type") != "GENERATION":
            notes.add(OTHER)
            continue
        given, answer = parsed(one.get("input")), messages_in(one.get("output"))
        request = {"messages": given} if isinstance(given, list) else given
        if isinstance(answer, str):
            found = parsed(answer)
            is_message = isinstance(found, dict) and not found.keys().isdisjoint(("role", "choices", "output"))
            answer = found if is_message else {"role": "assistant", "content": answer}
        answers = answer if isinstance(answer, list) else [answer]
        if not isinstance(answer, Mapping) or not {"choices", "output"} & answer.keys():
            answer = {"choices": [{"message": message} for message in answers]}
        episode = one.get("traceId", one.get("trace_id", record.get("id")))
        known = {"episode": episode, "id": one.get("id")} | ({} if reward is None else {"reward": reward})
        rows += [{**known, **row} for row in read_requests({"request": request, "response": answer}, notes)]
    return rows


SPANS = Format("spans", "attributes of OpenTelemetry GenAI or OpenInference", is_spans, read_spans)
LANGSMITH = Format("langsmith", "`run_type`", lambda record: "run_type" in record, read_langsmith)
LANGFUSE = Format(
    "langfuse",
    "`observations`, or `type` and `traceId`",
    lambda r: "observations" in r or ({"type", "input", "output"} <= r.keys() and ("traceId" in r or "trace_id" in r)),
    read_langfuse,
)
