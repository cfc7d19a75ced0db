"""Data sets of columns, search trees, and batches that trainers write; tests/logs/SOURCES.md names the sources."""

import json

import numpy as np
import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import from_messages, load


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def read(bytes_tokenizer):
    def read(*records, **options):
        options = {"tokenizer": bytes_tokenizer, "chat_template": "chatml"} | options
        return from_messages(records, **options)

    return read


@pytest.fixture
def said(read, bytes_tokenizer):
    """The whole text of every row, and its trained text."""

    def said(*records, **options):
        rows = read(*records, **options).trajectories
        decode = bytes_tokenizer.decode
        return [(decode(row.ids), decode(row.ids[row.weights > 0])) for row in rows]

    return said


def same(said, *records):
    """The rows of the same messages."""
    return said(*({"messages": messages} for messages in records))


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": "Name a tree.", "input": "", "output": "Oak"}, [user("Name a tree."), assistant("Oak")]),
        ({"instruction": "Add.", "input": "2, 3", "output": "5"}, [user("Add.\n2, 3"), assistant("5")]),
        ({"query": "tree?", "response": "Oak"}, [user("tree?"), assistant("Oak")]),
        (
            {"system": "s", "instruction": "b?", "output": "B", "history": [["a?", "A"]]},
            [{"role": "system", "content": "s"}, user("a?"), assistant("A"), user("b?"), assistant("B")],
        ),
    ],
)
def test_instructions_and_their_answers_are_conversations(said, record, messages):
    assert said(record) == same(said, messages)


def test_prompts_and_responses_are_texts_with_rewards_in_the_group_of_their_prompt(read, said):
    records = [{"prompt": "2+2=", "response": str(n), "reward": float(n == 4)} for n in (4, 5)]
    rows = read(*records, {"prompt": "1+1=", "response": "2", "reward": 1.0}).trajectories
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0]
    assert rows[0].group == rows[1].group != rows[2].group
    assert said(*records) == [("2+2=4", "4"), ("2+2=5", "5")]
    evaluated = {"input_prompt": "2+2=", "output_response": "4", "score": [0, 1.0], "stop_reason": "stop"}
    assert read(evaluated).trajectories[0].reward == 1.0


PAIR = {"prompt": [user("tree?")], "chosen": [assistant("Oak")], "rejected": [assistant("Bus")]}


