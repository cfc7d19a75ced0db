"""Conversations: OpenAI's and Anthropic's messages, logs of requests and responses, ShareGPT, and TRL's columns.

`prompt_of` and `answers_of` read what a model was sent and what it answered, in the words of every API and logger that
we know. What is in the prompt is never trained; what is in an answer and is not known is an error.
"""

import re
from collections.abc import Mapping
from itertools import takewhile

from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.tokens import sampled_row, sets_of
from treetrain.logs.messages import CALL_PARTS, FINISH_KEYS, REASONING_PARTS, ROLE_ALIASES, ROLES, TEXT_PARTS, unwrapped
from treetrain.logs.records import Json, Notes, Record, facts, field, first_path, look_up, objects, parsed, picked

NOT_TRAINED = {"weight": 0}
MODEL_ROLES = ("assistant", "model", "ai")
PROMPTS = ("messages", "input", "contents", "prompt", "inputs")
SYSTEMS = ("system", "instructions", "systemInstruction.parts", "system_instruction.parts")
SYSTEMS += ("systemInstruction", "system_instruction", "config.system_instruction")
TOOLS = ("tools", "functions", "config.tools", "optional_params.tools", "model_parameters.tools", "kwargs.tools")
TOOLS += ("toolConfig.tools",)
REQUEST_PATHS = ("request.body", "request_body", "body", "request", "responses_create_params")
REQUEST_PATHS += ("input", "inputs", "kwargs", "proxy_server_request", "input.inputBodyJson", "reqPayload")
REQUEST_PATHS += ("model_input_messages",)
RESPONSE_PATHS = ("response.body", "response_body", "response", "output", "outputs", "completion", "output_message")
RESPONSE_PATHS += ("output.outputBodyJson", "respPayload", "model_output_message", "original_response")
TEXTS_AT = ("response", "output", "completion")
REPR = re.compile(r"(Model|Generate|Chat|Parsed|AI|LLM)\w*\(\w+=|content=.* response_metadata=", re.DOTALL)
ANSWERS = ("choices", "candidates", "generations", "output", "message", "messages", "content")
SAID = ("content", "parts", "text", "tool_calls", "function_call", "refusal")
PARTS = (*TEXT_PARTS, *CALL_PARTS, *REASONING_PARTS)
MESSAGES_AT = ("messages", "values.messages", "channel_values.messages")
ITEMS = ("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
RESULT_ITEMS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")
# Tools that the API runs itself, and its compactions: the log does not have what the model wrote or saw of them.
HOSTED_ITEMS = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call")
HOSTED_ITEMS += ("mcp_list_tools", "compaction", "context_compaction", "ghost_snapshot")
ALL_ITEMS = (*ITEMS, *RESULT_ITEMS, *HOSTED_ITEMS)


def untrained(messages: Json) -> list[Json]:
    """Messages that are context only."""
    messages = messages if isinstance(messages, list) else [messages]
    return [message | NOT_TRAINED if isinstance(message, dict) else message for message in messages]


def messages_in(value: Json) -> Json:
    """Parse text that holds a JSON list of messages or items; other text stays text, whatever it looks like."""
    found = parsed(value)
    return found if _are_messages(found) or not isinstance(value, str) else value


def _are_messages(value: Json) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(one, Mapping) and not {"role", "type", "kwargs"}.isdisjoint(one) for one in value)
    )


# Requests and responses


def _body(value: Json, names: tuple[str, ...]) -> Json:
    """A body that is logged as JSON text, if it has one of these names; other text is what was said."""
    found = parsed(value)
    return found if isinstance(found, Mapping) and not found.keys().isdisjoint(names) else messages_in(value)


def prompt_of(given: Json, notes: Notes) -> tuple[list[Json], dict[str, Json]]:
    """The messages that a model was sent, and `system`, `tools` and `model` beside them.

    Args:
        given: the body of a request to any API, a list of messages or items, or a text.
    """
    shared: dict[str, Json] = {}
    given = _body(given, PROMPTS)
    given = [given] if isinstance(given, Mapping) and "role" in given else given
    while isinstance(given, Mapping):
        for name in ("previous_response_id", "conversation"):
            before = first_path(given, f"{name}.id", name)
            if before is not None and (name != "conversation" or str(before).startswith("conv_")):
                raise DataError(f"`{name}` is given, so the prompt is in another record; log whole inputs")
        beside = picked(given, system=SYSTEMS, tools=TOOLS, model="model")
        shared = {name: value for name, value in beside.items() if value} | shared
        name = next((name for name in PROMPTS if given.get(name) is not None), None)
        if name is None:
            raise DataError(f"the request has {_keys(given)}, expected one of {', '.join(PROMPTS)}")
        given = messages_in(given[name])
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):  # LangChain: a batch of one
        (given,) = given
    if isinstance(given, str):
        return [{"role": "user", "content": given}], shared
    if not isinstance(given, list):
        raise DataError(f"the prompt is {quoted(given)}, expected a list of messages")
    return items_to_messages(given, notes), shared


