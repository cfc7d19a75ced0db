"""Trees given as trees: our own `nodes`, and the message graphs of verifiers, which prime-rl writes.

Every trajectory becomes a row: the tokens, or the messages, of the nodes from the root to its last one.
"""

from collections.abc import Mapping

from treetrain.core.errors import DataError, quoted
from treetrain.logs.formats.tokens import PER_TOKEN_KEYS, SET_KEYS
from treetrain.logs.records import Json, Notes, Record, facts, field, first_of, look_up, objects

NODE_FACTS = {"loss_weights": ("loss_mask", "loss_weights"), **PER_TOKEN_KEYS, **{name: (name,) for name in SET_KEYS}}
ID_KEYS = ("tokens", "input_ids", "token_ids")
# verifiers' names of lists with one entry for each sampled token, and ours
SAMPLED = {"logprobs": "rollout_logprobs", "advantages": "advantages", "reference_logprobs": "ref_logprobs"}
SAMPLED |= {name: name for name in SET_KEYS}

Node = dict[str, Json]
"""`parent` (an index or None), `ids` or `messages`, per-token facts (lists or one number), and `key`."""


def read_nodes(record: Record, notes: Notes) -> list[Record]:
    """Every trajectory as a row of its own; a recorded episode has several traces."""
    if "traces" in record:
        return [row for trace in objects(record, "traces") for row in _trace(trace, facts(record), notes)]
    return _tree(record, notes) if look_up(record, "nodes.0.sampled") is None else _trace(record, {}, notes)


def _nodes(record: Record) -> list[Node]:
    if not (given := objects(record, "nodes")):
        raise DataError("`nodes` is missing or empty, expected a list of nodes")
    return given


def _tree(record: Record, notes: Notes) -> list[Record]:
    """The rows of a record in treetrain's form: those of `trajectories`, or one for every leaf."""
    listed = _nodes(record)
    number_of: dict[Json, int] = {}
    for number, node in enumerate(listed):
        name = node.get("id", number)  # nodes without ids are referred to by their positions
        if isinstance(name, dict | list) or number_of.setdefault(name, number) != number:
            raise DataError(f"`nodes.{number}.id` is {quoted(name)}, expected a name that no other node has")

    def find(name: Json, where: str) -> int:
        if isinstance(name, dict | list) or name not in number_of:  # a list cannot be looked up
            raise DataError(f"`{where}` is {quoted(name)}, which is the id of no node")
        return number_of[name]

    nodes: list[Node] = []
    for number, node in enumerate(listed):
        made = {fact: value for fact, names in NODE_FACTS.items() if (value := first_of(node, *names)) is not None}
        parent = node.get("parent")
        made["parent"] = None if parent in (None, -1) else find(parent, f"nodes.{number}.parent")
        made |= {} if node.get("key") is None else {"key": node["key"]}
        if "messages" in node or "message" in node:
            made["messages"] = [node["message"]] if "message" in node else field(node, "messages", list)
        else:
            made["ids"] = field(node, next((name for name in ID_KEYS if name in node), "tokens"), list)
        nodes.append(made)
    known = facts(record) | {name: record[name] for name in ("system", "tools") if record.get(name)}
    leaves = _leaves(nodes)
    if record.get("trajectories") is None:
        # A node's key holds for all nodes below it, so `_rows` takes it from the path.
        ends = [known | facts(listed[leaf]) | {"key": None, "node": leaf} for leaf in leaves]
    else:
        leaves, ends = [], []
        for number, trajectory in enumerate(field(record, "trajectories", list)):
            entry = trajectory if isinstance(trajectory, Mapping) else {"node": trajectory}
            last = find(entry.get("node"), f"trajectories.{number}.node")
            ends.append(known | facts(entry) | {"node": last})
    for number, node in enumerate(listed):
        for name in () if number in leaves else facts(node).keys() - {"id", "key"}:
            notes.add(
                f"`{name}` of a node is used only at leaves, and if `trajectories` are not listed", f"node {number}"
            )
    return _rows(nodes, ends, notes)