@pytest.mark.parametrize(
    "record",
    [
        {
            "conversations": [{"from": "human", "value": "tree?"}],
            "chosen": {"from": "gpt", "value": "Oak"},
            "rejected": {"from": "gpt", "value": "Bus"},
        },
        {
            "input": {"messages": [user("tree?")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [assistant("Oak")],
            "non_preferred_output": [assistant("Bus")],
        },
        {"instruction": "tree?", "input": "", "chosen": "Oak", "rejected": "Bus"},
    ],
)
def test_pairs_of_other_tools_are_pairs(read, said, record):
    assert said(record) == said(PAIR)
    assert [row.chosen for row in read(record).trajectories] == [True, False]


def test_a_text_part_may_hold_its_text_as_value(said):
    parts = [{"type": "text", "value": "Oak"}]
    assert said({"messages": [user("tree?"), assistant(parts)]}) == same(said, [user("tree?"), assistant("Oak")])


# Search trees


def test_every_leaf_of_a_tree_of_messages_is_a_row(said):
    replies = [
        {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "Oak", "replies": []},
        {"message_id": "c", "parent_id": "a", "role": "assistant", "text": "Bus"},
    ]
    root = {"message_id": "a", "role": "prompter", "text": "tree?"}
    wanted = same(said, [user("tree?"), assistant("Oak")], [user("tree?"), assistant("Bus")])
    assert said({"message_tree_id": "t", "prompt": root | {"replies": replies}}) == wanted
    flat = [one | {"message_tree_id": "t"} for one in (root | {"parent_id": None}, *replies)]
    assert said(*flat) == wanted


def test_a_message_whose_parent_is_not_in_its_tree_is_an_error(read):
    lost = {"message_id": "b", "parent_id": "x", "role": "assistant", "text": "Oak", "message_tree_id": "t"}
    with pytest.raises(DataError, match=r"`parent_id` is 'x', which is the id of no message of its tree"):
        read(lost)


def test_texts_of_a_search_are_one_answer_and_the_value_of_the_leaf_is_its_reward(read, said):
    leaves = [{"text": "four", "value": 1.0, "children": []}, {"text": "five", "value": 0.0, "children": []}]
    tree = {"question": "2+2?", "tree": {"state": "", "value": 0.5, "children": [{"text": "add", "children": leaves}]}}
    assert said(tree) == same(said, [user("2+2?"), assistant("add\nfour")], [user("2+2?"), assistant("add\nfive")])
    rows = read(tree).trajectories
    assert [row.reward for row in rows] == [1.0, 0.0] and rows[0].group == rows[1].group is not None
    whole = [{"text": "add: four", "reward": 1.0}]
    grows = {"question": "2+2?", "children": [{"text": "add", "children": whole}]}
    assert said(grows) == same(said, [user("2+2?"), assistant("add: four")])


def test_a_state_of_lats_is_an_answer_and_what_it_observed(said):
    def state(thought, action, observation):
        return {"thought": thought, "action": action, "observation": observation}

    leaf = {"state": state("t2", "Finish[y]", ""), "children": [], "reward": 1}
    middle = {"state": state("t1", "Search[x]", "found"), "children": [leaf], "value": 1}
    root = {"state": state("", "", ""), "question": "Who?", "parent": None, "children": [middle], "visits": 2}
    messages = [
        user("Who?"),
        assistant("Thought: t1\nAction: Search[x]"),
        user("Observation: found"),
        assistant("Thought: t2\nAction: Finish[y]"),
    ]
    assert said(root) == same(said, messages)


def test_a_node_without_text_is_named(read):
    with pytest.raises(DataError, match=r"a node has the keys 'prior'; none of them is its text"):
        read({"question": "a?", "children": [{"prior": 0.5}]})


# Batches of trainers


def test_a_group_of_atropos_has_a_row_for_each_of_its_tokens(read):
    group = {
        "tokens": [[5, 6, 7, 8], [5, 6, 9]],
        "masks": [[-100, -100, 7, 8], [-100, -100, 9]],
        "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -2.0]],
        "messages": [[user("a"), assistant("b")], [user("a"), assistant("c")]],
        "advantages": None,
        "overrides": None,
    }
    rows = read(group).trajectories
    assert [row.ids.tolist() for row in rows] == group["tokens"]
    assert [row.weights.tolist() for row in rows] == [[0, 0, 1, 1], [0, 0, 1]]
    assert [row.reward for row in rows] == [1.0, -1.0] and rows[0].group == rows[1].group is not None
    np.testing.assert_array_equal(rows[0].rollout_logprobs, [0, 0, -0.5, -0.25])
    with pytest.raises(DataError, match=r"`scores` has 1 entries for 2 rows of tokens"):
        read(group | {"scores": [1.0]})
    with pytest.raises(DataError, match=r"labels\[2\] = 1 but input_ids\[2\] = 7"):
        read(group | {"masks": [[-100, -100, 1, 1], [-100, -100, 1]]})


def test_a_padded_row_of_nemo_rl_is_cut_to_its_length(read):
    record = {
        "content": ["ab"],
        "rewards": [1.0],
        "input_lengths": [4],
        "token_ids": [[5, 6, 7, 8, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0, 0, 0.5, 0.5, 0, 0]],
        "generation_logprobs": [[0, 0, -0.1, -0.2, 0, 0]],
        "prev_logprobs": [[0, 0, -0.3, -0.4, 0, 0]],
        "idx": 0,
    }
    (row,) = read(record).trajectories
    assert row.ids.tolist() == [5, 6, 7, 8] and row.weights.tolist() == [0, 0, 1, 1] and row.reward == 1.0
    np.testing.assert_array_equal(row.rollout_logprobs, [0, 0, -0.1, -0.2])
    np.testing.assert_array_equal(row.old_logprobs, [0, 0, -0.3, -0.4])
    np.testing.assert_array_equal(row.advantages, [0, 0, 0.5, 0.5])
    (masked,) = read(record | {"sample_loss_mask": [0.0]}).trajectories
    assert not masked.weights.any()


def test_a_sequence_of_prime_rl_keeps_its_mask_weights_and_log_probabilities(read):
    record = {
        "schema_version": 1,
        "token_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "advantages": [0, 0.5, 0.5],
        "inference_logprobs": [0.0, -0.1, -0.2],
        "rl_weights": [0.0, 1.0, 0.5],
        "ce_weights": [None, None, None],
    }
    (row,) = read(record).trajectories
    assert row.ids.tolist() == [5, 6, 7] and row.weights.tolist() == [0, 1, 0.5]
    np.testing.assert_array_equal(row.rollout_logprobs, [0, -0.1, -0.2])
    with pytest.raises(DataError, match="`ce_weights` are given"):
        read(record | {"ce_weights": [0.0, 1.0, 1.0]})


def test_a_response_of_sglang_takes_its_prompt_from_wherever_the_log_has_it(read, said):
    pairs = {"output_token_logprobs": [[-0.5, 8, None]], "finish_reason": {"type": "length"}}
    known = pairs | {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None]]}
    (row,) = read({"text": "o", "meta_info": known}).trajectories
    assert row.ids.tolist() == [5, 6, 8] and row.weights.tolist() == [0, 0, 1]
    for record in (
        {"request": {"text": "tree?"}, "response": {"text": "Oak", "meta_info": pairs}},
        {"prompt": "tree?", "text": "Oak", "meta_info": pairs},
    ):
        assert said(record) == [("tree?Oak", "Oak")]
        assert any("lacks the ids of the prompt" in note for note in read(record).notes)


