"""What a training step costs on a model of a given shape: floating-point operations, counted from its matrices."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from treetrain.errors import UnsupportedModel
from treetrain.planning.blocks import Attention, Layers, Mlp
from treetrain.planning.families import read_shape
from treetrain.tree.assemble import Int64s
from treetrain.tree.attention_range import FULL, AttentionRange, Pairs, pairs_at


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The matrices of a decoder.

    Eight numbers describe a plain one: full attention in every layer, a gated MLP of three matrices. `blocks` says
    what the layers are made of where they are not such; the numbers are then those of its plain parts.
    """

    layers: int
    """How many decoder layers there are."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the MLP between its matrices."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of `heads`."""
    head_dim: int
    """Size of a head."""
    vocab: int
    """Entries of the vocabulary."""
    tied: bool
    """Whether the LM head is the embedding's matrix. Changes the memory, not the FLOPs."""
    blocks: tuple[Layers, ...] = ()
    """The layers by kind; empty: all plain."""
    positions: int = 0
    """Entries of a table of learned positions."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"model shape: {name} is {value!r}, expected a positive whole number")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"model shape: {self.heads} heads cannot share {self.kv_heads} kv heads evenly")
        if self.blocks and sum(kind.count for kind in self.blocks) != self.layers:
            raise UnsupportedModel(
                f"model shape: {self.layers} layers, but blocks for {sum(kind.count for kind in self.blocks)}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that a Hugging Face config.json describes.

        Args:
            config: the parsed file. Keys it leaves out take the value that transformers gives them, where that
                is fixed for the family; no other value is guessed.

        Raises:
            UnsupportedModel: a `model_type` or a kind of layer whose cost is not known, a missing key.
        """
        return cls(**read_shape(config))

    @classmethod
    def named(cls, name: str) -> Self:
        """A well-known shape, for planning without a configuration file.

        Args:
            name: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b or llama-3.1-8b.

        Raises:
            ValueError: any other name.
        """
        if name.lower() not in _NAMED:
            raise ValueError(f"no model shape is named {name!r}; there are {', '.join(_NAMED)}")
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied = _NAMED[name.lower()]
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=vocab,
            tied=tied,
        )

    @classmethod
    def of(cls, shape: "ModelShape | str") -> "ModelShape":
        """A shape as it is, or by its name."""
        return cls.named(shape) if isinstance(shape, str) else shape

    @property
    def layer_parameters(self) -> int:
        """Entries of a plain layer's matrices: query, key, value, output, and the MLP's three."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @cached_property
    def kinds(self) -> tuple[Layers, ...]:
        """The layers by kind, plain ones spelled out."""
        if self.blocks:
            return self.blocks
        attention = Attention(
            weights=2 * self.hidden * self.head_dim * (self.heads + self.kv_heads),
            heads=self.heads,
            kv_heads=self.kv_heads,
            key_size=self.head_dim,
            value_size=self.head_dim,
        )
        return (Layers(self.layers, attention, Mlp(hidden=self.hidden, width=self.intermediate)),)

    @property
    def attention(self) -> Attention:
        """Of the first layer that has any. Raises UnsupportedModel where none has."""
        found = next((kind.mixer for kind in self.kinds if isinstance(kind.mixer, Attention)), None)
        if found is None:
            raise UnsupportedModel("model shape: no layer has attention")
        return found

    @cached_property
    def layer_weights(self) -> int:
        """Entries of all layers' matrices, those of experts that a token does not get included."""
        return sum(kind.count * kind.weights for kind in self.kinds)

    @property
    def parameters(self) -> int:
        """Entries of all matrices, the embedding included; norms, biases and convolutions (under 0.1%) are left out."""
        return self.layer_weights + (1 if self.tied else 2) * self.vocab * self.hidden + self.positions

    @cached_property
    def token_flops(self) -> int:
        """FLOPs of one token in a forward through all layers, visible pairs left out."""
        return sum(kind.count * kind.token_flops for kind in self.kinds)

    @cached_property
    def attention_ranges(self) -> tuple[AttentionRange, ...]:
        """How far the attention layers see, each once; full attention alone where no layer has attention."""
        found = dict.fromkeys(kind.mixer.reach for kind in self.kinds if isinstance(kind.mixer, Attention))
        return tuple(found) or (FULL,)

    @cached_property
    def state_entries(self) -> tuple[int, int]:
        """What recurrent layers hand from a token to the next, all layers: (entries of states, of convolutions)."""
        mixers = [(kind.count, kind.mixer) for kind in self.kinds if not isinstance(kind.mixer, Attention)]
        return sum(n * mixer.state_entries for n, mixer in mixers), sum(n * mixer.tail_entries for n, mixer in mixers)

    def pairs_at(self, depth: Int64s) -> Pairs:
        """Visible pairs of tokens at these depths of their paths (0: the first token), as `flops` takes them."""
        return pairs_at(depth, self.attention_ranges)

    def pair_flops(self, pairs: Pairs) -> float:
        """FLOPs of visible pairs in a forward, all layers.

        Args:
            pairs: by range; a number where all attention is full.

        Raises:
            ValueError: a number for a model whose layers do not all see the whole path.
        """
        if isinstance(pairs, Mapping):
            seen = pairs
        elif self.attention_ranges == (FULL,):
            seen = {FULL: pairs}
        else:
            raise ValueError(
                f"one number of pairs ({pairs}) for layers that see differently far ({_words(self.attention_ranges)}); "
                "give pairs by range, e.g. those of pairs_at(depths)"
            )
        total = 0.0
        for kind in self.kinds:
            if isinstance(kind.mixer, Attention):
                total += kind.count * kind.mixer.pair_flops * seen[kind.mixer.reach]
        return total

    def flops(self, tokens: int, pairs: Pairs, head_rows: int) -> float:
        """FLOPs of one forward and backward, a multiplication and an addition counted as two.

        Args:
            tokens: tokens through the layers.
            pairs: visible (query, key) pairs, the token itself included; by range where layers see less than the path.
            head_rows: hidden states through the LM head.
        """
        return step_flops(self, tokens, pairs, head_rows)


def step_flops(shape: ModelShape, tokens: int, pairs: Pairs, head_rows: int) -> float:
    """FLOPs of one forward and backward, nothing recomputed.

    Forward, a multiplication and an addition counted as two; a plain layer:
        2 tokens x layers x layer_parameters        projections and MLP
        4 pairs x layers x heads x head_dim         scores and their product with the values
        2 head_rows x hidden x vocab                LM head
    What other layers cost is said where their blocks are (``planning/blocks.py``). Backward needs two products for each
    of the forward's, so the step is three times that. Norms, activations, rotary embeddings, softmax and the optimiser
    are left out.

    Args:
        shape: the model.
        tokens: tokens through the layers.
        pairs: visible (query, key) pairs, the token itself included; by range where layers see less than the path.
        head_rows: hidden states through the LM head.

    Raises:
        ValueError: one number of pairs for a model whose layers do not all see the whole path.
    """
    layers = tokens * shape.token_flops + shape.pair_flops(pairs)
    return 3.0 * (layers + 2 * head_rows * shape.hidden * shape.vocab)


def _words(ranges: tuple[AttentionRange, ...]) -> str:
    return ", ".join(
        f"a window of {r.window}" if r.window else f"chunks of {r.chunk}" if r.chunk else "the whole path"
        for r in ranges
    )


# layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied: the published config.json files.
_NAMED = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, False),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
}
