"""Read a file of trees into a token tree; no trajectory is flattened."""

import os
from typing import Any

import numpy as np

from treetrain.data.chat import ChatReader
from treetrain.data.formats.nodes import Forest, forests_of
from treetrain.data.records import Notes, ReadSettings, read_records
from treetrain.data.trajectory import PER_TOKEN_FACTS
from treetrain.errors import DataError
from treetrain.tree.nodes import Count, Node, NodeTrajectory
from treetrain.tree.token_tree import TokenTree


def load_tree(
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    count: Count = "per trajectory",
) -> TokenTree:
    """Read a file of the format `nodes` into one tree; equal to `build_tree` of the rows that `tt.load` reads from it.

    Args:
        path: a file or folder whose records have `nodes`; see docs/data.md.
        tokenizer: a transformers tokenizer; needed for nodes of messages only.
        chat_template: replaces the tokenizer's own: "chatml" (built in), a file, or the template's text.
        count: as in `TokenTree.from_nodes`.

    Raises:
        DataError: a record that cannot be used; messages that the template writes differently once others follow.
    """
    nodes: list[Node] = []
    ends: list[NodeTrajectory] = []
    chat: ChatReader | None = None
    for place, record in read_records(path):
        try:
            if isinstance(record, DataError):
                raise record
            for forest in forests_of(record):
                for end in forest.ends:
                    forest.path(end["node"])  # refuses cycles
                if any("messages" in node for node in forest.nodes):
                    chat = chat or ChatReader(ReadSettings(tokenizer=tokenizer, chat_template=chat_template))
                    _tokenise(forest, chat, place)
                first = len(nodes)
                for node in forest.nodes:
                    facts = {name: node[name] for name in PER_TOKEN_FACTS if name in node}
                    parent = None if node["parent"] is None else node["parent"] + first
                    nodes.append(Node(parent, node["ids"], **facts, key=node.get("key")))
                for number, end in enumerate(forest.ends):
                    known = {name: end.get(name) for name in ("reward", "pair", "chosen", "episode")}
                    known["group"] = next((end[name] for name in ("group_id", "group", "task_id") if name in end), None)
                    known["id"] = f"{end.get('id', place)}/{number}"
                    ends.append(NodeTrajectory(node=end["node"] + first, **known))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
    try:
        return TokenTree.from_nodes(nodes, ends, unused="drop", count=count)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _tokenise(forest: Forest, chat: ChatReader, place: str) -> None:
    """Give nodes of messages their ids and weights: what the text up to a node has after the text up to its parent."""
    whole: dict[int, Any] = {}
    for number in range(len(forest.nodes)):
        for node in forest.path(number):
            if node in whole:
                continue
            messages = [one for above in forest.path(node) for one in forest.nodes[above]["messages"]]
            (row,) = chat({**forest.shared, "messages": messages}, Notes(place))
            parent = forest.nodes[node]["parent"]
            begin = 0 if parent is None else len(whole[parent])
            if parent is not None and not np.array_equal(row.ids[:begin], whole[parent].ids):
                raise DataError(
                    f"node {node}: the chat template writes the messages above it differently once its own follow; "
                    "pass another template, e.g. chatml, or read the file with tt.load"
                )
            whole[node] = row
            forest.nodes[node] |= {"ids": row.ids[begin:], "loss_weights": row.weights[begin:]}
