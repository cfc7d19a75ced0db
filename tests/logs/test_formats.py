"""Logs as tools write them, rebuilt from the sources of SOURCES.md: one small dialogue in all of them."""

import json
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

SAMPLES = Path(__file__).parent / "samples"
# The ids of the two calls in every sample of token ids: prompt, answer, log-probabilities.
CALLS = [([5, 6, 7], [8, 9], [-0.5, -0.25]), ([5, 6, 7, 8, 9, 4], [3], [-1.0])]
TOKEN_SAMPLES = {
    "server-vllm.jsonl": ("server", 1),
    "server-vllm-tokens-as-ids.jsonl": ("server", 1),
    "server-sglang.jsonl": ("server", 1),
    "steps.jsonl": ("steps", 2),
    "steps-skyrl.json": ("steps", 2),
    "steps-agent-lightning.jsonl": ("steps", 2),
    "steps-verifiers.jsonl": ("steps", 2),
}
# The format, and what of the dialogue's rows it holds: whole transcripts, all calls, or the last call.
CONVERSATIONS = {
    "chat.jsonl": ("chat", "transcript"),
    "spans-otlp.jsonl": ("spans", "calls"),
    "spans-openinference.jsonl": ("spans", "calls"),
    "langsmith.jsonl": ("langsmith", "calls"),
    "langsmith-openai.jsonl": ("langsmith", "calls"),
    "langfuse.jsonl": ("langfuse", "calls"),
    "langfuse-observations.jsonl": ("langfuse", "calls"),
    "swe-agent.traj": ("swe-agent", "calls"),
    "tau-bench.json": ("tau-bench", "transcript"),
    "tau2-bench.json": ("tau-bench", "transcript"),
    "inspect.json": ("inspect", "transcript"),
    "art-parquet-rows.jsonl": ("art", "transcript"),
    "areal-interactions.json": ("areal", "calls"),
    "claude-code.jsonl": ("claude-code", "transcript"),
    "codex.jsonl": ("codex", "transcript"),
    "openhands-output.jsonl": ("openhands", "transcript"),
    "openhands-events.json": ("openhands-events", "transcript"),
    "openhands-completions.jsonl": ("requests", "calls"),
    "atif.json": ("atif", "transcript"),
    "mini-swe-agent.traj.json": ("mini-swe-agent", "transcript"),
    "nemo-gym.jsonl": ("requests", "transcript"),
    "mlflow.json": ("spans", "calls"),
    "weave.jsonl": ("weave", "calls"),
    "braintrust.jsonl": ("braintrust", "calls"),
    "opik.jsonl": ("opik", "calls"),
    "agents-sdk.jsonl": ("agents-sdk", "calls"),
    "spans-openllmetry.jsonl": ("spans", "calls"),
    "spans-openllmetry-messages.jsonl": ("spans", "calls"),
    "spans-agent-lightning.jsonl": ("spans", "calls"),
    "spans-phoenix.jsonl": ("spans", "calls"),
    "spans-phoenix-page.json": ("spans", "calls"),
    "langfuse-page.json": ("langfuse", "calls"),
    "spans-pydantic-ai.jsonl": ("spans", "calls"),
    "spans-ai-sdk.jsonl": ("spans", "calls"),
    "messages-pydantic-ai.json": ("messages", "transcript"),
    "messages-ai-sdk.json": ("messages", "transcript"),
    "messages-cursor.jsonl": ("messages", "transcript"),
    "langgraph.json": ("chat", "transcript"),
    "gemini.jsonl": ("requests", "calls"),
    "messages-cline.json": ("messages", "transcript"),
    "batch.jsonl": ("batch", "calls"),
    "litellm.jsonl": ("requests", "calls"),
    "verifiers-results.jsonl": ("completion", "transcript"),
}
WITHOUT_TOOLS = ("swe-agent.traj", "tau-bench.json", "tau2-bench.json", "areal-interactions.json", "claude-code.jsonl")
WITHOUT_TOOLS += (
    "codex.jsonl",
    "mini-swe-agent.traj.json",
    "agents-sdk.jsonl",
    "langgraph.json",
    "messages-cline.json",
    "messages-pydantic-ai.json",
    "messages-ai-sdk.json",
    "messages-cursor.jsonl",
)
WITHOUT_SYSTEM = ("claude-code.jsonl", "messages-cline.json", "messages-ai-sdk.json", "messages-cursor.jsonl")
# Counted by hand. The answer is `the`, ` answer`, ` is`, ` 4` and the end of the turn. The call has 66 characters, of
# which only the `ll` of `<tool_call>` and `</tool_call>` are one token, and the end of the turn.
TRAINED = {"answer": 5, "call": 65}
# The trained tokens of every row of the other samples, counted by hand. A call of ToolBench has no text: without `hm`,
# a line end and its 6 characters of arguments there are 56. Its last one has 79 characters; `answer` is one token. BFCL
# logs a call without the text beside it, so without `hm` and a line end; the other call is `[add(a=1)]` and the end.
OTHERS = {
    **{name: [2, 1][:calls] for name, (_, calls) in TOKEN_SAMPLES.items()},
    "art.jsonl": [65 + 5, 5],
    "bfcl.jsonl": [65 - 3 + 5, 10 + 1 + 5],
    "nemo-gym-tokens.jsonl": [2, 1],
    "nodes.jsonl": [3, 1],
    "nodes-verifiers.jsonl": [3, 1],
    "nodes-messages.jsonl": [65 + 5, 3],
    "swe-agent-history.traj": [5],
    "toolbench.json": [65 + 79 - 2 - 5 + 1, 56],
    "tree-of-thoughts.json": [4, 9],
    "verl-responses.jsonl": [5, 3],
    "verl-rollouts.jsonl": [4],
}


