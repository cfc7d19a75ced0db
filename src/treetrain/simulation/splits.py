"""The ways to use N ranks together: how many divide the weights, the tokens, the rows and the experts."""

from typing import NamedTuple

from treetrain.core.planning.cost import ModelCounts
from treetrain.core.planning.devices import Device


class Split(NamedTuple):
    """One way to use N ranks. Ranks of one tensor group are neighbours; then come context, shards and copies."""

    ranks: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    shards: int = 1
    """Ranks that together hold one copy of the weights (or of a tensor rank's share); 1: every rank holds one."""

    @property
    def data(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.ranks // (self.tensor * self.context)

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.ranks // (self.tensor * self.shards)

    @property
    def expert_division(self) -> int:
        """Number of neighbouring ranks that divide the experts: `expert`, or `tensor` if that is 1."""
        return self.expert if self.expert > 1 else self.tensor

    @property
    def expert_shards(self) -> int:
        """Ranks that together hold one copy of an expert rank's experts."""
        return max(1, self.shards * self.tensor // self.expert_division)

    @property
    def in_engine(self) -> bool:
        """Whether `TreeEngine` supports it.

        The engine supports data and context parallel, with whole weights or with FSDP2 over all ranks or over a context
        group; and tensor parallel alone, with experts over the same ranks.
        """
        if self.tensor == self.expert == 1:
            return self.context == 1 or self.shards in (1, self.context, self.ranks)
        return self.data == self.context == self.shards == 1 and self.expert in (1, self.tensor)

    def __str__(self) -> str:
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor, "expert": self.expert}
        said = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        copies = f" in each of {self.copies} copies" if self.copies > 1 else ""
        return said + (f", weights sharded over {self.shards}{copies}" if self.shards > 1 else "")


def splits_of(
    counts: ModelCounts,
    ranks: int,
    device: Device,
    *,
    context: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
) -> list[Split]:
    """List the splits of `ranks` ranks that fit the model; where a size is None, several are listed.

    Raises:
        ValueError: sizes that do not divide the ranks, heads, vocabulary or experts; the message names sizes that do.
    """
    node = int(device.node_ranks)
    if ranks > node and ranks % node:
        low = ranks // node * node
        raise ValueError(f"{ranks} ranks do not fill nodes of {node}; give {low} or {low + node} ranks")
    shared = f"{counts.heads} heads, {counts.kv_heads} key/value heads"
    fits = [n for n in _divisors(ranks) if counts.heads % n == counts.kv_heads % n == 0]
    tensors = [n for n in fits if -(-counts.vocab // n) * (n - 1) < counts.vocab]  # no rank without vocabulary
    experts = [n for n in _divisors(ranks) if n == 1 or (counts.experts and counts.experts % n == 0)]
    held = f"{counts.experts} experts" if counts.experts else "no experts"
    for name, given, fitting, what in (
        ("context", context, fits, shared),
        ("tensor", tensor, tensors, f"{shared} and a vocabulary of {counts.vocab}"),
        ("expert", expert, experts, held),
    ):
        if given is not None and given not in fitting:
            sizes = ", ".join(map(str, fitting))
            raise ValueError(f"{name} {given}: a model with {what} cannot be divided so on {ranks} ranks; {sizes} can")
    found = []
    for t in tensors if tensor is None else [tensor]:
        for c in fits if context is None else [context]:
            if c * t not in fits:
                continue
            over = {ranks // t, 1} | ({node // t} if ranks > node and node % t == 0 else set())
            for shards in sorted(over, reverse=True):
                within = [n for n in experts if shards * t % n == 0]
                # Without a given size: no division, the largest within a node, and the largest of all.
                tried = {1, max(n for n in within if n <= node), max(within)}
                tried = tried if expert is None else {expert} & {*within}
                found += [Split(ranks, t, c, e, shards) for e in sorted(tried)]
    if not found:
        sizes = ", ".join(f"{a} x {b}" for a in fits for b in tensors if a * b in fits)
        raise ValueError(
            f"context {context}, tensor {tensor}, expert {expert} do not go together on {ranks} ranks and {shared}; "
            f"expert must divide the ranks that share the weights, and context x tensor may be {sizes}"
        )
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