def answers_of(given: Json, notes: Notes) -> list[list[Json]]:
    """The answers of a model: for every choice its messages, several where it went on after results of tools.

    Args:
        given: the body of a response of any API, a list of choices, messages or items, or a text.
    """
    given = _body(given, ("role", "kwargs", "choices", "candidates", "generations", "output"))
    if isinstance(given, str):
        if REPR.match(given):
            raise DataError(f"the response is {quoted(given)}, the text of a Python object; log it as JSON")
        return [[{"role": "assistant", "content": given}]]
    if isinstance(given, Mapping):
        # An error has a text as `message`.
        known = (name for name in ANSWERS if not isinstance(given.get(name), str) or name != "message")
        name = next((name for name in known if given.get(name) is not None), None)
        if "role" in given or "kwargs" in given or name == "content" or (name is None and "text" in given):
            return [[_answer(given)]]
        if name is None:
            raise DataError(f"the response has {_keys(given)}, expected one of {', '.join(ANSWERS)}")
        if name == "generations" and isinstance(look_up(given, "generations.0"), list):  # LangChain: a batch of one
            return answers_of(given["generations"][0], notes)
        return [
            [*turns[:-1], *(finished(turn, given) for turn in turns[-1:])] for turns in answers_of(given[name], notes)
        ]
    if not isinstance(given, list):
        raise DataError(f"the response is {quoted(given)}, expected text, choices or messages")
    if any(not isinstance(one, Mapping) for one in given):
        raise DataError(f"the response holds {quoted(given)}, expected objects")
    if given and all("role" not in one and one.get("type") in PARTS for one in given):
        return [[{"role": "assistant", "content": given}]]
    if all(one.get("type") not in ALL_ITEMS and _answer(one).get("role") in MODEL_ROLES for one in given):
        return [[_answer(one)] for one in given]
    messages = items_to_messages(given, notes)
    return [messages] if messages else []


def _answer(choice: Record) -> dict[str, Json]:
    """The message of a choice, a candidate or a generation."""
    held = choice.get("message")
    if not isinstance(held, Mapping):
        held = choice["content"] if isinstance(choice.get("content"), Mapping) else choice
    held = unwrapped(held)
    if "role" not in held and held.get("type") in (None, "text", "message"):
        if held.keys().isdisjoint(SAID):
            raise DataError(f"an answer has {_keys(held)}, expected one of {', '.join(SAID)}")
        content = first_path(held, "content", "parts", "text")
        held = {name: held[name] for name in held if name not in ("type", "text")} | {"role": "assistant"}
        held["content"] = content
    return finished(held, choice)


def finished(message: Record, choice: Record) -> dict[str, Json]:
    """The message with the reason why it ended, which most APIs keep beside it."""
    reason = first_path(choice, *FINISH_KEYS)
    reason = first_path(choice, "generation_info.finish_reason") if reason is None else reason
    return dict(message) | ({"finish_reason": reason} if isinstance(reason, str) and choice is not message else {})


def items_to_messages(items: list[Json], notes: Notes) -> list[Json]:
    """Items of the responses API as messages, other messages as they are.

    What the model wrote in a row becomes one message.
    """
    messages: list[Json] = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError(f"item {number} is {quoted(item)}, expected an object")
        item = unwrapped(item)
        kind = item.get("type", "message")
        if kind in HOSTED_ITEMS:
            notes.add(f"an item of type {kind} is not in the row, since the log lacks what the model saw of it")
            continue
        if kind not in ALL_ITEMS and "role" not in item and not isinstance(item.get("content"), str):
            raise _unknown(number, kind)
        if kind not in ALL_ITEMS or "type" not in item:  # LangChain's messages have types, too
            messages.append(dict(item))
            continue
        role = item.get("role", "assistant") if kind == "message" else "assistant"
        content = item.get("content") if kind == "message" else [item]
        if kind == "reasoning":
            content = [part | {"type": "reasoning"} for part in _reasoning(item, notes)]
        elif kind in RESULT_ITEMS:
            role, content = "user", [dict(item) | {"type": "function_call_output"}]  # its part becomes a tool message
        elif kind != "message":
            call = {
                "type": "function_call",
                "name": item.get("name", kind),
                "arguments": first_path(item, "arguments", "action"),
            }
            content = [dict(item) | call]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
        last = messages[-1] if messages else {}
        goes_on = role == "assistant" and last.get("role") == "assistant" and isinstance(last.get("content"), list)
        if goes_on and kind in ("message", "reasoning") and content:
            # What the model says after a call is another answer, though the log lacks the call's result.
            goes_on = not any(look_up(part, "type") == "function_call" for part in last["content"])
        if goes_on:
            messages[-1] = last | {"content": last["content"] + content}
        elif content or kind != "reasoning":
            rest = {name: item[name] for name in item if kind == "message" and name not in ("type", "id", "phase")}
            messages.append(rest | {"role": role, "content": content})
    return messages