@pytest.fixture
def read(bytes_tokenizer):
    def read(name, **options):
        return load(SAMPLES / name, tokenizer=bytes_tokenizer, chat_template="chatml", **options)

    return read


@pytest.fixture
def dialogue():
    return json.loads((SAMPLES / "chat.jsonl").read_text())


@pytest.mark.parametrize("name", TOKEN_SAMPLES)
def test_token_logs_are_prompts_and_sampled_answers_with_log_probabilities(name):
    format, calls = TOKEN_SAMPLES[name]
    found = load(SAMPLES / name)
    assert found.format == format and len(found.trajectories) == calls
    for row, (prompt, answer, logprobs) in zip(found.trajectories, CALLS):
        assert row.ids.tolist() == prompt + answer and row.reward == 1.0
        assert row.weights.tolist() == [0.0] * len(prompt) + [1.0] * len(answer)
        np.testing.assert_allclose(row.rollout_logprobs[len(prompt) :], logprobs)
    if calls == 2:
        assert len({row.episode for row in found.trajectories}) == 1 and found.trajectories[0].episode is not None
    assert found.notes[0].startswith(f"read as {format}: the first record has ")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_log_of_the_dialogue_gives_the_tokens_of_its_messages(read, dialogue, name, bytes_tokenizer):
    format, view = CONVERSATIONS[name]
    tools = dialogue["tools"] if name in WITHOUT_TOOLS else None
    if name in WITHOUT_SYSTEM:
        dialogue["messages"] = dialogue["messages"][1:]
    if name == "gemini.jsonl":  # its results of functions are objects
        next(one for one in dialogue["messages"] if one["role"] == "tool")["content"] = '{"result": 4}'
    found = read(name, tools=tools)
    expected = from_messages([dialogue], tokenizer=bytes_tokenizer, chat_template="chatml", view=view).trajectories
    assert found.format == format
    assert len(found.trajectories) == len(expected) == {"calls": 2, "transcript": 1}[view]
    for row, other in zip(found.trajectories, expected):
        assert bytes_tokenizer.decode(row.ids) == bytes_tokenizer.decode(other.ids)
        np.testing.assert_array_equal(row.ids, other.ids)
        np.testing.assert_array_equal(row.weights, other.weights)
    assert sum(row.weights.sum() for row in found.trajectories) == TRAINED["call"] + TRAINED["answer"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_samples_train_as_many_tokens_as_were_counted_by_hand(read, name):
    assert [int((row.weights > 0).sum()) for row in read(name).trajectories] == OTHERS[name]


def test_every_sample_is_counted():
    assert {path.name for path in SAMPLES.iterdir()} == CONVERSATIONS.keys() | OTHERS.keys()


def test_traces_name_their_episode_and_note_what_is_no_call(read):
    for name, episode in [
        ("spans-otlp.jsonl", "5b8e"),
        ("spans-openinference.jsonl", "0xab"),
        ("langsmith.jsonl", "t"),
    ]:
        found = read(name)
        assert {row.episode for row in found.trajectories} == {episode}
        assert any(note.startswith("spans and runs that are no LLM call are not rows") for note in found.notes)
    assert [row.reward for row in read("langfuse.jsonl").trajectories] == [1.0, 1.0]


def test_rewards_groups_and_trials_of_benchmarks_are_read(read):
    for name, group in [("tau-bench.json", 0), ("tau2-bench.json", "g"), ("inspect.json", "g")]:
        (row,) = read(name).trajectories
        assert (row.reward, row.group) == (1.0, group)
    assert any("no tool schemas are given" in note for note in read("tau-bench.json").notes)


def test_an_inspect_archive_is_its_samples(read, tmp_path):
    log = json.loads((SAMPLES / "inspect.json").read_text())
    sample = log.pop("samples")[0]
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("header.json", json.dumps(log))
        archive.writestr("samples/g_epoch_1.json", json.dumps(sample))
        archive.writestr("summaries.json", "[]")
    np.testing.assert_array_equal(
        read(tmp_path / "log.eval").trajectories[0].ids, read("inspect.json").trajectories[0].ids
    )


def texts(tokenizer, rows):
    return [tokenizer.decode(row.ids[row.weights > 0]) for row in rows]


def test_demonstrations_of_swe_agent_are_not_trained(read, bytes_tokenizer):
    (row,) = read("swe-agent-history.traj").trajectories
    assert texts(bytes_tokenizer, [row]) == ["the answer is 4<|im_end|>"] and "demonstration" in bytes_tokenizer.decode(
        row.ids
    )


def test_search_trees_are_the_paths_to_their_leaves(read, bytes_tokenizer):
    answered, failed = read("toolbench.json").trajectories
    assert texts(bytes_tokenizer, [failed]) == [
        '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'.lstrip()
    ]
    text = bytes_tokenizer.decode(answered.ids)
    assert "hm\n<tool_call>" in text and '"name": "Finish"' in text and answered.group == failed.group
    found = read("tree-of-thoughts.json")
    failed, solved = found.trajectories
    assert any("proposed again in one step is no row" in note for note in found.notes)
    assert texts(bytes_tokenizer, [failed, solved]) == ["no\n<|im_end|>", "hm\nthe answer is 4\n<|im_end|>"]
    assert [failed.reward, solved.reward, solved.group] == [0.1, 20.0, 900]


def test_rollouts_of_frameworks_train_what_the_model_wrote(read, bytes_tokenizer):
    first, history = read("art.jsonl").trajectories
    assert first.episode == history.episode and first.group == history.group == "g"
    assert texts(bytes_tokenizer, [history]) == ["the answer is 4<|im_end|>"]
    rows = read("verl-responses.jsonl").trajectories
    assert texts(bytes_tokenizer, rows) == ["the answer is 4<|im_end|>", "hm<|im_end|>"] and rows[0].group == 3
    found = read("verl-rollouts.jsonl")
    assert texts(bytes_tokenizer, found.trajectories) == ["the answer is 4"]
    assert any("without special tokens" in note for note in found.notes)


BATCH = {
    "input_ids": np.array([[0, 5, 6, 7, 8, 9, 0], [4, 5, 6, 7, 3, 0, 0]]),
    "attention_mask": np.array([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0]]),
    "responses": np.array([[8, 9, 0], [3, 0, 0]]),
    "response_mask": np.array([[1, 1, 0], [1, 0, 0]]),
    "rollout_log_probs": np.array([[-0.5, -0.25, 0], [-1.0, 0, 0]], np.float32),
    "token_level_scores": np.array([[0, 1.0, 0], [0.0, 0, 0]], np.float32),
}


