"""Only what a model sampled is trained, and nothing of an answer is lost: logs that were once read wrong."""

import json
from pathlib import Path

import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

SAMPLES = Path(__file__).parent / "samples"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_TEXT = '<tool_call>add{"a": 1}</tool_call><|im_end|>'
PROMPT = [{"role": "user", "content": "hello"}]
SEEN = [
    *PROMPT,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
ANSWER = {"role": "assistant", "content": "the answer is 4"}
ITEMS = [
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "the answer is 4"}]},
]


@pytest.fixture
def read(bytes_tokenizer, templates):
    def read(*records, **options):
        return from_messages(records, tokenizer=bytes_tokenizer, chat_template=templates["chatml"], **options)

    return read


@pytest.fixture
def trained(bytes_tokenizer):
    """What is trained of every row."""
    return lambda found: [bytes_tokenizer.decode(row.ids[row.weights > 0]) for row in found.trajectories]


@pytest.mark.parametrize(
    "record",
    [
        # Braintrust's wrap_openai and Opik's track_openai: messages in, choices out.
        {"input": SEEN, "output": [{"finish_reason": "stop", "index": 0, "message": ANSWER}]},
        {"input": {"messages": SEEN}, "output": {"choices": [{"index": 0, "message": ANSWER}]}},
        # OpenAI Agents SDK, `GenerationSpanData`: messages in, messages out.
        {"input": SEEN, "output": [ANSWER]},
        # MLflow, a trace as a table: `request` and `response`.
        {"request": json.dumps({"messages": SEEN}), "response": json.dumps({"choices": [{"message": ANSWER}]})},
    ],
)
def test_messages_under_input_and_choices_under_output_are_one_call(read, trained, bytes_tokenizer, record):
    found = read(record)
    assert trained(found) == ["the answer is 4<|im_end|>"]
    assert TOOL_TEXT in bytes_tokenizer.decode(found.trajectories[0].ids)
    record = {"input": PROMPT, "output": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]}
    assert trained(read(record)) == [TOOL_TEXT]


def test_instructions_that_braintrust_logs_beside_the_input_are_the_system_prompt(read, trained, bytes_tokenizer):
    span = {"span_id": "s", "root_span_id": "s", "span_attributes": {"name": "openai.responses.create", "type": "llm"}}
    found = read(span | {"input": PROMPT, "output": [ITEMS[2]], "metadata": {"instructions": "be brief", "model": "m"}})
    assert trained(found) == ["the answer is 4<|im_end|>"]
    assert "be brief" in bytes_tokenizer.decode(found.trajectories[0].ids)


def test_a_span_of_the_agents_sdk_that_has_only_the_id_of_a_response_is_no_row(read):
    generation = json.loads((SAMPLES / "agents-sdk.jsonl").read_text().splitlines()[1])
    response = generation | {"span_data": {"type": "response", "response_id": "resp_1", "usage": {"input_tokens": 1}}}
    found = read(generation, response)
    assert len(found.trajectories) == 1
    assert any(note.startswith("an LLM call of which the log has no messages is no row") for note in found.notes)
    with pytest.raises(DataError, match=r"no rows in 1 records, read as agents-sdk .*of which the log has no messages"):
        read(response)


def test_every_turn_of_an_answer_is_trained_and_results_of_tools_are_not(read, trained):
    record = {"responses_create_params": {"input": PROMPT}, "response": {"output": ITEMS}, "reward": 1.0}
    found = read(record)
    assert trained(found) == [TOOL_TEXT + "the answer is 4<|im_end|>"] and found.trajectories[0].reward == 1.0
    assert trained(read(record, view="calls")) == [TOOL_TEXT, "the answer is 4<|im_end|>"]
    # What was in the prompt was an answer to another request.
    record["responses_create_params"] = {"input": [*PROMPT, ANSWER, *PROMPT]}
    assert trained(read(record)) == [TOOL_TEXT + "the answer is 4<|im_end|>"]
    assert trained(read(record, view="calls")) == [TOOL_TEXT, "the answer is 4<|im_end|>"]