def with_items(messages: list[Json], notes: Notes) -> list[Json]:
    """Messages; a list with items of the responses API is rewritten."""
    some = any(look_up(one, "type") in ALL_ITEMS and "role" not in one for one in messages)
    return items_to_messages(messages, notes) if some else messages


def _unknown(number: int, kind: Json) -> DataError:
    return DataError(f"item {number} is of type {quoted(kind)}; known are {', '.join(ITEMS + RESULT_ITEMS)}")


def _reasoning(item: Record, notes: Notes) -> list[dict[str, Json]]:
    """The texts of a reasoning item. A summary beside encrypted reasoning is not what the model wrote."""
    texts = objects(item, "content")
    if not texts and item.get("encrypted_content"):
        notes.add("encrypted reasoning is not in the log, so it is not in the row")
        return []
    return texts or objects(item, "summary")


def _keys(record: Record) -> str:
    return f"the keys {', '.join(map(quoted, list(record)[:20]))}" if record else "no keys"


def call_rows(known: Record, request: Json, response: Json, notes: Notes) -> list[Record]:
    """The rows of one LLM call: its prompt is context, and every choice of the response is a row that is trained."""
    if texts := _completed_texts(request, response):
        return [dict(known) | text for text in texts]
    (prompt, shared), answers = prompt_of(request, notes), answers_of(response, notes)
    if prompt and look_up(prompt[-1], "role") in MODEL_ROLES:
        if look_up(prompt[-1], "prefix") or look_up(response, "type") == "message":
            raise DataError(
                "the answer continues the assistant message at the end of its request (a prefill), and a chat template "
                "writes them as two turns; take such calls out (--on_error skip)"
            )
        notes.add("a request ends with an assistant message; the answer is read as another turn after it")
    if not answers:
        notes.add("an LLM call without an answer is no row")
    rows: list[Record] = []
    for answer in answers:
        several = sum(look_up(message, "role") in MODEL_ROLES for message in answer) > 1
        whole = {"messages": untrained(prompt) + answer} if several else {"messages": prompt + answer, "train": "last"}
        rows.append(shared | dict(known) | whole)
    return rows


def _completed_texts(request: Json, response: Json) -> list[dict[str, Json]]:
    """Records of texts that the completions API answered, which no chat template wrote; empty for other APIs."""
    prompt, choices = look_up(request, "prompt"), look_up(response, "choices")
    if not isinstance(prompt, str) or not isinstance(choices, list) or look_up(request, "messages") is not None:
        return []
    if not all(isinstance(look_up(choice, "text"), str) for choice in choices):
        return []
    return [{"prompt": prompt} | picked(one, completion="text", finish_reason="finish_reason") for one in choices]


def request_of(record: Record) -> Json:
    """The body of the request in a log record, wherever loggers put it; the record itself if it is nowhere else."""
    for path in REQUEST_PATHS:
        body = parsed(look_up(record, path))
        if _are_messages(body) or (isinstance(body, Mapping) and any(body.get(name) is not None for name in PROMPTS)):
            return body
    return record


def _asks(request: Json) -> bool:
    """Whether a request is a list of messages that waits for an answer."""
    messages = request if isinstance(request, list) else first_path(request, "messages", "contents")
    return isinstance(messages, list) and look_up(messages[-1:], "0.role") not in (None, *MODEL_ROLES)


