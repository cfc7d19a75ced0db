"""A tree read from a file of nodes is the tree of the file's rows."""

import json
from pathlib import Path

import numpy as np
import pytest

import treetrain as tt
from treetrain.data import Notes
from treetrain.errors import DataError

SAMPLES = Path(__file__).parents[1] / "data" / "samples"


@pytest.mark.parametrize("name", ["nodes.jsonl", "nodes-verifiers.jsonl", "nodes-messages.jsonl"])
def test_a_tree_read_unflattened_is_the_tree_of_its_rows(name):
    tokenizer = tt.load_tokenizer("tiny") if "messages" in name else None
    options = {"tokenizer": tokenizer, "chat_template": None if tokenizer is None else "chatml"}
    tree = tt.load_tree(SAMPLES / name, **options)
    rows = tt.load(SAMPLES / name, **options).trajectories
    expected = tt.build_tree(rows)
    for field in ("tokens", "parent", "end", "trajectory_last"):
        np.testing.assert_array_equal(getattr(tree, field), getattr(expected, field))
    for one, other in zip(tree.trajectories, rows):
        np.testing.assert_array_equal(one.weights, other.weights)
        assert (one.reward, one.group) == (other.reward, other.group)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"nodes": [{"id": 0, "parent": 1, "tokens": [1]}, {"id": 1, "parent": 0, "tokens": [2]}]},
            "node 0: its parents form a cycle",
        ),
        (
            {"nodes": [{"parent": 1, "tokens": [1]}, {"parent": 2, "tokens": [2]}, {"parent": 1, "tokens": [3]}]},
            "its parents form a cycle",
        ),
        ({"nodes": [{"tokens": [1], "logprobs": [-1, -2]}]}, r"2 old_logprobs for 1 tokens"),
        ({"nodes": [{"tokens": [1]}, {"parent": 0, "tokens": [1], "logprobs": [None]}]}, "is null but the token is"),
        (
            {"nodes": [{"tokens": [1]}, {"parent": 0, "messages": [{"role": "user", "content": "a"}]}]},
            "some nodes have tokens and some messages|mixes nodes of tokens and of messages",
        ),
        ({"nodes": [{"tokens": [1, -2]}]}, r"ids\[1\] = -2 is negative"),
        (
            {"nodes": [{"id": 0, "parent": 7, "tokens": [1]}]},
            r"line 1: `nodes.0.parent` is 7, which is the id of no node",
        ),
        ({"nodes": [{"id": 0, "tokens": [1]}, {"id": 0, "tokens": [1]}]}, r"`nodes.1.id` is 0, expected a name"),
        ({"nodes": [{"id": 0, "tokens": 3}]}, r"`tokens` is 3, expected a list"),
    ],
)
def test_bad_trees_are_refused_with_the_field(tmp_path, record, message):
    path = tmp_path / "trees.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        tt.load_tree(path, tokenizer=tt.load_tokenizer("tiny"))
        tt.load(path, format="nodes")


def test_a_tree_that_does_not_fit_the_model_is_refused_with_its_place(tmp_path):
    path = tmp_path / "trees.jsonl"
    path.write_text('{"nodes": [{"id": "a", "tokens": [1, 2]}, {"id": "b", "parent": "a", "tokens": [9]}]}')
    assert tt.load_tree(path, vocab_size=10, max_positions=3).num_tokens == 3
    with pytest.raises(DataError, match=r"line 1: node 1: ids\[0\] = 9 is outside the model's vocabulary of 9"):
        tt.load_tree(path, vocab_size=9)
    with pytest.raises(DataError, match="has 3 tokens, the model has 2 positions"):
        tt.load_tree(path, max_positions=2)


def test_keys_of_nodes_that_are_not_used_are_noted(tmp_path):
    path, notes = tmp_path / "trees.jsonl", Notes()
    nodes = [{"id": "a", "tokens": [1, 2], "reward": 1, "colour": 3}, {"id": "b", "parent": "a", "tokens": [9]}]
    path.write_text(json.dumps({"nodes": nodes, "name": "x"}))
    tt.load_tree(path, notes=notes)
    said = " ".join(notes.lines())
    assert (
        "keys that are not used: 'name' (1)" in said
        and "keys of nodes that are not used: 'colour' (1)" in said
        and "`reward` of a node is used only at leaves" in said
    )
    assert set(notes.lines()) <= set(tt.load(path).notes)