def test_a_summary_of_encrypted_reasoning_is_not_what_the_model_wrote(read, trained):
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}], "encrypted_content": "x"}
    found = read({"input": PROMPT, "output": [item, ITEMS[2]]})
    assert trained(found) == ["the answer is 4<|im_end|>"]
    assert any(note.startswith("encrypted reasoning is not in the log") for note in found.notes)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([{"type": "odd_call", "id": "w"}, ITEMS[2]], "item 0 is of type 'odd_call'; known are message"),
        ({"choices": [{"delta": {}}], "object": "x"}, "an answer has the keys 'delta', expected one of content"),
        ({"text": {"a": 1}, "output": 3}, "the response is 3, expected text, choices or messages"),
        ([3], r"the response holds \[3\], expected objects"),
    ],
)
def test_an_answer_that_is_not_understood_is_an_error(read, output, message):
    with pytest.raises(DataError, match=message):
        read({"input": PROMPT, "output": output}, format="requests")


def test_a_response_without_end_is_cut_off(read, trained):
    choice = {"message": ANSWER, "finish_reason": "length"}
    assert trained(read({"messages": PROMPT, "choices": [choice]})) == ["the answer is 4"]
    body = {"type": "message", "role": "assistant", "content": ITEMS[2]["content"], "stop_reason": "max_tokens"}
    assert trained(read({"request": {"messages": PROMPT}, "response": body})) == ["the answer is 4"]
    span = {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": ["length"]}
    span |= {"gen_ai.input.messages": PROMPT, "gen_ai.output.messages": json.dumps([ANSWER])}
    assert trained(read({"attributes": span})) == ["the answer is 4"]
    assert trained(read({"attributes": span | {"gen_ai.response.finish_reasons": '["stop"]'}})) == [
        "the answer is 4<|im_end|>"
    ]
    response = {"output": [ITEMS[2]], "status": "incomplete"}
    assert trained(read({"request": {"input": "hello"}, "response": response})) == ["the answer is 4"]


def test_the_greeting_that_starts_a_run_of_tau2_is_not_trained(read, trained):
    # tau2-bench a2c0247, orchestrator.py: DEFAULT_FIRST_AGENT_MESSAGE, with `cost=0.0` and nothing else.
    run = json.loads((SAMPLES / "tau2-bench.json").read_text())
    (simulation,) = run["simulations"]
    greeting = {"role": "assistant", "content": "Hi!", "cost": 0.0, "usage": None, "raw_data": None}
    simulation["messages"].insert(0, greeting)
    found = read(run)
    assert "Hi!" not in trained(found)[0] and trained(found)[0].endswith("the answer is 4<|im_end|>")
    assert any(note.startswith("an assistant message without cost, usage and raw data") for note in found.notes)
    simulation["messages"][2]["usage"] = {"completion_tokens": 2}  # the only one that was measured
    assert trained(read(run)) == ["hm" + TOOL_TEXT]


def test_few_shot_answers_of_inspect_are_not_trained(read, trained):
    log = json.loads((SAMPLES / "inspect.json").read_text())
    shots = [
        {"role": "user", "content": "2 + 2?", "source": "input"},
        {"role": "assistant", "content": "it is 4", "source": "input"},
    ]
    log["samples"][0]["messages"][1:1] = shots
    found = read(log, tools="none")
    assert trained(found) == ["hm" + TOOL_TEXT + "the answer is 4<|im_end|>"]
    assert any("was not sampled; it is not trained" in note for note in found.notes)
    del log["samples"][0]["messages"][2]["source"]
    assert trained(read(log, tools="none")) == ["hm" + TOOL_TEXT + "the answer is 4<|im_end|>"]


@pytest.mark.parametrize("name", ["verl-rollouts.jsonl"])
def test_dumped_texts_get_no_end_that_they_do_not_have(bytes_tokenizer, trained, name):
    found = load(SAMPLES / name, tokenizer=bytes_tokenizer)
    assert trained(found) == ["the answer is 4"]
    assert any("ends without an end-of-text token" in note for note in found.notes)


SAID = "the answer is 4<|im_end|>"
CUT = "the answer is 4"
BEDROCK = [{"text": "hm"}, {"toolUse": {"toolUseId": "c1", "name": "add", "input": {"a": 1}}}]


def bedrock(content, reason):
    return {"output": {"message": {"role": "assistant", "content": content}}, "stopReason": reason}


def chosen(message, reason="stop"):
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # The answer stands beside the messages.
        *[({"messages": SEEN, name: ANSWER["content"]}, SAID) for name in ("response", "output", "completion")],
        ({"messages": [*SEEN, ANSWER, *PROMPT], "response": "4"}, "4<|im_end|>"),
        ({"messages": SEEN, "output_message": ANSWER}, SAID),
        ({"messages": SEEN, "original_response": json.dumps(chosen(ANSWER))}, SAID),  # LiteLLM's debug logs
        ({"messages": {}, "response": chosen(ANSWER), "proxy_server_request": json.dumps({"messages": SEEN})}, SAID),
        ({"reqPayload": {"messages": SEEN}, "respPayload": chosen(ANSWER)}, SAID),  # OpenPipe
        ({"model_input_messages": SEEN, "model_output_message": ANSWER, "observations": "4"}, SAID),  # smolagents
        # Bedrock: Converse, and its log of invocations.
        ({"request": {"messages": SEEN}, "response": bedrock([{"text": CUT}], "max_tokens")}, CUT),
        (
            {
                "input": {"inputBodyJson": {"messages": [{"role": "user", "content": [{"text": "hello"}]}]}},
                "output": {"outputBodyJson": bedrock(BEDROCK, "tool_use")},
            },
            "hm" + TOOL_TEXT,
        ),
        # Every API has its own words for an answer that was cut off.
        *[
            ({"request": {"messages": SEEN}, "response": chosen(ANSWER, reason)}, CUT)
            for reason in ("length", "model_length", "MAX_TOKENS", "content_filter", "SAFETY")
        ],
        # No chat template writes what the completions API is sent.
        ({"prompt": "hello", "choices": [{"text": " there", "finish_reason": "stop"}]}, " there</s>"),
        ({"prompt": "hello", "choices": [{"text": " there", "finish_reason": "length"}]}, " there"),
        # Items of the responses API as messages, LlamaIndex' blocks, calls that LangChain could not parse.
        ({"messages": PROMPT + ITEMS}, TOOL_TEXT + SAID),
        (
            {"messages": [*SEEN, {"role": "assistant", "blocks": [{"block_type": "text", "text": CUT}]}]},
            TOOL_TEXT + SAID,
        ),
        (
            {
                "messages": [
                    *PROMPT,
                    {"type": "ai", "content": "hm", "invalid_tool_calls": [{"name": "add", "args": '{"a"', "id": "c"}]},
                ]
            },
            'hm<tool_call>add"{\\"a\\""</tool_call><|im_end|>',
        ),
        # A harness wrote the calls that smolagents repeats in its prompts.
        ({"messages": [*PROMPT, {"role": "tool-call", "content": "Calling"}, *PROMPT, ANSWER]}, SAID),
    ],
)
def test_the_answer_is_found_where_recorders_put_it_and_ends_as_it_was_sampled(read, trained, record, expected):
    assert trained(read(record)) == [expected]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"request": {"messages": SEEN}, "response": {"error_code": "BAD", "message": "no"}},
            "'error_code', 'message'",
        ),
        ({"messages": SEEN, "response": "ModelResponse(id='x')"}, "the text of a Python object; log it as JSON"),
        (
            {"request": {"messages": [*PROMPT, ANSWER]}, "response": {"type": "message", "content": " now"}},
            "continues the assistant message .* prefill",
        ),
        ({"messages": [{"role": "user", "text": "hello"}]}, "message 0 has no `content`, but 'text'; name the text"),
    ],
)
def test_an_answer_that_nobody_sampled_so_is_refused(read, record, message):
    with pytest.raises(DataError, match=message):
        read(record)


