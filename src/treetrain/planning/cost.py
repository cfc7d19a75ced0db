"""Counts of a model: FLOPs, parameters, bytes. Numpy only.

The numbers come from the model itself, counted layer by layer (``engine/costs.py``), or from the sizes of a plain
decoder (`ModelShape`), for planning without a model.

FLOPs are those of matrix products, a multiplication and an addition counted as two. Norms, activations, rotary
embeddings, softmax and the optimiser are left out. A backward needs two products for each product of the forward, so a
step is three forwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from treetrain.errors import UnsupportedModel
from treetrain.tree.assemble import Int64s
from treetrain.tree.attention_range import FULL, AttentionRange, Pairs, pairs_at
from treetrain.tree.build import Row, as_tree
from treetrain.tree.stats import TreeStats, tree_stats
from treetrain.tree.token_tree import TokenTree

WIDE = 4
"""Bytes of float32, the dtype of log-probabilities, entropies and summed gradients."""


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """FLOPs and bytes of one model, all layers together.

    Bytes are in the model's dtype. A *pass* is one call of the model, with graph (forward and backward) or without. In
    each phase of a pass, memory is linear in its tokens and head rows.
    """

    layers: int
    hidden: int
    """Width of the residual stream."""
    vocab: int
    parameters: int
    """Number of parameters."""
    parameters_in_layers: int
    """Parameters in the layers, all experts included."""
    dtype_bytes: int
    """Bytes per number in the compute dtype: 2, 4 or 8."""
    checkpointing: bool = False
    """Whether every layer keeps only its input and runs forward again in backward."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    """Key/value heads."""
    experts: int = 0
    """Experts of a layer; 0 for a model without any."""
    experts_per_token: int = 0
    expert_parameters: int = 0
    """Parameters of all experts of all layers."""

    token_flops: float
    """Forward FLOPs of a token in all layers, attention over pairs excluded."""
    flops_by_range: Mapping[AttentionRange, float]
    """Forward FLOPs of a visible (query, key) pair in all layers with this range."""

    saved_layers: float
    """Bytes per token that the layers save for backward, without checkpointing."""
    saved_layer: float
    """The same for the layer that saves most."""
    saved_outside: float
    """Bytes per token saved outside the layers, such as by the last norm."""
    saved_pass: float = 0.0
    """Bytes saved per pass: autocast's copies of weights."""
    backward_token: float
    """Bytes per token, besides the graph, in the backward of a layer."""
    weight_gradient: float
    """Bytes of the largest weight's gradient, before accumulation."""
    forward_token: float
    """Bytes per token of a pass without graph, in its widest layer."""
    cache_token: float
    """Bytes of keys, values and their gradients per cached token, all layers."""
    cache_layer: float
    """The same for the largest layer."""
    cache_state: float = 0.0
    """Bytes of the recurrent states after one token and their gradients, all layers."""
    logit: float
    """Bytes of one logit with its gradient, while a chunk of rows is scored."""
    head_pass: float
    """Bytes of the LM head per pass: its 16-bit gradient before accumulation, and autocast's 16-bit copy of it."""
    step: float
    """Bytes held for the whole step: summed gradients of embedding and head."""

    @property
    def saved_token(self) -> float:
        """Bytes of a pass's graph per token."""
        layers = self.layers * self.hidden * self.dtype_bytes if self.checkpointing else self.saved_layers
        return layers + self.saved_outside

    @property
    def attention_ranges(self) -> tuple[AttentionRange, ...]:
        """The distinct attention ranges of the layers."""
        return tuple(self.flops_by_range) or (FULL,)

    def pairs_at(self, depth: Int64s) -> Pairs:
        """Visible pairs of tokens at these depths of their paths (0: the first token), as `flops` takes them."""
        return pairs_at(depth, self.attention_ranges)

    def pair_flops(self, pairs: Pairs) -> float:
        """Forward FLOPs of visible pairs, all layers.

        Args:
            pairs: by range; a number if all attention is full.

        Raises:
            ValueError: one number, but not all layers of the model have full attention.
        """
        if not isinstance(pairs, Mapping):
            if self.attention_ranges != (FULL,):
                raise ValueError(
                    f"one number of pairs ({pairs}) for layers that see differently far "
                    f"({', '.join(map(str, self.attention_ranges))}); give pairs by range, e.g. those of "
                    "pairs_at(depths)"
                )
            pairs = {FULL: pairs}
        return sum(flops * pairs[each] for each, flops in self.flops_by_range.items())

    def flops(self, tokens: int, pairs: Pairs, head_rows: int) -> float:
        """FLOPs of one forward and backward, nothing recomputed.

        Args:
            tokens: tokens through the layers.
            pairs: visible (query, key) pairs, the token itself included; by range if layers see less than the path.
            head_rows: hidden states through the LM head.

        Raises:
            ValueError: `pairs` is one number, but not all layers of the model have full attention.
        """
        return 3.0 * (tokens * self.token_flops + self.pair_flops(pairs) + 2 * head_rows * self.hidden * self.vocab)

    def checkpointed(self, checkpointing: bool) -> Self:
        """The same model with or without gradient checkpointing of every layer."""
        return replace(self, checkpointing=checkpointing)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a plain decoder: full attention and gated MLPs in every layer, as in Llama, Qwen3 and Qwen3-MoE."""

    layers: int
    """Number of decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Inner width of the MLP, or of each expert."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of `heads`."""
    head_dim: int
    """Size of a head."""
    vocab: int
    """Size of the vocabulary."""
    tied: bool
    """Whether LM head and embedding share one matrix. This changes the memory, not the FLOPs."""
    experts: int = 0
    """Experts in every layer; 0 for an MLP that all tokens go through."""
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"model shape: {name} is {value!r}, expected a positive whole number")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"model shape: {self.heads} heads cannot share {self.kv_heads} kv heads evenly")
        if self.experts_per_token > self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise UnsupportedModel(
                f"model shape: {self.experts_per_token} experts per token of {self.experts} experts in a layer"
            )

    @classmethod
    def named(cls, name: str) -> Self:
        """A well-known shape, for planning without a model.

        Args:
            name: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b or
                llama-3.1-8b.

        Raises:
            ValueError: any other name.
        """
        if name.lower() not in _NAMED:
            raise ValueError(f"no model shape is named {name!r}; there are {', '.join(_NAMED)}")
        sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")
        *numbers, tied, experts, chosen = _NAMED[name.lower()]
        return cls(**dict(zip(sizes, numbers)), tied=bool(tied), experts=experts, experts_per_token=chosen)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `named` knows."""
        return tuple(_NAMED)

    @classmethod
    def of(cls, shape: "ModelShape | str") -> "ModelShape":
        """The shape itself, or the one with this name."""
        return cls.named(shape) if isinstance(shape, str) else shape

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices: query, key, value, output, the router, and the three of each MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + self.experts * self.hidden + max(1, self.experts) * self._mlp_parameters

    @property
    def _mlp_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Parameters of all matrices, the embedding included; norms and biases (under 0.1%) are left out."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def attention_ranges(self) -> tuple[AttentionRange, ...]:
        """Only full attention."""
        return (FULL,)

    def flops(self, tokens: int, pairs: Pairs, head_rows: int) -> float:
        """FLOPs of one forward and backward; see `ModelCounts.flops`."""
        return self.counts().flops(tokens, pairs, head_rows)

    def counts(self, *, dtype_bytes: int = 4, checkpointing: bool = False) -> ModelCounts:
        """Count a model of this shape with every weight trained.

        A layer saves per token: for each of its two norms, the float32 input, the normed input and the output; for
        attention, queries and keys (in float32 before their norms, after them, and rotated), values, output and
        log-sum-exp; for the MLP, gate, activation, up projection and the product of the last two.

        Raises:
            ValueError: `dtype_bytes` is not 2, 4 or 8.
        """
        if dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes={dtype_bytes!r}: numbers of 2, 4 or 8 bytes are known")
        b, wide, hidden = dtype_bytes, max(WIDE, dtype_bytes), self.hidden
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * (2 * hidden * b + (hidden + 1) * wide)
        attention = 3 * (queries + keys) * b + (queries + keys + 2 * self.heads + self.kv_heads) * wide
        used = max(1, self.experts_per_token)
        idle = max(0, self.experts - used) * self._mlp_parameters
        copies = 2 * hidden * b * self.experts_per_token  # a token's states, sorted by expert, and each expert's output
        layer, matrix = norms + attention + 4 * used * self.intermediate * b + copies, self.vocab * hidden
        cached = 2 * keys * (b + wide)
        return ModelCounts(
            layers=self.layers,
            hidden=hidden,
            vocab=self.vocab,
            parameters=self.parameters,
            parameters_in_layers=self.layers * self.layer_parameters,
            dtype_bytes=b,
            checkpointing=checkpointing,
            heads=self.heads,
            kv_heads=self.kv_heads,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            expert_parameters=self.layers * self.experts * self._mlp_parameters,
            token_flops=2 * self.layers * (self.layer_parameters - idle),
            flops_by_range={FULL: 4 * self.layers * queries},
            saved_layers=self.layers * layer,
            saved_layer=layer,
            saved_outside=hidden * (wide + 2 * b) + 2 * self.head_dim * b,  # the last norm; cosines and sines
            # Backward frees the graph as it goes, so it adds little: gradients of the residual stream.
            backward_token=3 * b * hidden,
            weight_gradient=hidden * max((2 * self.experts or 1) * self.intermediate, queries) * b,
            forward_token=4 * hidden * b + 3 * used * self.intermediate * b + copies,
            cache_token=self.layers * cached,
            cache_layer=cached,
            logit=2 * wide + (b if b < wide else 0),
            head_pass=matrix * b if b < wide else 0,
            step=matrix * wide * (1 if self.tied else 2),
        )


def stats(rows: Sequence[Row] | TokenTree, shape: ModelCounts | ModelShape | str | None = None) -> TreeStats:
    """Compute how many tokens a batch shares, where, and the ideal speed-up.

    Args:
        rows: the batch, K rows (trajectories, or lists or arrays of token ids) or their tree.
        shape: a model's counts or shape, or a shape's name ("qwen3-8b"), for the speed-ups in FLOPs; None leaves
            them out.

    Raises:
        DataError: invalid rows.
        ValueError: an unknown shape name.
    """
    return tree_stats(as_tree(rows), ModelShape.of(shape) if isinstance(shape, str) else shape)


# layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied, experts, experts per token: the published
# config.json files.
_NAMED = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True, 0, 0),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True, 0, 0),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True, 0, 0),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False, 0, 0),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False, 0, 0),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, False, 0, 0),
    "qwen3-30b-a3b": (48, 2048, 768, 32, 4, 128, 151936, False, 128, 8),
    "qwen3-235b-a22b": (94, 4096, 1536, 64, 4, 128, 151936, False, 128, 8),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, False, 0, 0),
}