def check_batch(rows):
    assert [row.ids.tolist() for row in rows] == [[5, 6, 7, 8, 9], [4, 5, 6, 7, 3]]
    assert [row.weights.tolist() for row in rows] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert rows[0].rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.25] and [row.reward for row in rows] == [1.0, 0.0]
    assert [row.group for row in rows] == ["u", "u"]


class DataProto:
    """A batch as verl's protocol.py holds it in memory."""

    batch = BATCH
    non_tensor_batch: ClassVar = {"uid": np.array(["u", "u"], dtype=object)}


def test_a_dataproto_is_read_in_memory_and_from_the_parquet_that_the_docs_make_of_it(tmp_path):
    data = DataProto()
    check_batch(from_messages([data]).trajectories)
    columns = {name: value.tolist() for name, value in [*data.batch.items(), ("uid", data.non_tensor_batch["uid"])]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "batch.parquet")
    found = load(tmp_path / "batch.parquet")
    check_batch(found.trajectories)
    assert found.format == "verl"


def test_nodes_are_rows_whose_shared_tokens_are_equal(read, bytes_tokenizer, dialogue):
    for name in ("nodes.jsonl", "nodes-verifiers.jsonl"):
        found = load(SAMPLES / name)
        assert found.format == "nodes"
        first, second = found.trajectories
        assert first.ids.tolist() == [5, 6, 7, 8, 9, 4, 3] and second.ids.tolist() == [5, 6, 7, 2]
        assert first.weights.tolist() == [0, 0, 0, 1, 1, 0, 1] and first.group == "g" and first.reward == 1.0
        logprobs = first.rollout_logprobs if first.old_logprobs is None else first.old_logprobs
        assert logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.0]
    first, second = read("nodes-messages.jsonl").trajectories
    (expected,) = from_messages([dialogue], tokenizer=bytes_tokenizer, chat_template="chatml").trajectories
    np.testing.assert_array_equal(first.ids, expected.ids)
    assert (first.reward, second.reward) == (1.0, 0.0)