def response_of(record: Record) -> Json:
    """The body of the response in a log record; None if there is none."""
    for path in RESPONSE_PATHS:
        body = parsed(look_up(record, path))
        if isinstance(body, Mapping) and any(name in body for name in ANSWERS):
            return body
        if path in ("output", "outputs", "response") and isinstance(body, list):
            return body
        if path in TEXTS_AT and isinstance(body, str) and _asks(request_of(record)):
            return body
    return record if "choices" in record or "candidates" in record else None


FAILURES_AT = frozenset(["error", *(path.split(".")[0] for path in RESPONSE_PATHS)])


def has_failed(record: Record) -> bool:
    """Whether a record is an error in the place of an answer."""
    if FAILURES_AT.isdisjoint(record) or "custom_id" in record:  # a batch's reader counts its failed requests itself
        return False
    bodies = [body for path in RESPONSE_PATHS if isinstance(body := parsed(look_up(record, path)), Mapping)]
    if any(body.get("error") and not any(body.get(name) for name in ANSWERS if name != "message") for body in bodies):
        return True
    others = (value for name, value in record.items() if name != "error")
    return bool(record.get("error")) and all(isinstance(one, str | int | float | None) for one in others)


REQUEST_FACTS = {
    "group": ("_ng_task_index",),  # NeMo Gym
    "trial": ("_ng_rollout_index",),
    "episode": ("trace_id", "session_id"),
}


def read_requests(record: Record, notes: Notes) -> list[Record]:
    """One LLM call: its messages are context, and every choice of the response is a row that is trained."""
    request, response = request_of(record), response_of(record)
    known = facts(record, *(one for one in (request, response) if isinstance(one, Mapping)))
    known = picked(record, **REQUEST_FACTS) | known
    if found := _sampled_turns(response, known, notes):
        return found
    rows = call_rows(known, request, response, notes)
    if not rows:
        raise DataError("the response has no choice, expected at least one")
    return rows


def _sampled_turns(response: Json, known: Record, notes: Notes) -> list[Record]:
    """The calls of a response whose every turn has the ids of its tokens (NeMo Gym); none if one lacks them."""
    turns: list[Json] = [None]
    for number, item in enumerate(objects(response, "output") if isinstance(look_up(response, "output"), list) else []):
        kind = item.get("type", "message" if "role" in item else None)
        if kind not in ALL_ITEMS or (kind == "message" and item.get("content") is None):
            raise _unknown(number, kind)
        role = item.get("role", "assistant")
        if role not in (*ROLES, *ROLE_ALIASES):
            raise DataError(f"item {number} has the unknown role {quoted(role)}; known are {', '.join(ROLES)}")
        if kind in RESULT_ITEMS or role != "assistant":
            turns.append(None)
        elif turns[-1] is None or item.get("generation_token_ids"):
            turns[-1] = item
    turns = [turn for turn in turns if turn is not None]
    if not turns or not all(turn.get("generation_token_ids") and turn.get("prompt_token_ids") for turn in turns):
        return []
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    known = {"episode": known.get("id", notes.place)} | {name: known[name] for name in known if name != "trial"}
    return [known | sampled_row(turn, *(turn.get(name) for name in names), sets=sets_of(turn)) for turn in turns]


def read_batch(record: Record, notes: Notes) -> list[Record]:
    """The request and the response of one `custom_id` in the files of a batch API."""
    records = objects(record, "records")
    requests = [body for one in records if (body := first_path(one, "body", "params", "request")) is not None]
    responses = [one for one in records if "response" in one or "result" in one]
    bodies = [body for one in responses if (body := first_path(one, "response.body", "result.message")) is not None]
    name = quoted(records[0].get("custom_id"))
    if bodies and len(requests) != 1:
        raise DataError(f"custom_id {name} has {len(requests)} requests; give the file of requests and that of results")
    if not bodies:
        notes.add("a request of a batch without a response is no row" if requests else "a failed request is no row")
    return [row for body in bodies for row in call_rows(facts(requests[0], body), requests[0], body, notes)]


def _reward_columns(record: Record, notes: Notes) -> dict[str, Json]:
    """The reward from columns such as `format_reward`, which TRL writes for every reward function."""
    columns = {name: value for name, value in record.items() if name.endswith("_reward") and value is not None}
    if record.get("reward") is not None or not columns or not all(isinstance(v, int | float) for v in columns.values()):
        return {}
    if len(columns) > 1:
        notes.add(f"the reward is the sum of {', '.join(columns)}; give `reward` for other weights")
    return {"reward": sum(columns.values())}


def is_request(record: Record) -> bool:
    """Whether a record holds a request and its response."""
    request = request_of(record)
    asked = request is not record or any(record.get(name) is not None for name in PROMPTS)
    return asked and response_of(record) is not None