def test_a_bedrock_request_has_its_tools_and_its_system_prompt(bytes_tokenizer):
    tool = {"toolSpec": {"name": "add", "description": "adds", "inputSchema": {"json": {"type": "object"}}}}
    request = {"messages": PROMPT, "system": [{"text": "be brief"}], "toolConfig": {"tools": [tool]}}
    options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml"}
    (row,) = from_messages([{"request": request, "response": bedrock(BEDROCK, "tool_use")}], **options).trajectories
    schema = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    said = [{"role": "system", "content": "be brief"}, *PROMPT, SEEN[1] | {"content": "hm"}]
    (same,) = from_messages([{"messages": said, "tools": [schema], "train": "last"}], **options).trajectories
    assert row.ids.tolist() == same.ids.tolist()


def test_turns_of_the_assistant_that_no_request_asked_for_are_noted(read):
    greeting = {"role": "assistant", "content": "hello there"}
    (note,) = read({"messages": [greeting, *PROMPT, ANSWER]}).notes
    assert note.startswith("a conversation begins with an assistant message, which is trained")
    notes = read({"request": {"messages": [*PROMPT, greeting]}, "response": chosen(ANSWER)}).notes
    assert any(note.startswith("a request ends with an assistant message") for note in notes)


def test_parts_and_calls_of_openinference_are_one_message(read, trained):
    content = {"message_content.type": "text", "message_content.text": "hm"}
    call = {"tool_call.id": "c1", "tool_call.function.name": "add", "tool_call.function.arguments": '{"a": 1}'}
    answer = {"message.role": "assistant", "message.contents": [content], "message.tool_calls": [call]}
    attributes = {"openinference.span.kind": "LLM", "llm.output_messages": [answer]}
    attributes["llm.input_messages"] = [{"message.role": "user", "message.contents": [content]}]
    assert trained(read({"name": "call", "attributes": attributes})) == ["hm" + TOOL_TEXT]