# Where logs keep objects with keys of their own: the path in the file, and the path that the remark names.
CHILDREN = {
    "langfuse.jsonl": ("0.observations.0", "observations."),
    "langsmith.jsonl": ("0.child_runs.0", "child_runs."),
    "mlflow.json": ("0.data.spans.0", "data.spans."),
    "spans-otlp.jsonl": ("0.resourceSpans.0.scopeSpans.0.spans.0", "resourceSpans.scopeSpans.spans."),
    "spans-phoenix-page.json": ("0.data.0", ""),
    "langfuse-page.json": ("0.data.0", ""),
    "openhands-output.jsonl": ("0.history.0", "history."),
    "openhands-completions.jsonl": ("0.response.choices.0", "response.choices."),
    "atif.json": ("0.steps.1", "steps."),
    "swe-agent.traj": ("0.trajectory.0", "trajectory."),
    "swe-agent-history.traj": ("0.history.0", "history."),
    "tau2-bench.json": ("0.simulations.0.messages.1", "simulations.messages."),
    "nodes.jsonl": ("0.nodes.0", "nodes."),
    "nodes-verifiers.jsonl": ("0.traces.0.nodes.0", "traces.nodes."),
    "steps-verifiers.jsonl": ("0.trajectory.0", "trajectory."),
    "steps-agent-lightning.jsonl": ("0.triplets.0", "triplets."),
    "claude-code.jsonl": ("3.message.content.0", "message.content."),
    "codex.jsonl": ("0.payload", "payload."),
    "openhands-events.json": ("1", ""),
    "spans-ai-sdk.jsonl": ("1", ""),
    "spans-openinference.jsonl": ("0.attributes", "attributes."),
    "bfcl.jsonl": ("0.inference_log.1", "inference_log."),
    "toolbench.json": ("0.tree.tree.children.0.children.0", "tree.children."),
    "tree-of-thoughts.json": ("0.steps.0", "steps."),
    "inspect.json": ("0.samples.0.events.0", "samples.events."),
    "gemini.jsonl": ("0.response.candidates.0.content.parts.0", "response.candidates.content.parts."),
    "litellm.jsonl": ("0.response.choices.0", "response.choices."),
    "messages-cline.json": ("0.1.content.0", "content."),
    "messages-ai-sdk.json": ("0.1.parts.1", "parts."),
    "weave.jsonl": ("1.output.choices.0", "output.choices."),
    "areal-interactions.json": ("0.chatcmpl-1.output_message_list.0.tool_calls.0", "*.output_message_list.tool_calls."),
    "art.jsonl": (
        "0.trajectories.0.messages_and_choices.2.message.tool_calls.0",
        "trajectories.messages_and_choices.message.tool_calls.",
    ),
    "nemo-gym.jsonl": ("0.response.output.0.content.0", "response.output.content."),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_key_that_no_reader_knows_is_named_with_its_path(read, tmp_path, monkeypatch, name):
    path, named = CHILDREN[name]
    text = (SAMPLES / name).read_text()
    records = [json.loads(text)] if name.endswith((".json", ".traj")) else [*map(json.loads, text.splitlines())]
    records = records[0] if isinstance(records[0], list) and not name.startswith("messages") else records
    at = records
    for part in path.split("."):
        at = at[int(part)] if isinstance(at, list) else at[part]
    at["colour_score"] = 1
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr("treetrain.logs.records.LISTED", 1000)
    (note,) = [note for note in read(file).notes if "colour" in note]
    assert (
        note.startswith("keys that may say what to train and are not used: ") and f"'{named}colour_score' (1)" in note
    )


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir()))
def test_no_key_of_a_log_as_its_tool_writes_it_is_named_as_one_that_may_say_what_to_train(read, name):
    assert not [note for note in read(SAMPLES / name).notes if "may say what to train" in note]


