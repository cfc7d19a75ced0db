"""Traces: spans of OpenTelemetry, and what tracing tools write in forms of their own.

Every LLM call of a trace is a row, and the trace is its episode. Spans of other kinds (tools, chains, agents) hold
nothing that is not in the calls' messages. Parents of spans are not needed: tokens show which call extends which. A
tool is a mapping: where it keeps the kind of an entry, its prompt, its answer, and the facts.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.conversations import call_rows, messages_in
from treetrain.logs.records import (
    CALL,
    Json,
    Notes,
    Record,
    TrackedRecord,
    facts,
    first_path,
    look_up,
    objects,
    parsed,
    picked,
    unknown,
)

OTHER = "spans and runs that are no LLM call are not rows"
# The names of prompts, answers and tools in the attributes of spans, by convention.
CONVENTIONS = (
    ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions"),
    ("llm.input_messages", "llm.output_messages", "llm.tools"),
    ("gen_ai.prompt", "gen_ai.completion", "llm.request.functions"),  # OpenLLMetry
    ("mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.chat.tools"),
    ("request_data", "response_data", "request_data.tools"),  # Logfire
    ("ai.prompt.messages", "ai.response", "ai.prompt.tools"),  # Vercel's AI SDK
    ("events", "events", "model_request_parameters.function_tools"),  # pydantic-ai
    ("gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response", ""),  # Google's ADK
)
# Attributes that say what a span is, and their values for LLM calls.
SPAN_KINDS = {
    "gen_ai.operation.name": "chat|text_completion|generate_content",
    "openinference.span.kind": "LLM",
    "mlflow.spanType": '"?(CHAT_MODEL|LLM)"?',
    "llm.request.type": "chat|completion",
    "ai.operationId": r"ai\.\w+\.do(Generate|Stream)",
}
SPAN_FACTS = {
    "episode": ("rollout_id", "trace_id", "traceId", "context.trace_id"),
    "model": ("gen_ai.request.model", "llm.model_name", "mlflow.llm.model", "llm.request.model"),
}
REWARD = "agentlightning.reward.0.value"
PROVIDER = "gen_ai.system"
"""Not a system prompt, but whose API was called."""


def reward_of(scores: Json, notes: Notes) -> float | None:
    """The first number among scores: a list or an object of numbers or of objects with `value`, `score` or `avg`."""
    scores = parsed(scores)
    given = list(scores.values()) if isinstance(scores, Mapping) else scores if isinstance(scores, list) else [scores]
    values = [
        first_path(one, "value", "score", "avg", "feedback.value") if isinstance(one, Mapping) else one for one in given
    ]
    values = [float(one) for one in values if isinstance(one, int | float)]
    if len(values) > 1:
        notes.add("the first of several scores is the reward")
    return values[0] if values else None


# OpenTelemetry: GenAI, OpenInference, OpenLLMetry, MLflow and Logfire


def read_spans(record: Record, notes: Notes) -> list[Record]:
    """A span, an OTLP export, or a trace of MLflow."""
    rows, spans = [], [(span, TrackedRecord(_attributes(span))) for span in _spans(record)]
    rewards = [reward for _, attributes in spans if (reward := look_up(attributes, REWARD)) is not None]
    for span, attributes in spans:
        kinds = [(attributes[name], kind) for name, kind in SPAN_KINDS.items() if name in attributes]
        found = next((one for one in CONVENTIONS if _nested(attributes, one[1])), None)
        if found is None or not all(re.fullmatch(kind, str(value)) for value, kind in kinds):
            notes.add(OTHER)
            continue
        prompt, answer, tools = (_nested(attributes, name) for name in found)
        if found[1] == "ai.response":
            answer = _sdk_answer(answer)
        elif found[1] == "events":
            prompt, answer = _of_events(objects({"events": answer}, "events"))
        system, scores = _nested(attributes, "gen_ai.system_instructions"), look_up(record, "info.assessments")
        known = {"system": parsed(system), "tools": [_schema(tool) for tool in tools or []]}
        known |= {"reward": rewards[-1] if rewards else reward_of(scores, notes)} | picked(span, **SPAN_FACTS)
        known = {name: value for name, value in known.items() if value not in (None, [])}
        known |= picked(attributes, **SPAN_FACTS) | facts(record, span) | {CALL: attributes}
        said, ends = _messages(answer), _nested(attributes, "gen_ai.response.finish_reasons")
        if isinstance(said, list) and isinstance(ends, list) and len(said) == len(ends):  # one for each choice
            said = [{"finish_reason": end} | dict(one) for one, end in zip(said, ends)]
        rows += call_rows(known, _messages(prompt), said, notes)
        unread = unknown(attributes, {*attributes.read, PROVIDER})
        notes.unused_keys((f"attributes.{name}", value) for name, value in unread)
    return rows


def _messages(value: Json) -> Json:
    return [_message(one) for one in value] if isinstance(value, list) else value


def _sdk_answer(said: Json) -> dict[str, Json]:
    """Read what the AI SDK has below `ai.response` as a message."""
    parts = [{"type": kind, "text": look_up(said, name)} for kind, name in (("reasoning",) * 2, ("text", "text"))]
    parts += [{"type": "text", "text": look_up(said, "object")}]
    calls = [one | {"type": "tool-call"} for one in objects(said, "toolCalls")]
    content = [part for part in parts if part["text"] is not None] + calls
    return {"role": "assistant", "content": content, "finish_reason": look_up(said, "finishReason")}


def _of_events(events: list[dict[str, Json]]) -> tuple[list[Json], list[Json]]:
    """The prompt and the answer of pydantic-ai's events; a response with several texts has an event for each."""
    asked: list[Json] = []
    answered: list[Json] = []
    for one in events:
        messages = answered if "message" in one else asked
        said = one.get("message") or one
        message = picked(said, role="role", content="content", tool_calls="tool_calls", name="name")
        if said.get("role") == "tool":
            message |= picked(one, tool_call_id="id")
        elif (content := message.get("content")) is not None:
            content = [content] if isinstance(content, str) else content
            message["content"] = [one if isinstance(one, str) else {"type": one.get("kind")} | one for one in content]
        if messages and message.get("role") == messages[-1].get("role") == "assistant":
            for name in message.keys() - {"role"}:
                messages[-1][name] = [*messages[-1].get(name, []), *message[name]]
        else:
            messages.append(message)
    return asked, answered


