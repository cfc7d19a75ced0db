"""Reads what the layers of a model are made of from its configuration, for the families whose cost is known.

A configuration tells sizes; which of them a family uses, where, and what it takes for a key that is left out, is told
by the table at the end. Tests hold the table against the modules and the FLOPs of transformers' own classes.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from treetrain.errors import UnsupportedModel
from treetrain.planning import config_blocks as blocks
from treetrain.planning.blocks import Attention, Experts, GatedDelta, Layers, Mixer, Mlp, ShortConvolution
from treetrain.planning.config_blocks import Config, missing, number_of
from treetrain.tree.attention_range import FULL, AttentionRange

FULL_KIND, WINDOW_KIND, CHUNK_KIND, DELTA_KIND, CONVOLUTION_KIND = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
)
Kinds = Callable[[Config, int], list[str]]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _all_full(config: Config, layers: int) -> list[str]:
    return [FULL_KIND] * layers


class Family(NamedTuple):
    """How a family's configuration is read."""

    defaults: Mapping[str, Any] = _NOTHING
    """What transformers takes for keys that are left out and says the same for every model of the family. None for
    num_key_value_heads: as many as query heads; for head_dim: hidden_size // num_attention_heads, also if not here."""
    kinds: Kinds = _all_full
    """The kind of each of so many layers, where `layer_types` does not tell."""
    listed: tuple[str, ...] = ()
    """Kinds that the model takes from `layer_types` beside full attention; none: it does not look there."""
    attention: Callable[[Config], Attention] = blocks.projected
    recurrence: Callable[[Config], GatedDelta | ShortConvolution] = blocks.gated_delta
    feed: Callable[[Config, int], Mlp | Experts] = blocks.gated
    """The feed-forward block of a layer by its number."""
    norms: int = 2
    """RMS norms of the residual stream in a layer."""
    names: Mapping[str, str] = _NOTHING
    """The family's own names of keys, by the usual ones."""
    fixed: Mapping[str, Any] = _NOTHING
    """Keys that the model does not look at, with what it does."""
    positions: Callable[[Config], int] | None = None
    """Entries of a table of learned positions."""