def _trace(trace: Record, known: dict[str, Json], notes: Notes) -> list[Record]:
    """A trace of verifiers: a node holds one message, its tokens, and log-probabilities of the sampled ones alone."""
    nodes: list[Node] = []
    given = _nodes(trace)
    for number, node in enumerate(given):
        parent = node.get("parent")
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < len(given)):
            raise DataError(f"`nodes.{number}.parent` is {quoted(parent)}, which is no node of {len(given)}")
        made: Node = {"parent": parent}
        if look_up(node, "token_ids"):
            mask = field(node, "mask", list)
            made |= {"ids": field(node, "token_ids", list), "loss_weights": mask}
            for name, ours in SAMPLED.items():
                if node.get(name):
                    values = field(node, name, list)
                    if len(values) != mask.count(1):
                        raise DataError(
                            f"`nodes.{number}.{name}` has {len(values)} entries, `mask` trains {mask.count(1)}"
                        )
                    rest = iter(values)
                    made[ours] = [next(rest) if one == 1 else None if name in SET_KEYS else 0.0 for one in mask]
        else:
            made["messages"] = [field(node, "message", dict) | ({} if node.get("sampled") else {"weight": 0})]
        nodes.append(made)
    known |= {"id": trace.get("id"), "episode": trace.get("id"), "tools": trace.get("tools")}
    known["group"] = look_up(trace, "task.key") or look_up(trace, "task.hash")
    rewards = [reward for reward in field({"rewards": trace.get("rewards") or {}}, "rewards", dict).values() if reward]
    if rewards:
        scores = [(look_up(reward, "score"), look_up(reward, "weight")) for reward in rewards]
        if not all(isinstance(one, int | float) for pair in scores for one in pair):
            raise DataError(f"`rewards` is {quoted(trace['rewards'])}, expected a `score` and a `weight` for each")
        known["reward"] = sum(score * weight for score, weight in scores)
    return _rows(nodes, [known | {"node": leaf} for leaf in _leaves(nodes)], notes)


def _leaves(nodes: list[Node]) -> list[int]:
    """The nodes that are no parent. Raises DataError if some node is above none of them, since parents form a cycle."""
    inner = {node["parent"] for node in nodes}
    leaves = [number for number in range(len(nodes)) if number not in inner]
    above = {node for leaf in leaves for node in _path(nodes, leaf)}
    if len(above) < len(nodes):
        raise _cycle(min(set(range(len(nodes))) - above))
    return leaves


def _path(nodes: list[Node], last: int) -> list[int]:
    path = [last]
    while (parent := nodes[path[-1]]["parent"]) is not None:
        if len(path) == len(nodes):
            raise _cycle(last)
        path.append(parent)
    return path[::-1]


def _cycle(node: int) -> DataError:
    return DataError(f"node {node}: its parents form a cycle; set one parent to null")


def _rows(nodes: list[Node], ends: list[dict[str, Json]], notes: Notes) -> list[Record]:
    """A row for each end, which has the index of its last `node` and the facts of the row."""
    rows = []
    for number, end in enumerate(ends):
        path = [nodes[node] for node in _path(nodes, end["node"])]
        row = {name: value for name, value in end.items() if name != "node" and value is not None}
        row["id"] = f"{row.get('id', notes.place)}/{number}" if len(ends) > 1 or "id" not in row else row["id"]
        row |= next(({"key": node["key"]} for node in path[::-1] if "key" in node), {})
        if any("messages" in node for node in path):
            if not all("messages" in node for node in path):
                raise DataError(
                    f"the path to node {end['node']} mixes nodes of tokens and of messages; give one of them"
                )
            row["messages"] = [one for node in path for one in _weighted_messages(node)]
        else:
            row["input_ids"] = [token for node in path for token in node["ids"]]
            for name in NODE_FACTS:
                if any(name in node for node in path):
                    row[name] = [one for node in path for one in _per_token(node, name)]
        rows.append(row)
    return rows


def _weighted_messages(node: Node) -> list[Json]:
    weight = node.get("loss_weights")
    return [
        one if weight is None or not isinstance(one, dict) else one | {"weight": weight} for one in node["messages"]
    ]


def _per_token(node: Node, name: str) -> list[Json]:
    value = node.get(name, 1 if name == "loss_weights" else None)
    if isinstance(value, list) and len(value) != len(node["ids"]):
        raise DataError(
            f"a node has {len(value)} {name} for {len(node['ids'])} tokens; give one for each, or one number"
        )
    return value if isinstance(value, list) else [value] * len(node["ids"])
