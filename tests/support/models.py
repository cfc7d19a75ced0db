"""Small random models of real transformers classes: the one registry of families that tests run on.

Every setting that a family has is on, and small enough for short rows to meet it: windows of 5 tokens, soft-caps that
bend the scores, 4 experts of which 2 are chosen, layers of every kind.
"""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from treetrain.check.forests import VOCAB

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 5
_OLD_STYLE = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GATED_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 20}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


class Family(NamedTuple):
    """Configuration and classes of a small model of a family."""

    config: str
    """The configuration's class in transformers."""
    model: str
    """The model's class."""
    own: dict[str, Any]
    """Differences from `BASE`."""


DENSE = {  # full attention in every layer, an MLP, a plain head
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8, "num_key_value_heads": 1}),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 4}),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _OLD_STYLE),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {}),
    "starcoder2": Family("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"head_dim": 8}),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "phi": Family("PhiConfig", "PhiForCausalLM", {"hidden_size": 32}),
    "opt": Family("OPTConfig", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 24}),
}
MOE = {  # a router and experts in place of some layers' MLP
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", _ROUTED | {"head_dim": 8, "use_qk_norm": True}),
    "gpt_oss": Family(  # sinks, and windows in every other layer
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": _YARN} | _ALTERNATING,
    ),
    "deepseek_v3": Family(  # queries and keys of 12 entries, values of 8, both by way of a narrow matrix
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_ROUTED,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 14,
            "kv_lora_rank": 10,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "llama4_text": Family(  # attention in chunks, but in the second layer, which has no rotary embedding
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "intermediate_size_mlp": 40,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": False,
        },
    ),
}
MOE["llama4_tuned"] = MOE["llama4_text"]._replace(  # queries scaled by the place in the call, not by position_ids
    own=MOE["llama4_text"].own | {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5}
)
ATTENTION = {  # windows and soft-caps
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_ALTERNATING,
            "head_dim": 8,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", _ALTERNATING | {"head_dim": 8, "query_pre_attn_scalar": 6}
    ),
    "mistral_window": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2_window": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "cohere2": Family("Cohere2Config", "Cohere2ForCausalLM", _ALTERNATING | {"logit_scale": 0.25}),
}
HEADS = {  # logits scaled behind the head
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "logits_scaling": 3.0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
        },
    ),
    "cohere": Family("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25, "use_qk_norm": True}),
}
GATED_DELTA = {  # a recurrent layer and an attention layer
    "qwen3_next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", _GATED_DELTA | _SHARED_EXPERT),
    "qwen3_next_dense": Family(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", _GATED_DELTA | _SHARED_EXPERT | {"mlp_only_layers": [0, 1]}
    ),
    "qwen3_5_text": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED_DELTA),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _GATED_DELTA | _SHARED_EXPERT),
}
MAMBA = {  # selective state spaces beside attention
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bamba": Family("BambaConfig", "BambaForCausalLM", _MAMBA | {"attn_layer_indices": [1]}),
    "nemotron_h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_MAMBA,
            "mamba_d_ssm": 48,
            "mamba_rms_norm": True,
            "ssm_in_multiplier": 0.7,
            "ssm_out_multiplier": 1.4,
            "ssm_multipliers": [0.6, 1.3, 0.8, 1.2, 0.7],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.8,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],  # one block of attention, with two adapters
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 3,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 6,
            "chunk_size": 8,
        },
    ),
}
FAMILIES: dict[str, Family] = DENSE | MOE | ATTENTION | HEADS | GATED_DELTA | MAMBA
_DELTA = {k: v for k, v in GATED_DELTA["qwen3_5_text"].own.items() if k.startswith(("linear_", "layer_types"))}
VARIANTS = {  # beside the registry: other builds of the same kinds of layers
    "granite_swa": Family(  # sinks and windows without experts, on a scaled head; later transformers only
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        _ALTERNATING | {"logits_scaling": 3.0, "attention_multiplier": 0.4},
    ),
    "olmo_hybrid": Family(
        "OlmoHybridConfig", "OlmoHybridForCausalLM", {**_DELTA, "linear_allow_neg_eigval": True, "head_dim": 8}
    ),
    "lfm2": Family("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "bamba_deep": Family(  # the same of Mamba-2, whose steps are cut at both ends
        "BambaConfig",
        "BambaForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "mamba_proj_bias": True,
            "time_step_limit": (0.5, 1.2),
        },
    ),
    "falcon_h1_plain": Family(  # a gate without a norm
        "FalconH1Config", "FalconH1ForCausalLM", _MAMBA | {"mamba_d_ssm": 48, "mamba_n_groups": 1}
    ),
    "qwen3_5_deep": Family(  # two recurrent layers below one another, and one above attention
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **_GATED_DELTA,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
}

SINCE = dict.fromkeys(("granitemoehybrid", "nemotron_h", "olmo_hybrid", "zamba2"), "5.16") | dict.fromkeys(
    ("falcon_h1", "falcon_h1_plain"), "5.6"
)
"""Oldest transformers with these settings, or with a build of the family that is not refused by name."""


def needs_transformers(oldest: str, reason: str) -> None:
    """Skip the test under an older release."""
    if Version(transformers.__version__) < Version(oldest):
        pytest.skip(
            f"transformers {transformers.__version__} is older than {oldest}: {reason}", allow_module_level=True
        )


def make_config(name: str, **changes: Any) -> Any:
    """The configuration of a family; `changes` overrule its own settings."""
    if name in SINCE:
        needs_transformers(SINCE[name], f"{name} is refused, or its settings have other names")
    family = FAMILIES.get(name) or VARIANTS[name]
    return getattr(transformers, family.config)(**(BASE | family.own | changes))


def mamba1_config(**changes: Any) -> Any:
    """The configuration of a model with Mamba-1 layers, which is refused."""
    return transformers.JambaConfig(
        **(BASE | {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2} | changes)
    )


def make_model(name: str = "qwen3", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """A model in eval mode whose weights are exact in bfloat16, so that it is the same model in every dtype."""
    family = FAMILIES.get(name) or VARIANTS[name]
    return build(getattr(transformers, family.model), make_config(name, **changes), dtype=dtype, seed=seed)


def build(model_class: Any, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The same from a class and a configuration."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # some releases of transformers choose sdpa, which has no soft-cap
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _stir(name, parameter)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zero until training moves it
                buffer.copy_((0.1 * torch.randn_like(buffer)).bfloat16())
    return model.to(dtype)


def like_real_weights(model: nn.Module) -> nn.Module:
    """Give a model what real weights have and small random ones lack: a massive activation, and peaked outputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layers.0.mlp.down_proj.weight"):
                parameter[3] *= 20_000
        head = model.get_output_embeddings().weight  # type: ignore[operator]
        head.mul_(25 / head.norm(dim=1).mean())
    return model


def _stir(name: str, parameter: nn.Parameter) -> None:
    """Norms, biases and decays start at values that hide mistakes."""
    last = name.rsplit(".", 1)[-1]
    norm = "norm" in name or "ln_" in name
    if parameter.dim() > 1 and not norm and not last.endswith("bias"):
        return
    noise = 0.2 * torch.randn_like(parameter)
    if last == "A_log":  # half a state must outlive a segment for a wrong one to be seen
        parameter.copy_(noise - 2)
    elif norm:
        parameter.add_(noise)
    else:
        parameter.copy_(noise)
