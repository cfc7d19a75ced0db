"""Read a file of trees into a token tree; no trajectory is flattened."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from treetrain.data.chat import ChatReader
from treetrain.data.formats.nodes import Forest, content_of, forests_of, weighted_messages
from treetrain.data.load import check_positions, check_vocabulary
from treetrain.data.records import Notes, ReadSettings, read_records
from treetrain.data.trajectory import PER_TOKEN_FACTS
from treetrain.errors import DataError
from treetrain.tree.nodes import Count, Node, NodeTrajectory
from treetrain.tree.token_tree import TokenTree


def holds_token_trees(path: str | os.PathLike[str]) -> bool:
    """Whether the first record of a file of the format `nodes` has tokens, not messages, which a template renders."""
    _, record = next(iter(read_records(path)))
    forests = [] if isinstance(record, DataError) else forests_of(record, Notes())
    return not any("messages" in node for forest in forests for node in forest.nodes)


def load_tree(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    count: Count = "per trajectory",
    vocab_size: int | None = None,
    max_positions: int | None = None,
    notes: Notes | None = None,
) -> TokenTree:
    """Read files of the format `nodes` into one tree; equal to `build_tree` of the rows that `tt.load` reads from them.

    Args:
        path: a file or folder whose records have `nodes`, or several; see docs/data.md.
        tokenizer: a transformers tokenizer; needed for nodes of messages only.
        chat_template: replaces the tokenizer's own: "chatml" (built in), a file, or the template's text.
        count: as in `TokenTree.from_nodes`.
        vocab_size: reject token ids at or above this.
        max_positions: reject trajectories with more tokens than this.
        notes: receives remarks on keys that are not used.

    Raises:
        DataError: a record that cannot be used; messages that the template writes differently once others follow.
    """
    nodes: list[Node] = []
    ends: list[NodeTrajectory] = []
    chat: ChatReader | None = None
    notes = notes or Notes()
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    for place, record in (found for one in paths for found in read_records(one)):
        notes.place = place
        try:
            if isinstance(record, DataError):
                raise record
            for forest in forests_of(record, notes):
                if any("messages" in node for node in forest.nodes):
                    chat = chat or ChatReader(ReadSettings(tokenizer=tokenizer, chat_template=chat_template))
                    _tokenise(forest, chat, notes)
                first = len(nodes)
                for number, node in enumerate(forest.nodes):
                    try:
                        content = content_of(node)
                        check_vocabulary(content.ids, vocab_size)
                    except DataError as error:
                        raise DataError(f"node {number}: {error}") from error
                    facts = {name: getattr(content, name) for name in PER_TOKEN_FACTS}
                    parent = None if node["parent"] is None else node["parent"] + first
                    nodes.append(Node(parent, content.ids, **facts, key=content.key))
                for number, end in enumerate(forest.ends):
                    known = {name: end.get(name) for name in ("reward", "pair", "chosen", "episode")}
                    known["group"] = next((end[name] for name in ("group_id", "group", "task_id") if name in end), None)
                    known["id"] = f"{end.get('id', place)}/{number}"
                    ends.append(NodeTrajectory(node=end["node"] + first, **known))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
    files = ", ".join(map(str, paths))
    try:
        tree = TokenTree.from_nodes(nodes, ends, unused="drop", count=count)
    except DataError as error:
        raise DataError(f"{files}: {error}") from error
    if ends:
        longest = int(tree.trajectory_length.argmax())
        try:
            check_positions(ends[longest].id, int(tree.trajectory_length[longest]), max_positions)
        except DataError as error:
            raise DataError(f"{files}: {error}") from error
    return tree


def _tokenise(forest: Forest, chat: ChatReader, notes: Notes) -> None:
    """Give nodes of messages their ids and weights: what the text up to a node has after the text up to its parent."""
    if not all("messages" in node for node in forest.nodes):
        raise DataError("some nodes have tokens and some messages; give one of them")
    said = [weighted_messages(node) for node in forest.nodes]
    whole: dict[int, Any] = {}
    for number in range(len(forest.nodes)):
        for node in forest.path(number):
            if node in whole:
                continue
            messages = [message for above in forest.path(node) for message in said[above]]
            (row,) = chat({**forest.shared, "messages": messages}, notes)
            parent = forest.nodes[node]["parent"]
            begin = 0 if parent is None else len(whole[parent])
            if parent is not None and not np.array_equal(row.ids[:begin], whole[parent].ids):
                raise DataError(
                    f"node {node}: the chat template writes the messages above it differently once its own follow; "
                    "pass another template, e.g. chatml, or read the file with tt.load"
                )
            whole[node] = row
            forest.nodes[node] |= {"ids": row.ids[begin:].tolist(), "loss_weights": row.weights[begin:].tolist()}
