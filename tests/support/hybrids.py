"""Small models with recurrent layers, those of the registry and some that it does not have."""

from typing import Any

import torch
import transformers
from torch import nn

from support.families import BASE, GATED_DELTA, Family, build, make_config, make_family

_DELTA = {k: v for k, v in GATED_DELTA["qwen3_5_text"].own.items() if k.startswith(("linear_", "layer_types"))}
MORE = {
    "olmo_hybrid": Family(
        "OlmoHybridConfig", "OlmoHybridForCausalLM", {**_DELTA, "linear_allow_neg_eigval": True, "head_dim": 8}
    ),
    "lfm2": Family("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    # Two recurrent layers below one another, and one above attention.
    "qwen3_5_deep": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **GATED_DELTA["qwen3_5_text"].own,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
}


def make_hybrid(
    name: str = "qwen3_5_text", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> nn.Module:
    """As `make_family`."""
    if name not in MORE:
        return make_family(name, dtype, seed, **changes)
    config = make_hybrid_config(name, **changes)
    return build(getattr(transformers, MORE[name].model), config, dtype=dtype, seed=seed)


def make_hybrid_config(name: str, **changes: Any) -> Any:
    """As `make_config`."""
    if name not in MORE:
        return make_config(name, **changes)
    family = MORE[name]
    return getattr(transformers, family.config)(**(BASE | family.own | changes))
