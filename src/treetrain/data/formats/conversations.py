"""Conversations: OpenAI's and Anthropic's messages, logs of requests and responses, ShareGPT, and TRL's columns."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from treetrain.data.records import Format, Notes, Record, facts, field, look_up, objects, parsed
from treetrain.errors import DataError, quoted

NOT_TRAINED = {"weight": 0}


def untrained(messages: Any) -> list[Any]:
    """Messages that are context only."""
    messages = messages if isinstance(messages, list) else [messages]
    return [message | NOT_TRAINED if isinstance(message, dict) else message for message in messages]


def messages_in(value: Any) -> Any:
    """Parse text that holds a JSON list of messages or items; other text stays text, whatever it looks like."""
    found = parsed(value)
    are_messages = (
        isinstance(found, list)
        and len(found) > 0
        and all(isinstance(one, dict) and {"role", "type"} & one.keys() for one in found)
    )
    return found if are_messages or not isinstance(value, str) else value


# Requests and responses


def request_of(record: Record) -> dict[str, Any]:
    """The body of the request in a log record, wherever loggers put it; the record itself if it is nowhere else."""
    paths = ("request.body", "request_body", "body", "request", "input", "inputs", "kwargs")
    found = (parsed(look_up(record, path)) for path in paths)
    return next(
        (body for body in found if isinstance(body, dict) and ("messages" in body or "input" in body)), dict(record)
    )


def response_of(record: Record) -> Any:
    """The body of the response in a log record; None if there is none."""
    for path in ("response.body", "response_body", "response", "output", "outputs", "completion"):
        body = parsed(look_up(record, path))
        if isinstance(body, dict) and ("choices" in body or "output" in body or "content" in body):
            return body
        if path == "output" and isinstance(body, list):
            return {"output": body}
    return dict(record) if "choices" in record else None


def read_requests(record: Record, notes: Notes) -> list[Record]:
    """One LLM call: its messages are context, and every choice of the response is a row that is trained."""
    request, response = request_of(record), response_of(record)
    known = facts(record, request, response)
    if request.get("previous_response_id") is not None:
        raise DataError("`previous_response_id` is given, so the prompt is in another record; log whole inputs")
    prompt = conversation_of(request)
    if "choices" in response:
        answers = [[field(choice, "message", dict)] for choice in objects(response, "choices")]
    elif "output" in response:
        answers = [items_to_messages(field(response, "output", list))]
    else:
        answers = [[{"role": "assistant", "content": response["content"]}]]
    if not answers:
        raise DataError("`response.choices` is [], expected at least one")
    shared = {name: request[name] for name in ("tools", "functions") if request.get(name)}
    system = request.get("system") or request.get("instructions")
    if system is not None:
        shared["system"] = system
    return [known | shared | {"messages": prompt + answer, "train": "last"} for answer in answers]


def conversation_of(request: Record) -> list[Any]:
    """The messages of a request to the chat-completions, the responses or Anthropic's API."""
    if "messages" in request:
        return list(field(request, "messages", list))
    given = messages_in(request.get("input"))
    return (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else items_to_messages(field(request, "input", list))
    )


def items_to_messages(items: list[Any]) -> list[Any]:
    """Items of the responses API as messages; what the model wrote in a row becomes one message."""
    messages: list[Any] = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError(f"item {number} is {quoted(item)}, expected an object")
        kind = item.get("type", "message")
        role = item.get("role", "assistant") if kind == "message" else "assistant"
        content = item.get("content") if kind == "message" else [item]
        if kind == "reasoning":
            texts = [*objects(item, "summary"), *objects(item, "content")]
            if not texts and item.get("encrypted_content"):
                raise DataError(
                    f"item {number} has encrypted reasoning, which the model wrote and the log does not show"
                )
            content = [part | {"type": "reasoning"} for part in texts]
        elif kind == "function_call_output":
            role = "user"  # its part becomes a tool message
        elif kind not in ("message", "function_call"):
            raise DataError(f"item {number} is of type {quoted(kind)}; known are message, reasoning, function_call")
        content = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
        if role == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += content
        else:
            messages.append({"role": role, "content": content})
    return messages


