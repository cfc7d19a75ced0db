"""What a model is made of, read before any work: exact on a tree, or refused by name.

The checks ask what a layer *is* (its kind, its window, its rotary scaling), never what the model is called. What no
static check can see (a layer that mixes tokens without the attention interface, a forward that rescales the logits
after the head) is caught at the first call, before any gradient exists: see ``engine/packed.py``.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from treetrain.errors import UnsupportedModel
from treetrain.models.moe import MixtureOfExperts, check_experts

_STATIC_ROTARY = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary scalings whose frequencies do not depend on the length of the call."""
_TOKEN_MIXERS = ("mamba", "deltanet", "rwkv", "recurrent", "hyena", "retention", "linearattention", "shortconv")
_HEAD_SCALES = {  # configuration fields that change the logits after the head, and their neutral value
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "logits_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "mup_width_multiplier": 1.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What the engine needs to know of a supported model."""

    layers: int
    """Attention layers that must be seen in every forward."""
    heads_times_size: int
    """Query heads times head size: what one query-key pair costs."""
    vocab_size: int
    max_positions: int | None
    head: nn.Module
    """The module that makes logits."""
    head_is_linear: bool
    """A plain ``nn.Linear``: scored by the fused path; otherwise its own forward is called chunk by chunk."""
    experts: MixtureOfExperts | None = None
    """Where tokens are routed to experts; None in a model without."""


def causal_lm(model: nn.Module) -> nn.Module:
    """The Hugging Face causal LM inside ``model``: itself, or what peft wraps."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model  # type: ignore[return-value]


def check_model(model: nn.Module) -> Capabilities:
    """Refuse what would not be exact.

    Raises:
        UnsupportedModel: naming the layer or setting, its value, and what would be accepted.
    """
    lm = causal_lm(model)
    config = getattr(lm, "config", None)
    if config is None or not hasattr(lm, "get_output_embeddings"):
        raise UnsupportedModel(
            f"{type(lm).__name__} is not a Hugging Face model with a language-model head (no config or no "
            "get_output_embeddings); pass an AutoModelForCausalLM."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _check_kind(lm, text)
    _check_layers(text)
    _check_modules(model)
    _check_rotary(text)
    _check_adapter(model)
    head, head_is_linear = _check_head(lm, text)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise UnsupportedModel(f"{type(lm).__name__} has no attention heads; only attention layers are supported.")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Capabilities(
        layers=text.num_hidden_layers,
        heads_times_size=heads * head_dim,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        head=head,
        head_is_linear=head_is_linear,
        experts=check_experts(lm, text),
    )


def _check_kind(lm: nn.Module, config: Any) -> None:
    name = type(lm).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only causal LMs are supported.")
    can_switch = getattr(lm, "_can_set_attn_implementation", None)
    if can_switch is None or not can_switch():
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface, so its attention cannot be switched."
        )
    forwards = [vars(kind)["forward"] for kind in type(lm).__mro__ if "forward" in vars(kind)]
    if not any("position_ids" in inspect.signature(forward).parameters for forward in forwards):
        # Such a model counts positions by itself, through every branch (decoders of the BART family do).
        raise UnsupportedModel(f"{name} takes no position_ids, so a branch cannot start at its own position.")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} has is_causal=False; a tree needs causal attention.")


def _check_adapter(model: nn.Module) -> None:
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"{type(adapter).__name__}: prompt, prefix and p-tuning put tokens of their own before every row, which a "
            "tree has no place for; use LoRA or another adapter of weights."
        )


def _check_layers(config: Any) -> None:
    for number, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind != "full_attention":
            raise UnsupportedModel(
                f"layer {number} is of kind {kind!r}; only 'full_attention' layers are exact on a tree so far."
            )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and not hasattr(config, "layer_types"):
        raise UnsupportedModel(
            f"sliding_window={window}: attention windows are not supported yet (set it to None if rows are shorter)."
        )
    for field in ("attn_logit_softcapping", "attention_chunk_size", "alibi"):
        if getattr(config, field, None):
            raise UnsupportedModel(f"{field}={getattr(config, field)} is not supported yet.")


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.RNNBase | nn.Conv1d) or any(word in kind.lower() for word in _TOKEN_MIXERS):
            raise UnsupportedModel(
                f"{name} ({kind}) mixes tokens by recurrence or convolution; only attention is supported so far."
            )
        if getattr(module, "sinks", None) is not None:
            raise UnsupportedModel(f"{name} ({kind}) has attention sinks, which are not supported yet.")
        if isinstance(getattr(module, "sliding_window", None), int):
            raise UnsupportedModel(
                f"{name} ({kind}) has sliding_window={module.sliding_window}; windows are not supported yet."
            )
        _check_dropout(name, module)


def _check_dropout(name: str, module: nn.Module) -> None:
    if not module.training:
        return
    # Many layers keep their rates as plain numbers (dropout, residual_dropout, layerdrop, ...) for the functional form.
    rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
    for field, rate in rates.items():
        if isinstance(rate, float) and rate > 0 and (field == "p" or "drop" in field):
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) has dropout {rate} in training mode ({field}): a shared token "
                "would get one mask where every row has its own. Set it to 0 or call model.eval()."
            )


def _check_rotary(config: Any) -> None:
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [v for v in scaling.values() if isinstance(v, dict)]
    for entry in nested or [scaling]:
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind not in _STATIC_ROTARY:
            raise UnsupportedModel(
                f"rotary scaling {kind!r}: its frequencies may depend on the length of the call, which differs "
                f"between a tree and its rows. Supported: {', '.join(sorted(_STATIC_ROTARY))}."
            )


def _check_head(lm: nn.Module, config: Any) -> tuple[nn.Module, bool]:
    for field, neutral in _HEAD_SCALES.items():
        value = getattr(config, field, neutral)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{field}={value}: heads that rescale their logits are not supported yet.")
    head = lm.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise UnsupportedModel(f"{type(lm).__name__} has no output embeddings; an unknown head cannot be scored.")
    if type(head) is nn.Linear:
        return head, True
    inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
    if isinstance(inner, nn.Linear):
        return head, False
    raise UnsupportedModel(
        f"the head is a {type(head).__name__}; known heads are nn.Linear and peft layers around one."
    )