def test_steps_of_atif_with_ids_are_rows_of_tokens(read):
    def step(number, prompt, answer):
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": answer, "logprobs": [-0.5] * len(answer)}
        return {"step_id": number, "source": "agent", "message": "x", "metrics": metrics}

    steps = [{"source": "user", "message": "a"}, step(2, [5, 6], [7]), step(4, [5, 6, 7, 9], [8, 3])]
    record = {"schema_version": "ATIF-v1.5", "session_id": "s", "agent": {"name": "x"}, "steps": steps}
    rows = read(record).trajectories
    assert [row.ids.tolist() for row in rows] == [[5, 6, 7], [5, 6, 7, 9, 8, 3]]
    assert [row.weights.tolist() for row in rows] == [[0, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert {row.episode for row in rows} == {"s"}
    del steps[2]["metrics"]["prompt_token_ids"]
    found = read(record)
    assert len(found.trajectories) == 1 and any("not every sampled step has the ids" in note for note in found.notes)


def test_a_session_of_claude_code_without_parents_is_one_conversation(said):
    def line(number, message):
        return {"type": message["role"], "sessionId": "s", "uuid": str(number), "message": message}

    answers = [assistant([{"type": "text", "text": text}]) | {"id": text} for text in "AB"]
    lines = [line(1, user("a?")), line(2, answers[0]), line(3, user("b?")), line(4, answers[1])]
    assert said(*lines) == same(said, [user("a?"), assistant("A"), user("b?"), assistant("B")])


def test_the_folder_of_a_run_of_tau2_bench_is_read_without_its_simulations_in_the_first_file(tmp_path, bytes_tokenizer):
    (tmp_path / "simulations").mkdir()
    index = {"info": {"environment_info": {"policy": "P"}}, "tasks": [{"id": "0"}], "simulation_index": [{"id": "s"}]}
    (tmp_path / "results.json").write_text(json.dumps(index))
    messages = [user("book"), assistant("ok") | {"cost": 0.1, "usage": {"tokens": 1}}]
    run = {"id": "s", "task_id": "0", "trial": 0, "reward_info": {"reward": 1.0}, "messages": messages}
    (tmp_path / "simulations" / "s.json").write_text(json.dumps(run))
    found = load(tmp_path, tokenizer=bytes_tokenizer, chat_template="chatml")
    (row,) = found.trajectories
    assert found.format == "tau-bench" and row.reward == 1.0 and row.group == "0"


# Errors in the place of answers, and sources that are no files

FAILED = {"request": {"messages": [user("hi")]}, "response": {"error": {"message": "rate limit", "code": 429}}}


@pytest.mark.parametrize("failed", [FAILED, {"error": "boom", "time": 3}])
def test_an_error_is_no_row_and_no_reason_to_refuse_the_file(read, failed):
    answered = FAILED | {"response": {"choices": [{"message": assistant("Oak")}]}}
    for records in ((failed, answered), (answered, failed)):
        found = read(*records)
        assert len(found.trajectories) == 1 and found.format == "requests"
        assert any(note.startswith("an error in the place of an answer is no row") for note in found.notes)


def test_a_conversation_with_an_error_beside_it_is_a_row(read):
    assert len(read({"error": "timeout", "messages": [user("a"), assistant("b")]}).trajectories) == 1


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("s3://bucket/rows.parquet", r"load_dataset\(\"parquet\", data_files='s3://bucket/rows\.parquet'"),
        ("hf://datasets/a/b/rows.jsonl", r"load_dataset\(\"json\", data_files='hf://"),
        ("team/data-set", r"load_dataset\('team/data-set', split="),
        ("-", "standard input is not read"),
    ],
)
def test_a_source_that_is_no_file_is_told_how_to_be_read(source, advice):
    with pytest.raises(DataError, match=advice):
        load(source)
