"""The blocks that a decoder's layers are made of, and what one token costs in each: FLOPs forward, entries of weights.

A multiplication and an addition count as two FLOPs. Norms, activations, rotary embeddings and softmax are left out.
"""

from dataclasses import dataclass
from typing import NamedTuple

from treetrain.tree.attention_range import FULL, AttentionRange

DELTA_CHUNK = 64
"""Tokens whose updates the gated delta rule gathers into one; that of transformers and of flash-linear-attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention."""

    weights: int
    """Entries of the projections' matrices."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of `heads`."""
    key_size: int
    """Entries of a query and of a key, per head."""
    value_size: int
    """Entries of a value, per head."""
    reach: AttentionRange = FULL
    """How far back along the path a token sees."""

    @property
    def token_flops(self) -> int:
        """Of the projections."""
        return 2 * self.weights

    @property
    def pair_flops(self) -> int:
        """Of one visible pair: its score, and its value's share of the output, over all query heads."""
        return 2 * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """A gated delta rule behind a causal depthwise convolution: a state of fixed size in place of keys and values."""

    weights: int
    """Entries of the projections' matrices."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    """Tokens that the convolution looks at, the token itself included."""

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def state_entries(self) -> int:
        """The recurrent state after a token: a matrix per value head."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def tail_entries(self) -> int:
        """The convolution's inputs that the next token needs."""
        return (self.kernel - 1) * self.channels

    @property
    def token_flops(self) -> int:
        """Of projections, convolution and rule.

        The rule, in chunks of C tokens, per value head with keys of k and values of v entries: products of keys with
        keys and of queries with keys, 4 C k; two triangular systems, C (k + v); the chunk's own values, 2 C v; the
        state read twice and updated once, 6 k v.
        """
        k, v, c = self.key_size, self.value_size, DELTA_CHUNK
        rule = self.value_heads * (4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v)
        return 2 * self.weights + 2 * self.kernel * self.channels + rule


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution:
    """A causal depthwise convolution between two gates; nothing reaches further back."""

    hidden: int
    kernel: int
    """Tokens that the convolution looks at, the token itself included."""

    @property
    def weights(self) -> int:
        """Entries of the projections' matrices: both gates and the values, the output."""
        return 4 * self.hidden * self.hidden

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.hidden

    @property
    def state_entries(self) -> int:
        """Nothing but the convolution's inputs is handed on."""
        return 0

    @property
    def tail_entries(self) -> int:
        """The convolution's inputs that the next token needs."""
        return (self.kernel - 1) * self.channels

    @property
    def token_flops(self) -> int:
        """Of projections and convolution."""
        return 2 * self.weights + 2 * self.kernel * self.channels


Mixer = Attention | GatedDelta | ShortConvolution
"""What mixes tokens in a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A feed-forward block that every token goes through."""

    hidden: int
    width: int
    matrices: int = 3
    """Three where it is gated, two where it is not."""

    @property
    def weights(self) -> int:
        """Entries of its matrices."""
        return self.matrices * self.hidden * self.width

    @property
    def token_flops(self) -> int:
        """Of its matrices."""
        return 2 * self.weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A router, experts with gated MLPs of which each token gets a few, and what every token gets besides."""

    hidden: int
    count: int
    """Experts."""
    run: int
    """Experts whose matrices a token goes through: those chosen; all where the family computes all and weighs."""
    width: int
    """Of one expert."""
    kept: int = 4
    """Tensors as wide as an expert that backward needs: gate, its activation, up projection, their product."""
    shared: int = 0
    """Width of the expert that every token gets; 0: there is none."""
    shared_gate: bool = False
    """Whether a vector weighs the shared expert's output."""

    @property
    def _always(self) -> int:
        return self.hidden * (self.count + 3 * self.shared + (1 if self.shared_gate else 0))

    @property
    def weights(self) -> int:
        """Entries of all matrices, the experts that a token does not get included."""
        return self._always + 3 * self.count * self.hidden * self.width

    @property
    def token_flops(self) -> int:
        """Of router, experts and shared expert."""
        return 2 * (self._always + 3 * self.run * self.hidden * self.width)


class Layers(NamedTuple):
    """Layers that are alike."""

    count: int
    mixer: Mixer
    feed: Mlp | Experts
    norms: int = 2
    """RMS norms of the residual stream."""

    @property
    def weights(self) -> int:
        """Entries of one layer's matrices."""
        return self.mixer.weights + self.feed.weights

    @property
    def token_flops(self) -> int:
        """FLOPs of one token in one layer's forward, visible pairs left out."""
        return self.mixer.token_flops + self.feed.token_flops
