"""Seconds of a token, of a head row and of a pass: the cost model taken apart, to price pieces of a batch."""

from typing import NamedTuple, Self

import numpy as np

from treetrain.planning.blocks import Attention
from treetrain.planning.price import CostModel, Floats
from treetrain.tree.assemble import Int64s
from treetrain.tree.attention_range import AttentionRange


class Rates(NamedTuple):
    """Seconds of forward and backward together, nothing run twice."""

    token: float
    """Of a token in all layers, pairs left out."""
    pairs: dict[AttentionRange, float]
    """Of a visible pair in all layers that see so far."""
    row: float
    """Of a hidden state through the LM head."""
    graph_pass: float
    """What a pass with graph costs besides."""
    forward_pass: float
    """The same for a pass without graph."""
    forward_share: float
    """The forward's share of a token's and a pair's seconds."""

    @classmethod
    def of(cls, cost: CostModel) -> Self:
        """Those of a cost model."""
        c, shape = cost.constants, cost.shape
        both = 1 + c.backward_ratio
        pairs = dict.fromkeys(shape.attention_ranges, 0.0)
        for kind in shape.kinds:
            if isinstance(kind.mixer, Attention):
                pairs[kind.mixer.reach] += kind.count * kind.mixer.pair_flops * both / c.pair_flops
        return cls(
            token=shape.token_flops * both / c.matrix_flops,
            pairs=pairs,
            row=6.0 * shape.hidden * shape.vocab / c.head_flops,
            graph_pass=c.graph_pass_bytes / c.bandwidth + c.graph_pass_seconds,
            forward_pass=c.forward_pass_bytes / c.bandwidth + c.forward_pass_seconds,
            forward_share=1 / both,
        )

    @classmethod
    def unique_tokens(cls) -> Self:
        """Every token costs one second and nothing else does."""
        return cls(token=1.0, pairs={}, row=0.0, graph_pass=0.0, forward_pass=0.0, forward_share=1 / 3)

    def at(self, depth: Int64s) -> Floats:
        """float64: seconds of tokens at these depths of their paths."""
        found = np.full(len(depth), self.token)
        for reach, seconds in self.pairs.items():
            found += seconds * reach.seen(depth)
        return found