def test_calls_of_googles_adk_are_read_from_its_spans(read, trained):
    request = {
        "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
        "config": {"system_instruction": "be brief"},
    }
    parts = [{"text": "hm"}, {"function_call": {"id": "c1", "name": "add", "args": {"a": 1}}}]
    response = {"content": {"role": "model", "parts": parts}, "finish_reason": "STOP"}
    pair = {"llm_request": json.dumps(request), "llm_response": json.dumps(response)}
    span = {f"gcp.vertex.agent.{name}": value for name, value in pair.items()}
    found = read({"name": "call_llm", "attributes": {"gen_ai.request.model": "gemini"} | span})
    assert trained(found) == ["hm" + TOOL_TEXT]


def claude(*lines):
    """Lines of a session, each the answer to the one before."""
    made = []
    for number, (kind, content, more) in enumerate(lines):
        message = {"role": kind, "content": content} | ({"id": f"m{number}"} if kind == "assistant" else {})
        made.append({"type": kind, "message": message, "uuid": str(number), "sessionId": "s"} | more)
        made[-1]["parentUuid"] = str(number - 1) if number else None
    return made


def test_an_interrupted_answer_of_claude_code_has_no_end_and_an_error_of_its_api_is_no_answer(read, trained):
    said = [{"type": "text", "text": "the answer is 4"}]
    failed = ("assistant", [{"type": "text", "text": "API Error: 529"}], {"isApiErrorMessage": True})
    stopped = ("user", [{"type": "text", "text": "[Request interrupted by user]"}], {})
    lines = [("user", "hello", {}), failed, ("user", "hello", {}), ("assistant", said, {}), stopped]
    assert trained(read(*claude(*lines))) == [CUT]
    assert trained(read(*claude(*lines[:-1]))) == [SAID]


@pytest.mark.parametrize("key", ["train", "trainable", "training", "loss"])
def test_every_name_of_the_flag_that_leaves_a_message_out_is_read(read, trained, key):
    assert trained(read({"messages": [*SEEN, ANSWER | {key: False}]})) == [TOOL_TEXT]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"request": {"messages": PROMPT}, "response": chosen({"role": "assistant", "audio": {"id": "a"}})},
            "message 1",
        ),
        (
            {"request": {"input": "hello", "conversation": "conv_1"}, "response": {"output": ITEMS[2:]}},
            "`conversation` is given",
        ),
    ],
)
def test_what_the_log_does_not_hold_is_refused(read, record, message):
    with pytest.raises(DataError, match=message):
        read(record)


def test_messages_in_the_event_of_a_span_are_its_call(read, trained):
    event = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": CUT}]}]),
    }
    name = "gen_ai.client.inference.operation.details"
    span = {"attributes": {"gen_ai.operation.name": "chat"}, "events": [{"name": name, "attributes": event}]}
    assert trained(read(span)) == [SAID]


def test_parallel_calls_of_openhands_sdk_are_one_answer(read, trained):
    def action(call):
        tool_call = {"id": call, "name": "add", "arguments": '{"a": 1}'}
        known = {"source": "agent", "timestamp": "t", "thought": [], "llm_response_id": "r"}
        return known | {"kind": "ActionEvent", "tool_call": tool_call, "tool_call_id": call}

    asked = {"kind": "MessageEvent", "source": "user", "timestamp": "t", "llm_message": PROMPT[0]}
    found = read(asked, action("c1"), action("c2"))
    assert trained(found) == [TOOL_TEXT.removesuffix("<|im_end|>") * 2 + "<|im_end|>"]
