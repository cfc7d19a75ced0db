"""Sessions of agents: what one file, several files or a folder hold of them."""

import json
from pathlib import Path

import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def read(bytes_tokenizer, templates):
    def read(*paths, **options):
        given = {"tokenizer": bytes_tokenizer, "chat_template": templates["chatml"], "tools": "none"} | options
        return load(paths, **given)

    return read


@pytest.fixture
def said(bytes_tokenizer):
    """The text of every row, and what of it is trained."""
    return lambda found: [
        (bytes_tokenizer.decode(row.ids), bytes_tokenizer.decode(row.ids[row.weights > 0]))
        for row in found.trajectories
    ]


def line(kind, uuid, parent, content, **more):
    message = {"role": kind, "content": content} | ({"id": uuid.split(".")[0]} if kind == "assistant" else {})
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message} | more


def result(name):
    return [{"type": "tool_result", "tool_use_id": name, "content": f"result {name}"}]


def call(name):
    return [{"type": "tool_use", "id": name, "name": "add", "input": {}}]


CALLED = "<tool_call>add{}</tool_call>"


def test_parts_of_one_answer_are_one_message_and_results_of_parallel_calls_keep_their_order(read, said, write_rows):
    path = write_rows(
        line("user", "u1", None, "q"),
        line("assistant", "m1.a", "u1", [{"type": "text", "text": "both"}]),
        line("assistant", "m1.b", "m1.a", call("x")),
        line("assistant", "m1.c", "m1.b", call("y")),
        line("user", "u2", "m1.b", result("x")),
        line("user", "u3", "m1.c", result("y")),
        line("assistant", "m2", "u3", [{"type": "text", "text": "done"}]),
    )
    ((text, trained),) = said(read(path))
    assert trained == f"both{CALLED}{CALLED}<|im_end|>done<|im_end|>"
    assert text.index("result x") < text.index("result y")


def test_a_rewind_a_compaction_and_a_sub_agent_are_rows_of_one_session(read, said, write_rows):
    path = write_rows(
        line("user", "u1", None, "first"),
        line("assistant", "m1", "u1", [{"type": "text", "text": "one"}]),
        line("user", "u2", "m1", "second"),
        line("assistant", "m2", "u2", [{"type": "text", "text": "two"}]),
        line("user", "a1", None, "task", isSidechain=True, agentId="a"),
        line("assistant", "am", "a1", [{"type": "text", "text": "sub"}], isSidechain=True, agentId="a"),
        line("user", "u3", "m1", "other second"),  # the user went back
        line("assistant", "m3", "u3", [{"type": "text", "text": "three"}]),
        {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s"},
        line("user", "u4", "c", "summary", isCompactSummary=True),
        line("assistant", "m4", "u4", [{"type": "text", "text": "four"}]),
        line(
            "assistant",
            "m5",
            "m4",
            [{"type": "text", "text": "API Error"}],
            message={
                "role": "assistant",
                "model": "<synthetic>",
                "content": [{"type": "text", "text": "API Error"}],
            },
        ),
    )
    found = read(path)
    end = "<|im_end|>"
    assert [trained for _, trained in said(found)] == [
        f"one{end}two{end}",
        f"one{end}three{end}",
        f"four{end}",
        f"sub{end}",
    ]
    assert {row.episode for row in found.trajectories} == {"s"} and len({row.id for row in found.trajectories}) == 4
    assert "second" not in said(found)[2][0] and any("in place of the model" in note for note in found.notes)


def test_what_follows_a_compaction_of_codex_is_a_row_and_its_context_is_not_trained(read, said, tmp_path):
    lines = (SAMPLES / "codex.jsonl").read_text().splitlines()
    history = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "kept"}]}]
    lines.append(json.dumps({"type": "compacted", "payload": {"message": "", "replacement_history": history}}))
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "later"}]}
    ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]}
    lines += [json.dumps({"type": "response_item", "payload": item}) for item in (ask, answer)]
    path = tmp_path / "rollout.jsonl"
    path.write_text("\n".join(lines))
    first, second = said(read(path))
    assert first[1].endswith("the answer is 4<|im_end|>") and second[1] == "later<|im_end|>" and "kept" in second[0]
    path.write_text("\n".join([*lines, json.dumps({"type": "response_item", "payload": {"type": "odd_call"}})]))
    with pytest.raises(DataError, match="of type 'odd_call'"):
        read(path)