# Data sets


def read_chat(record: Record, notes: Notes) -> list[Record]:
    """Our own form: `messages`, OpenAI's or Anthropic's, with `system` and `tools` beside them; states of LangGraph."""
    path = next((path for path in MESSAGES_AT if isinstance(parsed(look_up(record, path)), list)), "messages")
    rest = {name: value for name, value in record.items() if name != path.split(".")[0]}
    return [_labelled(rest) | {"messages": with_items(field(record, path, list), notes)}]


def read_sharegpt(record: Record, notes: Notes) -> list[Record]:
    """`conversations` of `from` and `value`."""
    messages = []
    for turn in objects(record, "conversations"):
        role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role == "function_call":
            calls = parsed(value)
            calls = calls if isinstance(calls, list) else [calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            messages.append({name: turn[name] for name in turn if name not in ("from", "value")})
            messages[-1] |= {"role": role, "content": value}
    row = {name: value for name, value in record.items() if name != "conversations"}
    return [_labelled(row) | {"messages": messages}]


def _labelled(row: dict[str, Json]) -> dict[str, Json]:
    """The row with the `label` of unpaired preferences as `chosen`."""
    if row.get("label") is None or row.get("chosen") is not None:
        return row
    label = row["label"]
    chosen = bool(label) if isinstance(label, bool | int) and label in (0, 1) else label
    return {name: value for name, value in row.items() if name != "label"} | {"chosen": chosen}


def read_completion(record: Record, notes: Notes) -> list[Record]:
    """TRL's `prompt` and `completion`, texts or messages, with the `label` of unpaired preferences."""
    known = {name: value for name, value in record.items() if name not in ("prompt", "completion")}
    known = _labelled({name: value for name, value in known.items() if not name.endswith("_reward")})
    known |= _reward_columns(record, notes)
    known |= {"tools": known.pop("tool_defs")} if known.get("tool_defs") else {}  # verifiers
    known |= {"group": known.pop("example_id")} if known.get("example_id") is not None else {}
    return [_completed(known, record.get("prompt"), record["completion"], notes)]


def read_preference(record: Record, notes: Notes) -> list[Record]:
    """A `chosen` and a `rejected` answer, texts or messages, with a `prompt` or beginning alike."""
    prompt = messages_in(record.get("prompt"))
    both = {name: messages_in(record[name]) for name in ("chosen", "rejected")}
    known = {name: value for name, value in record.items() if name not in ("prompt", *both)}
    chosen, rejected = both["chosen"], both["rejected"]
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise DataError(
            f"`chosen` is {quoted(chosen)} and `rejected` {quoted(rejected)}; expected two texts or two lists"
        )
    if prompt is None or (isinstance(chosen, list) and isinstance(prompt, str)):
        # The prompt is what both begin with. Texts are cut where they differ, as TRL does.
        alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))))
        if alike or prompt is None:
            prompt, both = chosen[:alike], {name: value[alike:] for name, value in both.items()}
    pair = record.get("pair", record.get("id"))
    known = known | {"pair": notes.place if pair is None else pair}
    name = known.pop("id", notes.place)
    return [
        _completed(known | {"id": f"{name}/{which}", "chosen": which == "chosen"}, prompt, answer, notes)
        for which, answer in both.items()
    ]


def _completed(known: Record, prompt: Json, completion: Json, notes: Notes) -> Record:
    prompt, completion = messages_in(prompt), messages_in(completion)
    if not prompt:
        notes.add("the log has no prompt, so the answer is trained without one")
    if isinstance(completion, str) and isinstance(prompt, str | None):
        if prompt and completion.startswith(prompt):
            notes.add(
                "an answer begins with its prompt, which then stands twice in the row; take it out of one of them"
            )
        return {**known, "prompt": prompt or "", "completion": completion}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list) or not isinstance(prompt or [], list):
        raise DataError(f"the prompt is {quoted(prompt)}, the answer {quoted(completion)}; expected texts or messages")
    if prompt and completion[: len(prompt)] == prompt:
        completion = completion[len(prompt) :]  # the prompt is repeated in the answer
    return {**known, "messages": untrained(prompt or []) + completion}


def is_chat(record: Record) -> bool:
    """Whether a record has a list of messages at a place that we know."""
    return any(isinstance(parsed(look_up(record, path)), list) for path in MESSAGES_AT)


def is_batch(record: Record) -> bool:
    """Whether a record has one side of a call of a batch."""
    return "custom_id" in record and not is_request(record)
