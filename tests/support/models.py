"""Small random models of real transformers classes."""

import copy

import torch
import transformers
from torch import nn

from support.forests import VOCAB

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
OLD_STYLE = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 32}

# Name -> (configuration class, model class, what differs from BASE).
FAMILIES: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8, "num_key_value_heads": 1}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 4}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", OLD_STYLE),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", {"hidden_size": 32}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 24}),
}


def make_model(family: str = "qwen3", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> nn.Module:
    """A model in eval mode whose weights are exact in bfloat16, so that it is the same model in every dtype."""
    config_name, class_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**(BASE | own | changes))
    return build(getattr(transformers, class_name), config, dtype=dtype, seed=seed)


def build(model_class, config, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The same from a class and a configuration."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases start at ones and zeros, which hide mistakes
                noise = 0.2 * torch.randn_like(parameter)
                parameter.add_(noise) if "norm" in name or "ln_" in name else parameter.copy_(noise)
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


def as_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model in another dtype."""
    return copy.deepcopy(model).to(dtype)