def test_keys_in_json_that_is_logged_as_text_are_named(bytes_tokenizer):
    said = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": '{"colour": 1}'}, "mask": 1}], "label": 2}
    _, notes = rows_of(bytes_tokenizer, {"request": json.dumps(said), "response": json.dumps(answer)})
    assert "to train and are not used: 'response.label' (1), 'response.choices.mask' (1); --map KEY=PATH" in notes


def rows_of(tokenizer, *records, **options):
    found = from_messages(records, tokenizer=tokenizer, chat_template="chatml", **options)
    return texts(tokenizer, found.trajectories), " ".join(found.notes)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'


def test_ui_messages_of_older_ai_sdks_are_steps_too(bytes_tokenizer):
    tool = {"state": "result", "toolCallId": "c1", "toolName": "add", "args": {"a": 1}, "result": "4"}
    parts = [{"type": "tool-invocation", "toolInvocation": tool}, {"type": "source-url", "url": "x"}]
    parts += [{"type": "step-start"}, {"type": "text", "text": "hm"}]
    said, notes = rows_of(bytes_tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "parts": parts}])
    assert said == [CALL + "hm<|im_end|>"] and "a part of type source-url of a UI message is not in the row" in notes


def test_pydantic_ai_messages_have_instructions_retries_and_no_silent_parts(bytes_tokenizer):
    def request(kind, content, **more):
        return {"kind": "request", "parts": [{"part_kind": kind, "content": content, **more}], "instructions": "be"}

    call = {"part_kind": "tool-call", "tool_name": "add", "args": {"a": 1}, "tool_call_id": "c1"}
    answers = [{"kind": "response", "parts": parts} for parts in ([call], [{"part_kind": "text", "content": "hm"}])]
    retry = request("retry-prompt", "again", tool_name="add", tool_call_id="c1")
    talk = [request("user-prompt", ["hel", "lo"]), answers[0], retry, answers[1]]
    said, notes = rows_of(bytes_tokenizer, talk)
    assert said == [CALL + "hm<|im_end|>"] and "the words that it writes around a retry prompt" in notes
    found = from_messages([talk], tokenizer=bytes_tokenizer, chat_template="chatml").trajectories
    text = bytes_tokenizer.decode(found[0].ids)
    assert text.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhello<|im_end|>")
    assert text.count("system") == 1 and "again" in text
    with pytest.raises(DataError, match="message 2 has other `instructions` than the first"):
        rows_of(bytes_tokenizer, [*talk[:2], retry | {"instructions": "other"}, answers[1]])
    with pytest.raises(DataError, match="message 0 has a part of the kind 'other'"):
        rows_of(bytes_tokenizer, [request("other", "x"), *answers])
    with pytest.raises(DataError, match="content part 0 is of type 'builtin-tool-call'"):
        rows_of(bytes_tokenizer, [talk[0], {"kind": "response", "parts": [call | {"part_kind": "builtin-tool-call"}]}])


def test_a_response_of_pydantic_ai_with_several_texts_is_one_answer(bytes_tokenizer):
    said = [{"role": "assistant", "content": part} for part in ("h", [{"kind": "text", "text": "m"}])]
    events = [{"role": "user", "content": "hello"}, *({"index": 0, "message": one} for one in said)]
    span = {"attributes": {"gen_ai.operation.name": "chat", "events": json.dumps(events)}}
    assert rows_of(bytes_tokenizer, span)[0] == ["hm<|im_end|>"]
    span["attributes"]["events"] = json.dumps(events[:1])
    with pytest.raises(DataError, match="an LLM call without an answer is no row"):
        rows_of(bytes_tokenizer, span)


def test_the_whole_conversation_of_a_pydantic_ai_run_is_read_by_its_path(bytes_tokenizer):
    run = json.loads((SAMPLES / "spans-pydantic-ai.jsonl").read_text().splitlines()[-1])
    path = {"messages": "attributes.all_messages_events"}
    assert rows_of(bytes_tokenizer, run, map=path, format="chat")[0] == [
        "hm\n" + CALL + "the answer is 4<|im_end|>",
    ]


def test_single_turn_results_of_bfcl_have_no_prompt(bytes_tokenizer):
    with pytest.raises(DataError, match="single-turn results of BFCL do not have the prompt"):
        rows_of(bytes_tokenizer, {"id": "simple_0", "result": "[add(a=1)]", "inference_log": []})