def is_request(record: Record) -> bool:
    """Whether a record holds a request and its response."""
    request, response = request_of(record), response_of(record)
    return response is not None and ("messages" in request or "input" in request)


# Data sets


def read_chat(record: Record, notes: Notes) -> list[Record]:
    """Our own form: `messages`, OpenAI's or Anthropic's, with `system` and `tools` beside them."""
    return [dict(record) | {"messages": field(record, "messages", list)}]


def read_sharegpt(record: Record, notes: Notes) -> list[Record]:
    """`conversations` of `from` and `value`."""
    messages = []
    for turn in objects(record, "conversations"):
        role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role == "function_call":
            call = parsed(value)
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": call if isinstance(call, list) else [call]}
            )
        else:
            messages.append({name: turn[name] for name in turn if name not in ("from", "value")})
            messages[-1] |= {"role": role, "content": value}
    row = {name: value for name, value in record.items() if name != "conversations"}
    return [row | {"messages": messages}]


def read_completion(record: Record, notes: Notes) -> list[Record]:
    """TRL's `prompt` and `completion`, texts or messages, with the `label` of unpaired preferences."""
    label = record.get("label")
    known = {name: value for name, value in record.items() if name not in ("prompt", "completion", "label")}
    known |= {} if label is None else {"chosen": bool(label) if label in (0, 1) else label}
    return [_completed(known, record.get("prompt"), record["completion"])]


def read_preference(record: Record, notes: Notes) -> list[Record]:
    """A `chosen` and a `rejected` answer, texts or messages, with a `prompt` or beginning alike."""
    prompt, both = record.get("prompt"), {name: messages_in(record[name]) for name in ("chosen", "rejected")}
    known = {name: value for name, value in record.items() if name not in ("prompt", *both)}
    chosen, rejected = both["chosen"], both["rejected"]
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise DataError(
            f"`chosen` is {quoted(chosen)} and `rejected` {quoted(rejected)}; expected two texts or two lists"
        )
    if prompt is None or (isinstance(chosen, list) and isinstance(prompt, str)):
        # The prompt is what both begin with. Texts are cut where they differ, as TRL does.
        alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))))
        prompt, both = chosen[:alike], {name: value[alike:] for name, value in both.items()}
    pair = record.get("pair", record.get("id"))
    known = known | {"pair": notes.place if pair is None else pair}
    name = known.pop("id", notes.place)
    return [
        _completed(known | {"id": f"{name}/{which}", "chosen": which == "chosen"}, prompt, answer)
        for which, answer in both.items()
    ]


def _completed(known: Record, prompt: Any, completion: Any) -> Record:
    prompt, completion = messages_in(prompt), messages_in(completion)
    if isinstance(completion, str) and isinstance(prompt, str | None):
        return {**known, "prompt": prompt or "", "completion": completion}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list) or not isinstance(prompt or [], list):
        raise DataError(f"the prompt is {quoted(prompt)}, the answer {quoted(completion)}; expected texts or messages")
    return {**known, "messages": untrained(prompt or []) + completion}


CHAT = Format("chat", "`messages`", lambda record: isinstance(parsed(record.get("messages")), list), read_chat)
REQUESTS = Format("requests", "a request and its response", is_request, read_requests)
SHAREGPT = Format("sharegpt", "`conversations`", lambda record: "conversations" in record, read_sharegpt)
PREFERENCE = Format(
    "preference", "`chosen` and `rejected`", lambda record: {"chosen", "rejected"} <= record.keys(), read_preference
)
COMPLETION = Format("completion", "`prompt` and `completion`", lambda record: "completion" in record, read_completion)
