"""A tree read from a file of nodes is the tree of the file's rows."""

import json
from pathlib import Path

import numpy as np
import pytest

import treetrain as tt
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
            "form a cycle|no path",
        ),
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
        tt.load_tree(path)
        tt.load(path, format="nodes")
