"""Search trees and trees of messages in which a node holds its children: OASST, LATS, Monte Carlo tree searches.

Every leaf becomes a row, the messages or the text from the root to it. Its reward is the leaf's `reward`, or else its
`value`.
"""

from collections.abc import Iterator

from treetrain.core.errors import DataError, quoted
from treetrain.logs.records import Json, Notes, Record, facts, field, first_of, look_up, objects

CHILDREN = ("children", "replies")
ROOTS = ("tree", "root", "prompt")
"""Keys under which a record may hold the root; otherwise the record is the root."""
QUESTIONS = ("question", "query", "problem", "task", "instruction", "prompt")
TEXTS = ("text", "content", "message", "step", "thought", "response", "answer", "action", "state")
ROLES = {"prompter": "user"}
"""OASST's name of a role and ours."""


def is_search_tree(record: Record) -> bool:
    """Whether a record, or its root, holds a list of children."""
    return any(isinstance(_root(record).get(name), list) for name in CHILDREN)


def read_search_tree(record: Record, notes: Notes) -> list[Record]:
    """A row for every leaf of a tree."""
    root = _root(record)
    asked = (first_of(record, name) or root.get(name) for name in QUESTIONS)
    question = next((one for one in asked if isinstance(one, str)), None)
    system = record.get("system")
    known = {"group": notes.place} | facts(record) | ({} if system is None else {"system": system})
    rows: list[Record] = []
    for number, path in enumerate(_paths(root)):
        row = known | {"id": f"{notes.place}/{number}"}
        reward = first_of(path[-1], "reward", "value")
        if reward is not None:
            notes.add("a row's reward is the `reward` or the `value` of its leaf")
            row["reward"] = reward
        rows.append(row | {"messages": _messages(path, question, notes)})
    return rows


def read_message_tree(record: Record, notes: Notes) -> list[Record]:
    """OASST's messages, each a record with the id of its parent; the records of one tree."""
    messages = objects(record, "records")
    below: dict[Json, list[Record]] = {}
    for one in messages:
        below.setdefault(one.get("parent_id"), []).append(one)
    for one in messages:
        one["replies"] = below.get(one.get("message_id"), [])
    names = {one.get("message_id") for one in messages}
    if lost := [one for one in messages if one.get("parent_id") is not None and one["parent_id"] not in names]:
        raise DataError(f"`parent_id` is {quoted(lost[0]['parent_id'])}, which is the id of no message of its tree")
    roots = below.get(None, [])
    if not roots:
        raise DataError("no message of the tree is without `parent_id`, so its parents form a cycle")
    return [row for root in roots for row in read_search_tree(root, notes)]


def _root(record: Record) -> Record:
    found = next((root for name in ROOTS if isinstance(root := record.get(name), dict)), None)
    return record if found is None else found


def _paths(root: Record) -> Iterator[list[Record]]:
    """The nodes from the root to every leaf."""
    pending: list[list[Record]] = [[root]]
    while pending:
        path = pending.pop()
        children = next((objects(path[-1], name) for name in CHILDREN if path[-1].get(name)), [])
        if not children:
            yield path
        pending += [[*path, child] for child in reversed(children)]


def _messages(path: list[Record], question: str | None, notes: Notes) -> list[Json]:
    messages: list[Json] = [] if question is None else [{"role": "user", "content": question}]
    written = ""
    for node in path:
        if isinstance(node.get("state"), dict):
            messages += _react(field(node, "state", dict), notes)
            continue
        name = next((name for name in TEXTS if isinstance(node.get(name), str)), None)
        if name is None:
            if node is path[0]:
                continue
            raise DataError(f"a node has the keys {', '.join(map(quoted, list(node)[:20]))}; none of them is its text")
        text = field(node, name, str)
        if isinstance(node.get("role"), str):
            messages.append({"role": ROLES.get(node["role"], node["role"]), "content": text})
        elif not messages:
            messages.append({"role": "user", "content": text})
        elif not (node is path[0] and text in ("", question)):
            written = text if text.startswith(written) else f"{written}\n{text}"
            notes.add("the texts of a path are one answer, joined by line feeds unless each holds the one before it")
    return [*messages, {"role": "assistant", "content": written}] if written else messages


def _react(state: Record, notes: Notes) -> list[Json]:
    """The messages of a state of LATS: what the model thought and did, and what it observed."""
    parts = {name: field({name: state.get(name) or ""}, name, str) for name in ("thought", "action", "observation")}
    said = [f"{name.capitalize()}: {parts[name]}" for name in ("thought", "action") if parts[name]]
    seen = parts["observation"]
    if said:
        notes.add("LATS does not log its prompt; a state is written as `Thought: ...` and `Action: ...`")
    messages: list[Json] = [{"role": "assistant", "content": "\n".join(said)}] if said else []
    return [*messages, {"role": "user", "content": f"Observation: {seen}"}] if seen else messages


def in_tree(place: str, record: Record) -> tuple[str, Json]:
    """The tree of a message of OASST."""
    return "tree", look_up(record, "message_tree_id")