def test_tools_that_codex_runs_are_calls_and_those_of_the_api_are_noted(read, said, tmp_path):
    lines = [json.loads(one) for one in (SAMPLES / "codex.jsonl").read_text().splitlines()]
    items = [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "tool_search_call", "call_id": "c2", "execution": "client", "arguments": {"query": "calendar"}},
        {"type": "tool_search_output", "call_id": "c2", "status": "completed", "tools": [{"name": "calendar.list"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "output_text", "text": "Done!"}]},
    ]
    path = tmp_path / "rollout.jsonl"
    path.write_text(
        "\n".join(json.dumps(one) for one in [*lines, *({"type": "response_item", "payload": one} for one in items)])
    )
    found = read(path)
    ((text, trained),) = said(found)
    assert '<tool_call>tool_search_call{"query": "calendar"}</tool_call>' in trained
    assert '<tool_call>apply_patch"*** Begin Patch"</tool_call>' in trained
    assert "calendar.list" in text and "Done!" in text and "calendar.list" not in trained and "Done!" not in trained
    assert any(note.startswith("an item of type web_search_call is not in the row") for note in found.notes)


def test_several_sessions_in_a_folder_stay_apart(read, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text((SAMPLES / "codex.jsonl").read_text())
    assert [len(row) for row in read(tmp_path).trajectories] == [len(read(SAMPLES / "codex.jsonl").trajectories[0])] * 2


def test_requests_and_results_of_a_batch_are_joined_over_files(read, said, tmp_path):
    lines = (SAMPLES / "batch.jsonl").read_text().splitlines()
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text("\n".join(lines[:2]))
    failed = {"custom_id": "r1", "response": None, "error": {"code": "x"}}
    results.write_text("\n".join([lines[2], json.dumps(failed)]))
    found = read(requests, results)
    assert said(found) == said(read(SAMPLES / "batch.jsonl"))[:1]
    assert any("without a response is no row" in note for note in found.notes)
    with pytest.raises(DataError, match="custom_id 'r0' has 0 requests; give the file of requests"):
        read(results)
    body = {"content": [{"type": "text", "text": "hi"}], "role": "assistant", "stop_reason": "end_turn"}
    requests.write_text(json.dumps({"custom_id": "a", "params": {"messages": [{"role": "user", "content": "q"}]}}))
    results.write_text(json.dumps({"custom_id": "a", "result": {"type": "succeeded", "message": body}}))
    assert said(read(requests, results))[0][1] == "hi<|im_end|>"


def test_a_run_folder_of_mini_swe_agent_is_its_trajectories(read, said, tmp_path):
    sample = (SAMPLES / "mini-swe-agent.traj.json").read_text()
    for name in ("a__1", "z__2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.traj.json").write_text(sample)
    patch = {"model_name_or_path": "m", "instance_id": "a__1", "model_patch": "x"}
    (tmp_path / "preds.json").write_text(json.dumps({"a__1": patch}))
    found = read(tmp_path)
    assert found.format == "mini-swe-agent" and said(found) == said(read(SAMPLES / "mini-swe-agent.traj.json")) * 2
    assert any("holds patches and no messages" in note for note in found.notes)
    with pytest.raises(DataError, match="no record holds messages or token ids"):
        read(tmp_path / "preds.json")


def test_a_folder_of_simulations_of_tau2_has_the_policy_of_its_results(read, said, tmp_path):
    run = json.loads((SAMPLES / "tau2-bench.json").read_text())
    whole = read(SAMPLES / "tau2-bench.json")
    (simulation,) = run["simulations"]
    (tmp_path / "simulations").mkdir()
    for name in ("s1", "s2"):
        (tmp_path / "simulations" / f"{name}.json").write_text(json.dumps(simulation))
    (tmp_path / "results.json").write_text(json.dumps(run | {"simulations": []}))
    found = read(tmp_path)
    assert said(found) == said(whole) * 2 and [row.reward for row in found.trajectories] == [1.0, 1.0]
    assert "be brief" in said(found)[0][0]


@pytest.mark.parametrize("name", ["event-0000{}-x.json", "{}.json"])
def test_events_in_files_of_their_own_are_one_session(read, said, tmp_path, name):
    sample = SAMPLES / "openhands-events.json"
    (tmp_path / "events").mkdir()
    for number, event in enumerate(json.loads(sample.read_text())):
        (tmp_path / "events" / name.format(number)).write_text(json.dumps(event))
    assert said(read(tmp_path / "events")) == said(read(sample))


def test_an_action_of_openhands_without_its_response_is_refused(read, tmp_path):
    path = tmp_path / "events.json"
    path.write_text(json.dumps([{"id": 0, "timestamp": "t", "source": "agent", "action": "run", "args": {}}]))
    with pytest.raises(DataError, match="event 0 is the action 'run' without the model's response"):
        read(path)


def test_copied_steps_of_atif_are_not_trained_and_sub_agents_are_rows(read, said, tmp_path):
    record = json.loads((SAMPLES / "atif.json").read_text())
    record["subagent_trajectories"] = [json.loads((SAMPLES / "atif.json").read_text()) | {"trajectory_id": "sub"}]
    record["steps"][2]["is_copied_context"] = True
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(record))
    whole, sub = said(read(path))
    assert whole[1] == "the answer is 4<|im_end|>" and sub[1].startswith("hm")


