"""Random trees of nodes: shuffled numbers, empty nodes, equal siblings, repeated rows, rows that are prefixes."""

from typing import Literal

import numpy as np

from treetrain.tree import Node, NodeTrajectory

Advantages = Literal["of nodes", "of rows", "of some rows", "none"]
ADVANTAGES: tuple[Advantages, ...] = ("of nodes", "of rows", "of some rows", "none")
OTHER_FACTS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "values", "returns")


def random_nodes(seed: int, advantages: Advantages) -> tuple[list[Node], list[NodeTrajectory]]:
    """Nodes with all facts wherever they are trained, and rows on every leaf and on some inner nodes.

    Two token ids make siblings that begin alike frequent; a third of the weights are 0.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 16))
    number = rng.permutation(count)
    nodes: list[Node] = [Node(None, [])] * count
    inner = set()
    for i in range(count):
        above = int(rng.integers(-1, i)) if i else -1
        inner.add(int(number[above]) if above >= 0 else -1)
        nodes[number[i]] = _node(rng, int(number[above]) if above >= 0 else None, advantages)
    ends = [i for i in range(count) if i not in inner]
    ends += rng.integers(0, count, size=int(rng.integers(0, 5))).tolist()
    return nodes, [NodeTrajectory(node=int(end), advantages=_own(rng, advantages)) for end in rng.permutation(ends)]


def _node(rng: np.random.Generator, parent: int | None, advantages: Advantages) -> Node:
    length = int(rng.integers(0, 5))
    ids = rng.integers(0, 2, length)
    kind = rng.choice(["none", "mixed", "context"], p=[0.2, 0.6, 0.2])
    weights = {"none": None, "mixed": rng.uniform(0.2, 2, length) * (rng.random(length) > 0.3), "context": 0.0}[kind]
    facts = {name: rng.normal(size=length) for name in OTHER_FACTS}
    if advantages in ("of nodes", "of some rows"):
        facts["advantages"] = rng.normal(size=length)
    if kind == "context" and rng.random() < 0.5:
        facts = {}
    return Node(parent, ids, loss_weights=weights, **facts)


def _own(rng: np.random.Generator, advantages: Advantages) -> float | None:
    if advantages == "of rows" or (advantages == "of some rows" and rng.random() < 0.5):
        return float(rng.choice([-1.5, -0.2, 0.0, 0.7, 2.0]))
    return None
