"""What a training step costs on a model of a given shape: floating-point operations, counted from its matrices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from treetrain.errors import UnsupportedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The matrices of a dense decoder: full attention in every layer, a gated MLP of three matrices."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the MLP between its matrices."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of `heads`."""
    head_dim: int
    vocab: int
    tied: bool
    """Whether the LM head is the embedding's matrix. Changes the memory, not the FLOPs."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"model shape: {name} is {value!r}, expected a positive whole number")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"model shape: {self.heads} heads cannot share {self.kv_heads} kv heads evenly")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that a Hugging Face config.json describes.

        Args:
            config: the parsed file. Keys it leaves out take the value that transformers gives them, where that
                is fixed for the family; no other value is guessed.

        Raises:
            UnsupportedModel: another `model_type` than the plain dense families, an active sliding window, a
                missing key.
        """
        family = _family(config)
        _refuse_other_attention(config, family)
        heads = _number(config, "num_attention_heads")
        hidden = _number(config, "hidden_size")
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is None and not family.kv_heads_may_be_left_out:
            raise _missing(config, "num_key_value_heads")
        return cls(
            layers=_number(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_number(config, "intermediate_size"),
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=config.get("head_dim") or family.head_dim or hidden // heads,
            vocab=_number(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
        )

    @classmethod
    def named(cls, name: str) -> Self:
        """A well-known shape, for planning without a config file, e.g. "qwen3-0.6b". Raises ValueError."""
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

    @property
    def layer_parameters(self) -> int:
        """Entries of one layer's matrices: query, key, value, output, and the MLP's three."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Entries of all matrices, the embedding included; norms and biases (under 0.1%) are left out."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    def flops(self, tokens: int, pairs: int, head_rows: int) -> float:
        """FLOPs of a training step; see `step_flops`."""
        return step_flops(self, tokens, pairs, head_rows)


def step_flops(shape: ModelShape, tokens: int, pairs: int, head_rows: int) -> float:
    """FLOPs of one forward and backward, nothing recomputed.

    Forward, a multiplication and an addition counted as two:
        2 tokens x layers x layer_parameters        projections and MLP
        4 pairs x layers x heads x head_dim         scores and their product with the values
        2 head_rows x hidden x vocab                LM head
    Backward needs two products for each of the forward's, so the step is three times that. Norms, activations,
    rotary embeddings, softmax and the optimiser are left out.

    Args:
        shape: the model.
        tokens: tokens through the layers.
        pairs: visible (query, key) pairs, the token itself included.
        head_rows: hidden states through the LM head.
    """
    layers = 2 * tokens * shape.layer_parameters + 4 * pairs * shape.heads * shape.head_dim
    return 3.0 * (shape.layers * layers + 2 * head_rows * shape.hidden * shape.vocab)


class _Family(NamedTuple):
    """What transformers fills in when a family's config.json leaves a key out."""

    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    kv_heads_may_be_left_out: bool = False  # then as many as heads; otherwise a constant nobody means
    tied: bool = False
    window: int | None = None


# Families whose layers are four attention projections (stored apart or joined) and a gated MLP, every layer with
# full attention. A test holds this table against transformers' own classes.
_FAMILIES = {
    "cohere": _Family(kv_heads_may_be_left_out=True, tied=True),
    "ernie4_5": _Family(head_dim=128, tied=True),
    "gemma": _Family(head_dim=256, tied=True),
    "glm": _Family(head_dim=128),
    "glm4": _Family(head_dim=128),
    "granite": _Family(kv_heads_may_be_left_out=True),
    "llama": _Family(kv_heads_may_be_left_out=True),
    "mistral": _Family(window=4096),
    "olmo": _Family(kv_heads_may_be_left_out=True),
    "olmo2": _Family(kv_heads_may_be_left_out=True),
    "phi3": _Family(kv_heads_may_be_left_out=True),
    "qwen2": _Family(),
    "qwen3": _Family(head_dim=128),
    "seed_oss": _Family(head_dim=128),
    "smollm3": _Family(tied=True),
}

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


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise UnsupportedModel(
            f"model_type {model_type!r}: its cost is not known, and a guess would mislead; known are "
            f"{', '.join(_FAMILIES)}. Name a shape of the same size instead (--shape on the command line, "
            "ModelShape.named in code)"
        )
    return _FAMILIES[model_type]


def _refuse_other_attention(config: Mapping[str, Any], family: _Family) -> None:
    """Layers that do not see the whole path are not counted by pairs."""
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise UnsupportedModel(f"model_type {config['model_type']!r} with {', '.join(other)} layers is not known")
    window = config.get("sliding_window", family.window)
    longest = config.get("max_position_embeddings")
    if window is None or config.get("use_sliding_window") is False or (longest and window >= longest):
        return
    if "use_sliding_window" not in config and config["model_type"] in ("qwen2", "qwen3", "smollm3"):
        return  # these use their window only when told to
    raise UnsupportedModel(
        f"model_type {config['model_type']!r} with a sliding window of {window} tokens is not known; "
        "sliding_window must be null"
    )


def _number(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise _missing(config, key)
    return config[key]


def _missing(config: Mapping[str, Any], key: str) -> UnsupportedModel:
    return UnsupportedModel(f"the config of this {config['model_type']} model has no {key}; add it to config.json")