def test_calls_of_nemo_gym_with_token_ids_are_their_tokens():
    first, second = load(SAMPLES / "nemo-gym-tokens.jsonl").trajectories
    assert first.ids.tolist() == [5, 6, 7, 8, 9] and second.ids.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert first.weights.tolist() == [0, 0, 0, 1, 1] and first.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert (first.group, first.reward, first.episode) == (1, 1.0, "r")
    record = json.loads((SAMPLES / "nemo-gym-tokens.jsonl").read_text())
    answer = record["response"]["output"][3]
    for odd, message in [({"a": 1}, "item 3 is of type None"), (answer | {"role": True}, "unknown role True")]:
        record["response"]["output"][3] = odd
        with pytest.raises(DataError, match=message):
            from_messages([record])


def test_columns_of_trl_are_advantages_and_rewards(read, write_rows):
    path = write_rows(
        {"prompt": "a", "completion": "b", "format_reward": 0.5, "answer_reward": 1.0, "advantage": -0.25},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
            "answer_reward": 1,
            "advantage": 2,
        },
    )
    found = read(path)
    first, second = found.trajectories
    assert (first.reward, second.reward) == (1.5, 1)
    assert set(first.advantages[first.weights > 0]) == {-0.25} and set(second.advantages[second.weights > 0]) == {2}
    assert any("sum of format_reward, answer_reward" in note for note in found.notes)


def test_langsmiths_parquet_has_json_text_in_its_columns(read, said, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    runs = [json.loads(text) for text in (SAMPLES / "langsmith-openai.jsonl").read_text().splitlines()]
    expected = said(read(SAMPLES / "langsmith-openai.jsonl"))
    rows = [
        {name: json.dumps(run[name]) if isinstance(run.get(name), dict) else run.get(name) for name in run}
        | {"feedback_stats": json.dumps({"correct": {"n": 1, "avg": 0.5}})}
        for run in runs
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "runs.parquet")
    found = read(tmp_path / "runs.parquet")
    assert said(found) == expected and {row.reward for row in found.trajectories} == {0.5}
