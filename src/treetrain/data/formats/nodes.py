"""Trees given as trees: our own `nodes`, and the message graphs of verifiers, which prime-rl writes.

Every trajectory becomes a row: the tokens, or the messages, of the nodes from the root to its last one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from treetrain.data.formats.tokens import PER_TOKEN_KEYS
from treetrain.data.records import FACT_KEYS, Format, Notes, Record, facts, field, look_up, objects
from treetrain.errors import DataError, quoted

NODE_FACTS = ("loss_weights", *PER_TOKEN_KEYS)
ID_KEYS = ("tokens", "input_ids", "token_ids")
NODE_KEYS = frozenset(("parent", "loss_mask", "messages", "message", *ID_KEYS, *NODE_FACTS, *FACT_KEYS)).union(
    *PER_TOKEN_KEYS.values()
)
RECORD_KEYS = frozenset(("nodes", "trajectories", "system", "tools", *FACT_KEYS))


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """Nodes and the trajectories that end in them."""

    nodes: list[dict[str, Any]]
    """Each with `parent` (an index or None), `ids` or `messages`, per-token facts (lists or one number), and `key`."""
    ends: list[dict[str, Any]]
    """Each with `node`, the index of its last node, and the facts of the row."""
    shared: dict[str, Any]
    """`system` and `tools`."""

    def path(self, end: int) -> list[int]:
        """The nodes from the root to `end`."""
        path, node = [], end
        while node is not None:
            path.append(node)
            node = self.nodes[node]["parent"]
        return path[::-1]


def _forests_of(record: Record, notes: Notes) -> list[Forest]:
    """The forest of a record; of a recorded episode, one for each of its traces. `notes` receives what is not used."""
    if "traces" in record:
        forests = [_trace(trace, facts(record)) for trace in objects(record, "traces")]
    else:
        forests = [_trace(record, {}) if look_up(record, "nodes.0.sampled") is not None else _own(record, notes)]
    for forest in forests:
        reached: dict[int, int] = {}  # node -> the node that the walk up through it started at
        for first in range(len(forest.nodes)):
            node = first
            while node is not None and node not in reached:
                reached[node] = first
                node = forest.nodes[node]["parent"]
            if node is not None and reached[node] == first:
                raise DataError(f"node {node}: its parents form a cycle; set one parent to null")
    return forests


def _nodes(record: Record) -> list[dict[str, Any]]:
    if not (given := objects(record, "nodes")):
        raise DataError("`nodes` is missing or empty, expected a list of nodes")
    return given


def _own(record: Record, notes: Notes) -> Forest:
    notes.unused_keys(record, RECORD_KEYS)
    given = _nodes(record)
    index: dict[Any, int] = {}
    for number, node in enumerate(given):
        name = node.get("id", number)
        if isinstance(name, dict | list) or index.setdefault(name, number) != number:
            raise DataError(f"`nodes.{number}.id` is {quoted(name)}, expected a name that no other node has")

    def find(name: Any, where: str) -> int:
        if isinstance(name, dict | list) or name not in index:
            raise DataError(f"`{where}` is {quoted(name)}, which is the id of no node")
        return index[name]

    nodes: list[dict[str, Any]] = []
    for number, node in enumerate(given):
        notes.unused_keys(node, NODE_KEYS, "keys of nodes")
        parent = node.get("parent")
        made: dict[str, Any] = {"parent": None if parent in (None, -1) else find(parent, f"nodes.{number}.parent")}
        made |= {
            fact: node[name] for fact, names in PER_TOKEN_KEYS.items() for name in names if node.get(name) is not None
        }
        made |= {name: node[name] for name in ("loss_weights", "key") if node.get(name) is not None}
        if node.get("loss_mask") is not None:
            made["loss_weights"] = node["loss_mask"]
        if "messages" in node or "message" in node:
            made["messages"] = [node["message"]] if "message" in node else field(node, "messages", list)
        else:
            ids = next((name for name in ID_KEYS if name in node), "tokens")
            made["ids"] = field(node, ids, list)
        nodes.append(made)
    ends: list[dict[str, Any]] = []
    shared = facts(record)
    if record.get("trajectories") is not None:
        for number, one in enumerate(field(record, "trajectories", list)):
            name = one.get("node") if isinstance(one, Mapping) else one
            own = facts(one) if isinstance(one, Mapping) else {}
            ends.append(shared | own | {"node": find(name, f"trajectories.{number}.node")})
    else:
        inner = {node["parent"] for node in nodes}
        ends = [shared | facts(node) | {"node": at} for at, node in enumerate(given) if at not in inner]
        for end in ends:
            end.pop("key", None)  # a node's own
    used = set() if record.get("trajectories") is not None else {end["node"] for end in ends}
    for number, node in enumerate(given):
        for name in () if number in used else facts(node).keys() - {"id", "key"}:
            notes.add(
                f"`{name}` of a node is used only at leaves, and if `trajectories` are not listed", f"node {number}"
            )
    return Forest(nodes, ends, {name: record[name] for name in ("system", "tools") if record.get(name)})


def _trace(trace: Record, known: dict[str, Any]) -> Forest:
    """A trace of verifiers: a node holds one message, its tokens, and log-probabilities of the sampled ones alone."""
    nodes: list[dict[str, Any]] = []
    given = _nodes(trace)
    for number, node in enumerate(given):
        parent = node.get("parent")
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < len(given)):
            raise DataError(f"`nodes.{number}.parent` is {quoted(parent)}, which is no node of {len(given)}")
        made: dict[str, Any] = {"parent": parent}
        if ids := look_up(node, "token_ids"):
            mask = field(node, "mask", list)
            trained = [one == 1 for one in mask]
            made |= {"ids": field({"token_ids": ids}, "token_ids", list), "loss_weights": mask}
            for name, ours in (
                ("logprobs", "rollout_logprobs"),
                ("advantages", "advantages"),
                ("reference_logprobs", "ref_logprobs"),
            ):
                if node.get(name):
                    values = field(node, name, list)
                    if len(values) != sum(trained):
                        raise DataError(
                            f"`nodes.{number}.{name}` has {len(values)} entries, `mask` trains {sum(trained)}"
                        )
                    rest = iter(values)
                    made[ours] = [next(rest) if one else 0.0 for one in trained]
        else:
            made["messages"] = [field(node, "message", dict) | ({} if node.get("sampled") else {"weight": 0})]
        nodes.append(made)
    rewards = [reward for reward in field({"rewards": trace.get("rewards") or {}}, "rewards", dict).values() if reward]
    known = known | {
        "id": trace.get("id"),
        "group": look_up(trace, "task.key") or look_up(trace, "task.hash"),
        "episode": trace.get("id"),
    }
    if rewards:
        scores = [(look_up(reward, "score"), (look_up(reward, "weight"))) for reward in rewards]
        if not all(isinstance(one, int | float) for pair in scores for one in pair):
            raise DataError(f"`rewards` is {quoted(trace['rewards'])}, expected a `score` and a `weight` for each")
        known["reward"] = sum(score * weight for score, weight in scores)
    inner = {node["parent"] for node in nodes}
    ends = [known | {"node": number} for number in range(len(nodes)) if number not in inner]
    return Forest(nodes, ends, {"tools": trace["tools"]} if trace.get("tools") else {})


def read_nodes(record: Record, notes: Notes) -> list[Record]:
    """Every trajectory as a row of its own: the tokens or messages from the root to its last node."""
    rows = []
    for forest in _forests_of(record, notes):
        for number, end in enumerate(forest.ends):
            path = [forest.nodes[node] for node in forest.path(end["node"])]
            row = {name: value for name, value in end.items() if name in FACT_KEYS and value is not None}
            row.setdefault("id", f"{notes.place}/{number}")
            row["id"] = f"{row['id']}/{number}" if len(forest.ends) > 1 and "id" in end else row["id"]
            row |= next(({"key": node["key"]} for node in path[::-1] if "key" in node), {})
            if any("messages" in node for node in path):
                if not all("messages" in node for node in path):
                    raise DataError(
                        f"the path to node {end['node']} mixes nodes of tokens and of messages; give one of them"
                    )
                rows.append(
                    row | forest.shared | {"messages": [one for node in path for one in _weighted_messages(node)]}
                )
                continue
            row["input_ids"] = [token for node in path for token in node["ids"]]
            for name in NODE_FACTS:
                if any(name in node for node in path):
                    default = 1 if name == "loss_weights" else None
                    row[name] = [one for node in path for one in _per_token(node, name, default)]
            rows.append(row)
    return rows


def _weighted_messages(node: Record) -> list[Any]:
    """The node's messages with the node's weight."""
    weight = node.get("loss_weights")
    return [
        one if weight is None or not isinstance(one, dict) else one | {"weight": weight} for one in node["messages"]
    ]


def _per_token(node: Record, name: str, default: Any) -> list[Any]:
    value = node.get(name, default)
    if isinstance(value, list) and len(value) != len(node["ids"]):
        raise DataError(
            f"a node has {len(value)} {name} for {len(node['ids'])} tokens; give one for each, or one number"
        )
    return value if isinstance(value, list) else [value] * len(node["ids"])


OURS = ("tokens", "input_ids", "token_ids", "messages", "message", "parent")
KEYS = " | ".join(f"{place}.0.{name}" for place in ("nodes", "traces.0.nodes") for name in OURS)
NODES = Format("nodes", KEYS, read_nodes)
