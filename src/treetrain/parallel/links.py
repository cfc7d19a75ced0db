"""The links by which FSDP2 gathers weights and reduces gradients, in seconds.

A collective takes a fixed time and a time per byte. Both depend on how many of its ranks share a node. Ranks of a node
use its links with one another, and all their network connections together with other nodes. The slower of the two
counts. The ranks are assumed to form a ring, as in NCCL's own model (``src/graph/tuning.cc`` of NVIDIA/nccl).

Under FSDP every pass gathers the weights, and a backward also reduces their gradients. A GPU does both beside the
arithmetic, except for the first layer's share. So a pass takes the longer of the two, plus that share, and parts are
made large enough to hide the links. On a CPU the same cores send and compute, so the times add up.
"""

from typing import Literal, NamedTuple, Self

import numpy as np

from treetrain.core.planning.cost import Floats, ModelCounts
from treetrain.core.planning.devices import Device, Group


class Collective(NamedTuple):
    """Calls of one collective operation."""

    operation: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    group: Group
    whole_bytes: float
    """Bytes of the result of an all-gather, or of one rank's input to any other operation."""
    calls: int = 1
    """Number of calls that share these bytes."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that every rank sends."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.whole_bytes * (self.group.size - 1) / self.group.size

    def seconds(self, device: Device) -> float:
        """Seconds of all calls."""
        size, in_node = self.group
        if size == 1:
            return 0.0
        nodes = -(-size // in_node)
        link = device.link_bandwidth * device.link_efficiency
        network = (device.network_bandwidth or device.link_bandwidth) * device.link_efficiency
        fixed = device.collective_seconds + (size - nodes) * device.link_seconds + (nodes - 1) * device.network_seconds
        # Seconds per byte. A rank keeps 1 / size of the bytes and sends the rest.
        if self.operation == "all-to-all":  # each rank sends its own share to every other rank
            inside, between = (in_node - 1) / size / link, (size - in_node) / size / network
        else:  # other nodes' shards come over the connections of all ranks of a node
            inside = (size - 1) / size / link if in_node > 1 else 0.0
            between = (nodes - 1) / nodes / (network * in_node)
        factor = {"reduce-scatter": device.reduce_scatter, "all-reduce": 2.0}.get(self.operation, 1.0)
        return self.calls * fixed + factor * self.whole_bytes * max(inside, between)


class Sharding(NamedTuple):
    """How ranks hold weights: in shards, of which there may be several copies."""

    shards: Group
    """The ranks that together hold one copy."""
    copies: Group
    """The ranks that hold the same shard of different copies."""


class WeightCollectives(NamedTuple):
    """The collectives by which ranks gather sharded weights and reduce their gradients."""

    gather_layers: list[Collective]
    """The weights of the layers: in every pass."""
    gather_ends: list[Collective]
    """Embedding, head and last norm, which stay gathered from the first forward to the next backward."""
    reduce: list[Collective]
    """All gradients: in a backward."""

    @classmethod
    def of(cls, counts: ModelCounts, sharding: Sharding, experts: Sharding) -> Self:
        """The collectives of a rank with these counts.

        FSDP2 calls one collective for each layer, and one for embedding, head and last norm. It gathers weights in the
        compute dtype and reduces gradients in float32 or wider. Copies then add up their shards of the gradients.
        Experts may be divided over some of the ranks first, so they have groups of their own.
        """
        b = counts.dtype_bytes
        wide = counts.wide_bytes
        layers = counts.layers
        in_experts, ends = counts.expert_parameters, counts.parameters - counts.parameters_in_layers
        rest, expert_calls = counts.parameters_in_layers - in_experts, layers if in_experts else 0
        shards, expert_shards = sharding.shards.size, experts.shards.size
        # Whole weights (DDP) are reduced in one call.
        copy_calls = layers + 1 if shards > 1 else 1
        return cls(
            gather_layers=[
                Collective("all-gather", sharding.shards, b * rest, layers),
                Collective("all-gather", experts.shards, b * in_experts, expert_calls),
            ],
            gather_ends=[Collective("all-gather", sharding.shards, b * ends)],
            reduce=[
                Collective("reduce-scatter", sharding.shards, wide * (rest + ends), layers + 1),
                Collective("reduce-scatter", experts.shards, wide * in_experts, expert_calls),
                Collective("all-reduce", sharding.copies, wide * (rest + ends) / shards, copy_calls),
                Collective("all-reduce", experts.copies, wide * in_experts / expert_shards, expert_calls),
            ],
        )

    def links(self, device: Device, layers: int) -> "WeightLinks | None":
        """The seconds of these collectives; None if every rank holds the weights whole."""
        if self.gather_ends[0].group.size == 1:
            return None
        gather = sum(each.seconds(device) for each in self.gather_layers)
        return WeightLinks(
            forward=gather + sum(each.seconds(device) for each in self.gather_ends),
            backward=gather,
            reduce=sum(each.seconds(device) for each in self.reduce),
            not_hidden=1.0 if device.kind == "cpu" else 1 / layers,
        )


class WeightLinks(NamedTuple):
    """Seconds that FSDP's collectives take in each pass."""

    forward: float
    """Seconds of gathering all weights."""
    backward: float
    """Seconds of gathering the layers' weights again."""
    reduce: float
    """Seconds of reducing all gradients, in a backward."""
    not_hidden: float
    """The share of these seconds that cannot run beside arithmetic: the first layer's, 1 / layers; 1 on a CPU."""

    def hidden_beside(self, backward_ratio: float) -> float:
        """See `core.planning.cost.Links`; `backward_ratio` is the time of a backward over that of a forward."""
        if self.not_hidden == 1:
            return 0.0
        return max(self.forward, (self.backward + self.reduce) / backward_ratio)

    def added_seconds(self, kind: str, seconds: Floats, *, reduces: bool = True) -> Floats:
        """Seconds that the links add to passes of a kind that take `seconds` by themselves."""
        sent = self.backward + self.reduce * reduces if kind == "backward" else self.forward
        return sent - (1 - self.not_hidden) * np.minimum(seconds, sent)


def sharded_links(device: Device, counts: ModelCounts, *, shards: int, copies: int = 1) -> WeightLinks | None:
    """The links of ranks that each hold a shard of the weights; None if every rank holds them whole.

    Args:
        shards: ranks that together hold one copy of the weights (FSDP2).
        copies: copies of the sharded weights (hybrid sharding).
    """
    sharding = Sharding(device.group(shards), device.group(copies, shards))
    return WeightCollectives.of(counts, sharding, sharding).links(device, counts.layers)
