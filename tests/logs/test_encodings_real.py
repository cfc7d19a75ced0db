"""Real conversations in three encodings give the same tree."""

import json

import numpy as np
import pytest

from treetrain.core.tree.token_tree import build_tree
from treetrain.logs.load import from_messages


def as_blocks(messages):
    """OpenAI's messages in Anthropic's form: the system prompt apart, calls and results as content blocks."""
    made = []
    for message in messages[1:]:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            made.append({"role": "user", "content": [block]})
            continue
        blocks = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        made.append({"role": message["role"], "content": blocks})
    return made


def as_attributes(prefix, messages):
    """OpenInference's flat attributes of messages."""
    made = {}
    for number, message in enumerate(messages):
        base = f"llm.{prefix}.{number}.message."
        made |= {base + name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name)}
        for place, call in enumerate(message.get("tool_calls") or ()):
            of = f"{base}tool_calls.{place}.tool_call."
            made |= {of + "id": call["id"], of + "function.name": call["function"]["name"]}
            made[of + "function.arguments"] = call["function"]["arguments"]
    return made


@pytest.mark.slow
def test_real_conversations_in_three_encodings_are_the_same_tree(shared_data):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizer-qwen3")
    folder = shared_data / "tau_airline"
    tools = json.loads((folder / "tools.json").read_text())
    with open(folder / "trajectories.jsonl") as file:
        talks = [json.loads(next(file))["messages"] for _ in range(2)]
    openai = [{"messages": talk, "tools": tools} for talk in talks]
    schemas = [{"input_schema" if k == "parameters" else k: v for k, v in tool["function"].items()} for tool in tools]
    anthropic = [{"messages": as_blocks(talk), "system": talk[0]["content"], "tools": schemas} for talk in talks]
    spans = []
    for number, talk in enumerate(talks):
        for at in [at for at, message in enumerate(talk) if message["role"] == "assistant"]:
            attributes = as_attributes("input_messages", talk[:at]) | as_attributes(
                "output_messages", talk[at : at + 1]
            )
            attributes |= {f"llm.tools.{place}.tool.json_schema": json.dumps(tool) for place, tool in enumerate(tools)}
            spans.append(
                {"context": {"trace_id": number}, "attributes": attributes | {"openinference.span.kind": "LLM"}}
            )
    options = {"tokenizer": tokenizer, "chat_template": "chatml", "view": "calls"}
    loaded = [from_messages(records, **options) for records in (openai, anthropic, spans)]
    assert [found.format for found in loaded] == ["chat", "chat", "spans"]
    expected, *others = (build_tree(found.trajectories) for found in loaded)
    assert expected.num_flat_tokens > 5 * expected.num_tokens
    for tree in others:
        for field in ("tokens", "parent", "end", "trajectory_last"):
            np.testing.assert_array_equal(getattr(tree, field), getattr(expected, field))
