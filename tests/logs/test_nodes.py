"""Files of trees become rows: one for each trajectory, with what its nodes have."""

import json

import numpy as np
import pytest

import treetrain as tt
from treetrain.cli import main
from treetrain.core.errors import DataError
from treetrain.logs.once import count_once

NODES = [
    {"id": "p", "tokens": [5, 6, 7], "loss_weights": 0, "key": "adapter"},
    {"id": "a", "parent": "p", "tokens": [8, 9], "advantage": [1, 2], "loss_mask": [1, 0]},
    {"id": "b", "parent": "a", "tokens": [3], "advantages": -1, "reward": 1, "key": "other"},
    {"id": "c", "parent": "a", "tokens": [4, 2], "advantages": 0.5, "reward": 0, "loss_weights": 0.5},
]


@pytest.fixture
def write(tmp_path):
    def write(**record):
        path = tmp_path / "trees.jsonl"
        path.write_text(json.dumps(record))
        return path

    return write


def test_a_row_has_the_tokens_weights_and_facts_of_its_nodes(write):
    first, second = tt.load(write(nodes=NODES, group="g")).trajectories
    assert first.ids.tolist() == [5, 6, 7, 8, 9, 3] and second.ids.tolist() == [5, 6, 7, 8, 9, 4, 2]
    assert first.weights.tolist() == [0, 0, 0, 1, 0, 1] and second.weights.tolist() == [0, 0, 0, 1, 0, 0.5, 0.5]
    assert first.advantages is not None and first.advantages[3:].tolist() == [1, 2, -1]
    assert (first.key, second.key) == ("other", "adapter"), "the last one on the path"
    assert [(row.reward, row.group) for row in (first, second)] == [(1, "g"), (0, "g")]


def test_listed_trajectories_may_end_anywhere_and_have_facts_of_their_own(write):
    nodes = [{name: value for name, value in node.items() if name != "advantages"} for node in NODES]
    ends = ["b", {"node": "a", "pair": 1, "chosen": True}, {"node": "c", "pair": 1, "chosen": False, "reward": 3}, "b"]
    nodes[1] = {"id": "a", "parent": "p", "tokens": [8, 9]}
    found = tt.load(write(nodes=nodes, trajectories=ends))
    rows = found.trajectories
    assert [len(row) for row in rows] == [6, 5, 7, 6]
    assert [(row.pair, row.chosen, row.reward) for row in rows[1:3]] == [(1, True, None), (1, False, 3)]
    assert any("`reward` of a node is used only at leaves" in note for note in found.notes)


def test_tokens_of_nodes_count_once(write):
    rows = tt.load(path := write(nodes=NODES[:1] + [node | {"key": "k"} for node in NODES[1:]])).trajectories
    once = tt.load(path, count="once").trajectories
    assert [row.weights.tolist() for row in once] == [[0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0.5, 0.5]]
    for one, other in zip(once, count_once(rows), strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)
    twins = [{"tokens": [1]}, {"parent": 0, "tokens": [2], "advantages": 1}, {"parent": 0, "tokens": [2], "values": 1}]
    twins[2] |= {"advantages": -1}
    with pytest.raises(DataError, match="both train token 1 of one path, with the advantages 1 and -1"):
        tt.load(write(nodes=twins), count="once")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [{"id": 0, "parent": 1, "tokens": [1]}, {"id": 1, "parent": 0, "tokens": [2]}],
            "node 0: its parents form a cycle",
        ),
        (
            [{"parent": 1, "tokens": [1]}, {"parent": 2, "tokens": [2]}, {"parent": 1, "tokens": [3]}],
            "its parents form a cycle",
        ),
        ([{"tokens": [1], "logprobs": [-1, -2]}], "2 old_logprobs for 1 tokens"),
        ([{"tokens": [1]}, {"parent": 0, "tokens": [1], "logprobs": [None]}], "is null but the token is"),
        ([{"tokens": [1, 2]}, {"parent": 0, "tokens": [1], "values": [1]}], "is null but the token is"),
        (
            [{"tokens": [1]}, {"parent": 0, "messages": [{"role": "user", "content": "a"}]}],
            "mixes nodes of tokens and of messages",
        ),
        ([{"tokens": [1, -2]}], r"ids\[1\] = -2 is negative"),
        ([{"id": 0, "parent": 7, "tokens": [1]}], "line 1: `nodes.0.parent` is 7, which is the id of no node"),
        ([{"id": 0, "tokens": [1]}, {"id": 0, "tokens": [1]}], "`nodes.1.id` is 0, expected a name"),
        ([{"id": 0, "tokens": 3}], "`tokens` is 3, expected a list"),
    ],
)
def test_bad_trees_are_refused_with_the_field(write, nodes, message):
    with pytest.raises(DataError, match=message):
        tt.load(write(nodes=nodes), format="nodes", tokenizer=tt.load_tokenizer("tiny"))


def test_a_tree_that_does_not_fit_the_model_is_refused_with_its_place(write):
    path = write(nodes=[{"id": "a", "tokens": [1, 2]}, {"id": "b", "parent": "a", "tokens": [9]}])
    assert len(tt.load(path, vocab_size=10, max_positions=3).trajectories) == 1
    with pytest.raises(DataError, match=r"line 1: ids\[2\] = 9 is outside the model's vocabulary of 9"):
        tt.load(path, vocab_size=9)
    with pytest.raises(DataError, match="has 3 tokens, the model has 2 positions"):
        tt.load(path, max_positions=2)


def test_keys_of_nodes_that_are_not_used_are_noted(write):
    nodes = [{"id": "a", "tokens": [1, 2], "reward": 1, "colour": 3}, {"id": "b", "parent": "a", "tokens": [9]}]
    said = " ".join(tt.load(write(nodes=nodes, name="x")).notes)
    assert "keys that are not used: 2, such as 'name'" in said
    assert "`reward` of a node is used only at leaves" in said


def test_the_commands_take_files_of_trees(write, tmp_path, capsys):
    path = str(write(nodes=[{name: node[name] for name in node if name != "key"} for node in NODES]))
    assert main(["inspect", path, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["format"] == "nodes" and figures["trained_again"] == 1
    assert {name: figures["file"][name] for name in ("trajectories", "flat", "unique", "trained_flat")} == {
        "trajectories": 2, "flat": 13, "unique": 8, "trained_flat": 5
    }  # fmt: skip
    train = ["train", path, "--model", "tiny", "--count", "once", "--loss", "reinforce", "--max_steps", "1"]
    assert main([*train, "--output_dir", str(tmp_path / "run")]) == 0