def read_shape(config: Config) -> dict[str, Any]:
    """The fields of a `ModelShape`. Raises UnsupportedModel: see `ModelShape.from_config`."""
    text = config.get("text_config")
    family, config = _family(text if isinstance(text, Mapping) else config)
    layers, hidden = number_of(config, "num_hidden_layers"), number_of(config, "hidden_size")
    attention = family.attention(config)
    found: Counter[tuple[Mixer, Mlp | Experts]] = Counter()
    for number, kind in enumerate(_kinds(config, family, layers)):
        found[_mixer(config, family, kind, attention), family.feed(config, number)] += 1
    kinds = tuple(Layers(count, mixer, feed, family.norms) for (mixer, feed), count in found.items())
    widths = [kind.feed.width for kind in kinds if isinstance(kind.feed, Mlp)] or [kinds[0].feed.width]
    shape = {
        "layers": layers,
        "hidden": hidden,
        "intermediate": widths[0],
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.key_size,
        "vocab": number_of(config, "vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    is_plain = (family.attention, family.feed, family.norms) == (blocks.projected, blocks.gated, 2)
    if not is_plain or any(kind.mixer != attention for kind in kinds):
        shape["blocks"] = kinds
    if family.positions is not None:
        shape["positions"] = family.positions(config)
    return shape


def _family(config: Config) -> tuple[Family, Config]:
    """The family, and the configuration with its usual names and what was left out."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {model_type!r}: its cost is not known, and a guess would mislead; known are "
            f"{', '.join(FAMILIES)}. Name a shape of the same size instead (--shape on the command line, "
            "ModelShape.named in code)"
        )
    family = FAMILIES[model_type]
    own = {usual: config[name] for usual, name in family.names.items() if name in config}
    return family, {**family.defaults, **config, **own, **family.fixed}


def _kinds(config: Config, family: Family, layers: int) -> list[str]:
    """The kind of every layer, those that the family does not have refused."""
    expected = family.kinds(config, layers)
    given = config.get("layer_types")
    other = sorted(set(given or ()) - {FULL_KIND, *(family.listed or expected)})
    if other:
        raise UnsupportedModel(f"model_type {config['model_type']!r} with {', '.join(other)} layers is not known")
    if not given or not family.listed:
        return expected
    if len(given) != layers:
        raise UnsupportedModel(f"layer_types has {len(given)} entries for num_hidden_layers={layers}")
    return list(given)


def _mixer(config: Config, family: Family, kind: str, attention: Attention) -> Mixer:
    if kind in (DELTA_KIND, CONVOLUTION_KIND):
        return family.recurrence(config)
    reach = _window(config) if kind == WINDOW_KIND else _chunk(config) if kind == CHUNK_KIND else FULL
    return Attention(
        weights=attention.weights,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        key_size=attention.key_size,
        value_size=attention.value_size,
        reach=reach,
    )


def _window(config: Config) -> AttentionRange:
    window, longest = number_of(config, "sliding_window"), config.get("max_position_embeddings")
    return FULL if longest and window >= longest else AttentionRange(window=window)


def _chunk(config: Config) -> AttentionRange:
    chunk, longest = number_of(config, "attention_chunk_size"), config.get("max_position_embeddings")
    return FULL if longest and chunk >= longest else AttentionRange(chunk=chunk)


def _windows_from_a_layer(config: Config, layers: int) -> list[str]:
    """Qwen: in the upper layers, if told to."""
    first = layers
    if config.get("use_sliding_window") and config.get("sliding_window") is not None:
        first = config["max_window_layers"]
    return [WINDOW_KIND if number >= first else FULL_KIND for number in range(layers)]


def _windows_if_told(config: Config, layers: int) -> list[str]:
    used = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return [WINDOW_KIND if used else FULL_KIND] * layers


def _windows_if_set(config: Config, layers: int) -> list[str]:
    return [FULL_KIND if config.get("sliding_window") is None else WINDOW_KIND] * layers


def _windows_without_rotary(config: Config, layers: int) -> list[str]:
    """SmolLM3: in layers without rotary embedding, if told to."""
    used = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return [WINDOW_KIND if used and not rotary else FULL_KIND for rotary in _rotary(config, layers)]


def _chunks_with_rotary(config: Config, layers: int) -> list[str]:
    """Llama 4: full attention where there is no rotary embedding."""
    return [CHUNK_KIND if rotary else FULL_KIND for rotary in _rotary(config, layers)]


def _rotary(config: Config, layers: int) -> list[int]:
    every = config.get("no_rope_layer_interval") or 4
    return config.get("no_rope_layers") or [int((number + 1) % every != 0) for number in range(layers)]


def _full_every(period: int, other: str, key: str = "sliding_window_pattern") -> Kinds:
    """Full attention in every `period`-th layer, `other` between; `key` tells another period."""

    def kinds(config: Config, layers: int) -> list[str]:
        every = config.get(key) or period
        return [other if (number + 1) % every else FULL_KIND for number in range(layers)]

    return kinds


def _delta_but_one(config: Config, layers: int) -> list[str]:
    """OLMo hybrid: full attention in every fourth layer, in the last one at least."""
    kinds = _full_every(4, DELTA_KIND)(config, layers)
    return kinds if FULL_KIND in kinds else [*kinds[:-1], FULL_KIND]


def _convolutions(config: Config, layers: int) -> list[str]:
    """LFM2: wherever attention is not asked for by number."""
    full = config.get("full_attn_idxs")
    return [FULL_KIND if full is None or number in full else CONVOLUTION_KIND for number in range(layers)]


def _opt(config: Config) -> int:
    hidden = number_of(config, "hidden_size")
    if config.get("word_embed_proj_dim") not in (None, hidden):
        raise UnsupportedModel(
            f"word_embed_proj_dim={config['word_embed_proj_dim']} with hidden_size={hidden}: the cost of this opt "
            "model is not known"
        )
    return (number_of(config, "max_position_embeddings") + 2) * hidden


def _gpt2(config: Config) -> int:
    if "max_position_embeddings" not in config:
        raise missing(config, "n_positions")
    return number_of(config, "max_position_embeddings") * number_of(config, "hidden_size")


_TIED = {"tie_word_embeddings": True}
_ALL_HEADS = {"num_key_value_heads": None}
_ONE_SIZE = {"num_key_value_heads": None, "head_dim": None}
_HEAD_128, _HEAD_256 = {"head_dim": 128}, {"head_dim": 256}
_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_LFM2 = {"conv_L_cache": 3, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
_LFM2_NAMES = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_WINDOWS, _DELTA = (WINDOW_KIND,), (DELTA_KIND,)
_DELTA_EVERY = _full_every(4, DELTA_KIND, "full_attention_interval")
_TWO = blocks.two_matrices

FAMILIES = {
    "cohere": Family(_ALL_HEADS | _TIED),
    "cohere2": Family(_ALL_HEADS | _TIED | {"sliding_window": 4096}, _full_every(4, WINDOW_KIND), _WINDOWS),
    "deepseek_v3": Family(attention=blocks.low_rank, feed=blocks.experts_after_some),
    "ernie4_5": Family(_HEAD_128 | _TIED),
    "gemma": Family(_HEAD_256 | _TIED),
    "gemma2": Family(_HEAD_256 | _TIED | {"sliding_window": 4096}, _full_every(2, WINDOW_KIND), _WINDOWS, norms=4),
    "gemma3_text": Family(_HEAD_256 | _TIED | {"sliding_window": 4096}, _full_every(6, WINDOW_KIND), _WINDOWS, norms=4),
    "glm": Family(_HEAD_128),
    "glm4": Family(_HEAD_128, norms=4),
    "glm4_moe": Family(feed=blocks.experts_after_some),
    "gpt2": Family(_TIED, feed=_TWO, names=_GPT2, fixed=_ONE_SIZE, positions=_gpt2),
    "gpt_neox": Family(feed=_TWO, fixed=_ONE_SIZE),
    "gpt_oss": Family(
        {"head_dim": 64, "sliding_window": 128}, _full_every(2, WINDOW_KIND), _WINDOWS, feed=blocks.clamped_experts
    ),
    "granite": Family(_ALL_HEADS),
    "lfm2": Family(
        _TIED | _LFM2,
        _convolutions,
        (CONVOLUTION_KIND,),
        recurrence=blocks.short_convolution,
        feed=blocks.gated_and_rounded,
        names=_LFM2_NAMES,
    ),
    "llama": Family(_ALL_HEADS),
    "llama4_text": Family(
        _HEAD_128 | {"attention_chunk_size": 8192},
        _chunks_with_rotary,
        (CHUNK_KIND,),
        feed=blocks.all_experts_weighed,
    ),
    "mistral": Family({"sliding_window": 4096}, _windows_if_set),
    "mixtral": Family(kinds=_windows_if_set, feed=blocks.experts_everywhere),
    "olmo": Family(_ALL_HEADS),
    "olmo2": Family(_ALL_HEADS),
    "olmo_hybrid": Family(
        _ALL_HEADS | {"linear_conv_kernel_dim": 4}, _delta_but_one, _DELTA, recurrence=blocks.gated_delta_of_heads
    ),
    "opt": Family(_TIED, feed=_TWO, names={"intermediate_size": "ffn_dim"}, fixed=_ONE_SIZE, positions=_opt),
    "phi": Family(_ALL_HEADS, feed=_TWO),
    "phi3": Family(_ALL_HEADS, _windows_if_set),
    "qwen2": Family(_QWEN, _windows_from_a_layer, _WINDOWS),
    "qwen3": Family(_QWEN | _HEAD_128, _windows_from_a_layer, _WINDOWS),
    "qwen3_moe": Family({"sliding_window": 4096}, _windows_if_told, feed=blocks.some_experts),
    "qwen3_next": Family(
        _HEAD_256, _DELTA_EVERY, _DELTA, attention=blocks.gated_projected, feed=blocks.some_experts_and_shared
    ),
    "qwen3_5_text": Family(_HEAD_256, _DELTA_EVERY, _DELTA, attention=blocks.gated_projected),
    "qwen3_5_moe_text": Family(
        _HEAD_256, _DELTA_EVERY, _DELTA, attention=blocks.gated_projected, feed=blocks.experts_and_shared
    ),
    "seed_oss": Family(_HEAD_128),
    "smollm3": Family(_TIED, _windows_without_rotary, _WINDOWS),
    "starcoder2": Family(_TIED, _windows_if_set, feed=_TWO),
}
"""By `model_type`."""
