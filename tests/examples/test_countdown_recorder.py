"""The shipped transcripts: written by the committed program, valid chat, and trees."""

import gzip
import json
from random import Random

import pytest
from examples.countdown import record
from examples.countdown.chat import Episode, Reply, begin, parse_reply
from examples.countdown.environment import TOOLS, Puzzle, reward
from examples.countdown.policies import POLICIES

SPLITS = ("train", "heldout")


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    folder = tmp_path_factory.mktemp("again")
    record.record(folder)
    return folder


@pytest.mark.parametrize("split", SPLITS)
def test_the_recorder_writes_the_committed_rows_again_byte_for_byte(split, again, countdown_folder):
    name = f"{split}.jsonl.gz"
    mine, committed = (again / name).read_bytes(), (countdown_folder / name).read_bytes()
    # What is inside the gzip container: two versions of zlib may pack the same bytes differently.
    assert gzip.decompress(mine) == gzip.decompress(committed)


@pytest.mark.parametrize("split", SPLITS)
def test_every_row_is_a_self_contained_openai_chat(split, recorded):
    for row in recorded[split]:
        assert set(row) == {"id", "task_id", "trial", "reward", "messages", "tools"}
        assert row["tools"] == TOOLS
        roles = [message["role"] for message in row["messages"]]
        turns = (len(roles) - 2) // 2
        assert turns >= 1
        assert roles == ["system", "user"] + ["assistant", "tool"] * turns
        for agent, tool in zip(row["messages"][2::2], row["messages"][3::2], strict=True):
            assert agent["content"] is None or agent["content"]
            (made,) = agent["tool_calls"]
            assert made["type"] == "function"
            assert made["id"] == tool["tool_call_id"]
            assert isinstance(made["function"]["arguments"], str)
            assert isinstance(json.loads(made["function"]["arguments"]), dict)


@pytest.mark.parametrize("split", SPLITS)
def test_every_transcript_replays_in_the_environment_to_its_recorded_reward(split, recorded):
    for row in recorded[split]:
        system, user = row["messages"][:2]
        numbers, target = user["content"].removeprefix("Numbers: ").removesuffix(".").split(". Target: ")
        episode = begin(Puzzle(tuple(map(int, numbers.split(", "))), int(target)))
        assert list(episode.messages) == [system, user]
        for agent in row["messages"][2::2]:
            function = agent["tool_calls"][0]["function"]
            episode = episode.after(Reply(agent["content"], function["name"], function["arguments"]))
        assert list(episode.messages) == row["messages"]
        assert episode.state.done
        assert reward(episode.state) == row["reward"]


@pytest.mark.parametrize("split", SPLITS)
def test_trajectories_of_a_task_branch_off_each_other_inside_the_episode(split, recorded):
    for rows in _by_task(recorded[split]):
        unique = {json.dumps(row["messages"][:end]) for row in rows for end in range(1, len(row["messages"]) + 1)}
        flat = sum(len(row["messages"]) for row in rows)
        assert len(unique) < 0.6 * flat
        first_turns = {json.dumps(row["messages"][:3]) for row in rows}
        assert len(first_turns) < len(rows)


@pytest.mark.parametrize("split", SPLITS)
def test_there_are_successes_near_misses_failures_undos_errors_and_silent_turns(split, recorded):
    rows = recorded[split]
    rewards = [row["reward"] for row in rows]
    solved, failed = rewards.count(1.0) / len(rows), rewards.count(0.0) / len(rows)
    assert 0.3 < solved < 0.8
    assert 0.1 < failed < 0.5
    assert any(0 < value < 1 for value in rewards)
    messages = [message for row in rows for message in row["messages"]]
    assert any(m["role"] == "tool" and m["content"].startswith("Error: ") for m in messages)
    assert any(m["role"] == "tool" and m["content"].startswith("Undone.") for m in messages)
    assert any(m["role"] == "assistant" and m["content"] is None for m in messages)


def test_no_puzzle_is_in_both_files(recorded):
    def puzzles(rows):
        texts = {row["messages"][1]["content"] for row in rows}
        return {(tuple(sorted(text.split(". ")[0].split(": ")[1].split(", "))), text.split(". ")[1]) for text in texts}

    train, heldout = puzzles(recorded["train"]), puzzles(recorded["heldout"])
    assert (len(train), len(heldout)) == (64, 12)
    assert not train & heldout


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_ends_its_episode_and_plays_the_same_for_the_same_seed(name):
    def ends(seed: int) -> Episode:
        return record.play(begin(Puzzle((3, 8, 4, 7), 34)), POLICIES[name], Random(seed))[-1]

    assert all(ends(seed).state.done for seed in range(20))
    assert ends(5) == ends(5)
    assert len({json.dumps(ends(seed).messages) for seed in range(20)}) > 10


def test_a_sampled_reply_is_read_back_as_content_and_tool_call():
    text = 'Try it.\n<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
    assert parse_reply(text) == Reply("Try it.", "calculate", '{"expression": "3 * 4"}')
    assert parse_reply('<tool_call>\n{"name": "undo"}\n</tool_call>') == Reply(None, "undo", "{}")
    for broken in ("", "no call", "<tool_call>{</tool_call>", "<tool_call>[]</tool_call>", "<tool_call>{}</tool_call>"):
        assert parse_reply(broken) is None


def _by_task(rows):
    tasks = {}
    for row in rows:
        tasks.setdefault(row["task_id"], []).append(row)
    return tasks.values()