def _spans(record: Record) -> Iterator[Record]:
    if isinstance(found := first_path(record, "data.spans", "records"), list):  # MLflow; a rollout of Agent Lightning
        record = {"spans": found}
    if "resourceSpans" not in record:
        yield from objects(record, "spans") if "spans" in record else [record]
        return
    for resource in objects(record, "resourceSpans"):
        for scope in objects(resource, "scopeSpans"):
            yield from objects(scope, "spans")


def _attributes(span: Record) -> dict[str, Json]:
    """The attributes by name, of its events too that have messages.

    OTLP writes `{key, value: {stringValue: ...}}`, tables one column each.
    """
    events = [_attributes(event) for event in objects(span, "events")] if isinstance(span.get("events"), list) else []
    messages = {name: one[name] for one in events for name in one if name in CONVENTIONS[0]}
    given = span.get("attributes")
    if isinstance(given, list):
        return messages | {str(look_up(entry, "key")): _otlp_value(look_up(entry, "value")) for entry in given}
    columns = {name.removeprefix("attributes."): span[name] for name in span if name.startswith("attributes.")}
    return messages | columns | (dict(given) if isinstance(given, Mapping) else {})


def _otlp_value(value: Json) -> Json:
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


OPAQUE = ("arguments", "args", "json_schema", "parameters", "input", "output")
"""Values whose keys are a tool's own."""


def _nested(attributes: Record, prefix: str) -> Json:
    """The attribute `prefix`, or those below it (`prefix.0.message.role`), as nested lists and objects."""
    value = look_up(attributes, prefix)
    if value is None:
        below = {name[len(prefix) + 1 :]: attributes[name] for name in attributes if name.startswith(f"{prefix}.")}
        value = below or None
    return _unflattened(parsed(value))


