"""Reads single blocks of a model's layers off its configuration, one function per kind of block."""

from collections.abc import Mapping
from typing import Any

from treetrain.errors import UnsupportedModel
from treetrain.planning.blocks import Attention, Experts, GatedDelta, Mlp, ShortConvolution

Config = Mapping[str, Any]


def number_of(config: Config, key: str, *, least: int = 1) -> int:
    """A whole number that the configuration must have. Raises UnsupportedModel."""
    if config.get(key) is None:
        raise missing(config, key)
    return whole(config, key, config[key], least=least)


def whole(config: Config, key: str, value: Any, *, least: int = 1) -> int:
    """`value`, checked. Raises UnsupportedModel."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UnsupportedModel(f"model shape: {key} is {value!r}, expected a whole number from {least}")
    return value


def missing(config: Config, key: str) -> UnsupportedModel:
    """The error for a key that is left out and has no value of its own."""
    return UnsupportedModel(f"the config of this {config['model_type']} model has no {key}; add it to config.json")


# How attention layers are made.


def projected(config: Config, gates: int = 0) -> Attention:
    """Query, key, value and output projections; `gates` more outputs as wide as the queries."""
    hidden, heads = number_of(config, "hidden_size"), number_of(config, "num_attention_heads")
    if "num_key_value_heads" not in config:
        raise missing(config, "num_key_value_heads")
    kv_heads = heads if config["num_key_value_heads"] is None else number_of(config, "num_key_value_heads")
    size = hidden // heads if config.get("head_dim") is None else number_of(config, "head_dim")
    weights = hidden * size * ((2 + gates) * heads + 2 * kv_heads)
    return Attention(weights=weights, heads=heads, kv_heads=kv_heads, key_size=size, value_size=size)


def gated_projected(config: Config) -> Attention:
    """With a gate on the output, made beside the queries."""
    return projected(config, gates=1)


def low_rank(config: Config) -> Attention:
    """Queries, and keys with values, by way of narrow matrices; keys and values of unequal size."""
    hidden, heads = number_of(config, "hidden_size"), number_of(config, "num_attention_heads")
    rotary, plain = number_of(config, "qk_rope_head_dim"), number_of(config, "qk_nope_head_dim")
    value, rank = number_of(config, "v_head_dim"), number_of(config, "kv_lora_rank")
    queries = heads * (plain + rotary)
    if config.get("q_lora_rank") is None:
        weights = hidden * queries
    else:
        weights = number_of(config, "q_lora_rank") * (hidden + queries)
    weights += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    return Attention(weights=weights, heads=heads, kv_heads=heads, key_size=plain + rotary, value_size=value)


def gated_delta(config: Config) -> GatedDelta:
    """Queries, keys, values, an output gate, a decay and a rate per value head; the output projection."""
    hidden = number_of(config, "hidden_size")
    key_heads, value_heads = number_of(config, "linear_num_key_heads"), number_of(config, "linear_num_value_heads")
    key_size, value_size = number_of(config, "linear_key_head_dim"), number_of(config, "linear_value_head_dim")
    keys, values = key_heads * key_size, value_heads * value_size
    return GatedDelta(
        weights=hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=key_size,
        value_size=value_size,
        kernel=number_of(config, "linear_conv_kernel_dim"),
    )


def gated_delta_of_heads(config: Config) -> GatedDelta:
    """OLMo hybrid: as many heads as attention has and keys of three quarters of their size, where nothing is said."""
    own = {key: config[key] for key in _DELTA_SIZES if config.get(key) is not None}
    heads = dict.fromkeys(_DELTA_SIZES[:2], number_of(config, "num_attention_heads")) | own
    key_heads = whole(config, _DELTA_SIZES[0], heads[_DELTA_SIZES[0]])
    keys = {_DELTA_SIZES[2]: int(0.75 * number_of(config, "hidden_size") / key_heads)} | heads
    return gated_delta({**config, _DELTA_SIZES[3]: 2 * whole(config, _DELTA_SIZES[2], keys[_DELTA_SIZES[2]]), **keys})


_DELTA_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def short_convolution(config: Config) -> ShortConvolution:
    """LFM2: two gates and the values by one matrix, the output by another."""
    return ShortConvolution(hidden=number_of(config, "hidden_size"), kernel=number_of(config, "conv_L_cache"))


# How feed-forward blocks are made.


def gated(config: Config, number: int) -> Mlp:
    """Three matrices."""
    return Mlp(hidden=number_of(config, "hidden_size"), width=number_of(config, "intermediate_size"))


def gated_and_rounded(config: Config, number: int) -> Mlp:
    """LFM2: three matrices; of two thirds of the width given, scaled and rounded up, unless told otherwise."""
    width = number_of(config, "intermediate_size")
    if config["block_auto_adjust_ff_dim"]:
        step = number_of(config, "block_multiple_of")
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // step) * step
    return Mlp(hidden=number_of(config, "hidden_size"), width=width)


def two_matrices(config: Config, number: int) -> Mlp:
    """One up, one down; four times as wide as the stream where nothing is said."""
    width = config.get("intermediate_size") or 4 * number_of(config, "hidden_size")
    return Mlp(hidden=number_of(config, "hidden_size"), width=whole(config, "intermediate_size", width), matrices=2)


def _experts(config: Config, *, width: str = "moe_intermediate_size", **others: Any) -> Experts:
    count = next((config[key] for key in _COUNTS if config.get(key) is not None), None)
    if count is None:
        raise missing(config, _COUNTS[0])
    hidden, run = number_of(config, "hidden_size"), number_of(config, "num_experts_per_tok")
    return Experts(**{"hidden": hidden, "count": count, "run": run, "width": number_of(config, width)} | others)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_everywhere(config: Config, number: int) -> Experts:
    """Mixtral: in every layer."""
    return _experts(config, width="intermediate_size")


def clamped_experts(config: Config, number: int) -> Experts:
    """gpt-oss: the same, gate and up projection clamped and weighed before their product."""
    return _experts(config, width="intermediate_size", kept=10)


def some_experts(config: Config, number: int) -> Mlp | Experts:
    """Qwen3-MoE: every so many layers but those listed."""
    return gated(config, number) if _is_dense(config, number) else _experts(config)


def experts_and_shared(config: Config, number: int) -> Experts:
    """Qwen3.5: in every layer, with a shared expert and its gate."""
    return _experts(config, shared=number_of(config, "shared_expert_intermediate_size"), shared_gate=True)


def some_experts_and_shared(config: Config, number: int) -> Mlp | Experts:
    """Qwen3-Next: some layers, with a shared expert and its gate."""
    return gated(config, number) if _is_dense(config, number) else experts_and_shared(config, number)


def _is_dense(config: Config, number: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    return number in (config.get("mlp_only_layers") or ()) or (number + 1) % step != 0


def experts_after_some(config: Config, number: int) -> Mlp | Experts:
    """DeepSeek, GLM: the first layers have none."""
    if number < number_of(config, "first_k_dense_replace", least=0):
        return gated(config, number)
    shared = number_of(config, "moe_intermediate_size") * number_of(config, "n_shared_experts", least=0)
    return _experts(config, shared=shared)


def all_experts_weighed(config: Config, number: int) -> Mlp | Experts:
    """Llama 4: every expert computes every token, those not chosen from an input of zeros."""
    hidden, width = number_of(config, "hidden_size"), number_of(config, "intermediate_size")
    step = config.get("interleave_moe_layer_step") or 1
    listed = config.get("moe_layers")
    if number not in listed if listed is not None else (number + 1) % step != 0:
        return Mlp(hidden=hidden, width=number_of(config, "intermediate_size_mlp"))
    return _experts(config, width="intermediate_size", run=number_of(config, "num_local_experts"), shared=width)