def _unflattened(value: Json) -> Json:
    """Objects with dotted keys as nested ones, and objects whose keys are numbers as lists."""
    if isinstance(value, list):
        return [_unflattened(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    root: dict[str, Json] = {}
    for name, entry in value.items():
        first, _, rest = str(name).partition(".")
        below = root.setdefault(first, {}) if rest else root
        if not isinstance(below, dict) or (not rest and isinstance(root.get(first), dict)):
            raise DataError(f"`{name}` is below `{first}`, which is a value")
        below[rest or first] = dict(entry) if isinstance(entry, Mapping) else entry
    root = {name: entry if name in OPAQUE else _unflattened(entry) for name, entry in root.items()}
    return [root[name] for name in sorted(root, key=int)] if root and all(map(str.isdigit, root)) else root


def _schema(tool: Json) -> Json:
    schema = first_path(tool, "tool.json_schema", "json_schema")
    return parsed(tool if schema is None else schema)


def _message(entry: Json) -> Json:
    """A message of OpenInference or OpenLLMetry in OpenAI's form; others as they are."""
    message = look_up(entry, "message") or entry
    if isinstance(message, list):  # LangChain: a batch of one
        return message
    if not isinstance(message, Mapping):
        raise DataError(f"a message is {quoted(message)}, expected an object with a role and content")
    if message is entry and not isinstance(message.get("content"), str) and "contents" not in message:
        return message
    parts = [look_up(one, "message_content") or one for one in objects(message, "contents")]
    calls = [look_up(one, "tool_call") or one for one in objects(message, "tool_calls")]
    inside = [call for part in parts if (call := look_up(part, "tool_call")) is not None]
    known = [call.get("id") for call in calls]
    calls += [call for call in inside if look_up(call, "id") not in known]
    made: dict[str, Json] = {name: message[name] for name in message if name not in ("contents", "tool_calls")}
    # OpenLLMetry writes parts as JSON.
    made["content"] = [one for one in parts if "tool_call" not in one] or messages_in(message.get("content"))
    return made | ({"tool_calls": calls} if calls else {})


def is_spans(record: Record) -> bool:
    """Whether a record is a span with attributes of a known convention, or an export of several."""
    spans = [record] if "resourceSpans" in record else list(_spans(record))
    if not spans or "resourceSpans" in record:
        return bool(spans)
    starts = ("gen_ai.", "ai.", "llm.", "openinference.", "mlflow.", "agentlightning.", "traceloop.", "request_data")
    names = [str(name) for span in spans for name in _attributes(span)]
    return any(name.startswith(starts) or name in ("llm", "openinference", "gen_ai") for name in names)


def rollout_of(place: str, record: Record) -> Json:
    """Agent Lightning's spans: a span of its own has the reward of a rollout."""
    return ("rollout", record["rollout_id"], record.get("attempt_id")) if "rollout_id" in record else None


# Tools with records of their own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Where a tracing tool keeps its LLM calls; every field but `calls` is a path or several, of which one is there."""

    kind: str = ""
    """A field that says that an entry is a call; without it, all entries below the record are."""
    calls: str = ""
    """The values of `kind` that LLM calls have, as a regular expression."""
    below: str = ""
    """The entries below an entry, or in a trace."""
    prompt: tuple[str, ...] = ("input", "inputs")
    answer: tuple[str, ...] = ("output", "outputs")
    system: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    model: tuple[str, ...] = ("model", "providedModelName")
    episode: tuple[str, ...] = ("trace_id",)
    rewards: tuple[str, ...] = ("scores",)
    names: tuple[str, ...] = ("id",)

    def __call__(self, record: Record, notes: Notes) -> list[Record]:
        """The rows of an entry and of those below it."""
        scored = [record, *objects(record, "records")]
        found = (reward_of(first_path(one, *self.rewards), notes) for one in scored)
        rows, pending = [], [(record, next((reward for reward in found if reward is not None), None))]
        while pending:
            entry, reward = pending.pop()
            below = [*(objects(entry, self.below) if self.below else []), *objects(entry, "records")]
            pending += [(one, reward) for one in reversed(below)]
            if not (re.search(self.calls, str(look_up(entry, self.kind))) if self.kind else entry is not record):
                if entry is not record or not below:
                    notes.add(OTHER)
                continue
            own = reward_of(first_path(entry, *self.rewards), notes) if entry is not record else None
            known = {} if entry is record else picked(record, episode="id")
            known |= picked({"reward": reward if own is None else own}, reward="reward")
            known |= picked(entry, id=self.names, episode=self.episode, model=self.model)
            known |= picked(entry, system=self.system, tools=self.tools)
            prompt, answer = (first_path(entry, *paths) for paths in (self.prompt, self.answer))
            if prompt is None and answer is None:
                notes.add("an LLM call of which the log has no messages is no row")
                continue
            rows += call_rows(known | facts(entry) | {CALL: entry}, prompt, answer, notes)
        return rows


AREAL = Log(
    prompt=("messages", "request"),
    answer=("output_message_list", "response"),
    rewards=("reward",),
    below="interactions",
    names=("interaction_id",),
)


def read_areal(record: Record, notes: Notes) -> list[Record]:
    """AReaL's interactions, by id or as a list, each one LLM call."""
    return AREAL(record if "interactions" in record else {"interactions": list(record.values())}, notes)


def is_areal(record: Record) -> bool:
    """Whether a record is AReaL's interactions, by id or as a list."""
    first = look_up(record, "interactions.0") or next(iter(record.values()), None)
    return isinstance(first, Mapping) and (
        "interaction_id" in first or {"request", "response", "reward"} <= first.keys()
    )
