"""What a model is made of, read before any work: exact on a tree, or refused by name.

The checks ask what a layer *is* (its kind, its window, its rotary scaling), never what the model is called. What no
static check can see (a layer that mixes tokens without the attention interface, a forward that rescales the logits
after the head) is caught at the first call, before any gradient exists: see ``engine/packed.py``.
"""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from treetrain.errors import UnsupportedModel
from treetrain.models.logit_map import IDENTITY, LogitMap
from treetrain.models.moe import MixtureOfExperts, check_experts
from treetrain.models.own_attention import check_own_attention
from treetrain.models.recurrence import check_recurrence
from treetrain.models.rotary import check_rotary
from treetrain.models.scalar_head import ScalarHead, inner_linear, is_plain_linear, models_own_head, users_head

LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv")
"""Kinds that a configuration may name; recurrent layers are also checked module by module."""
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Configuration fields by what families do with them to their logits; the first call checks that this one does so."""
_NOISES = {
    "neftune_noise_alpha": "NEFTune",
    "pvera_lambda_d": "PVeRA",
    "lora_monteclora_sampler": "MonteCLoRA",
}
"""Fields of modules that draw random numbers in training mode, by generators that not every call is seen to move."""
_UNKNOWN_SCALES = ("logits_scale", "mup_width_multiplier")


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
    """The module that makes logits, or the values of a model without a language-model head."""
    head_is_linear: bool
    """A plain ``nn.Linear``: scored by the fused path; otherwise its own forward is called chunk by chunk."""
    logit_map: LogitMap = IDENTITY
    """What the model does to its logits after the head."""
    rotary_positions: int | None = None
    """Rows may be no longer, or rotary frequencies would follow the length of the call; None where they never do."""
    experts: MixtureOfExperts | None = None
    """Where tokens are routed to experts; None in a model without."""
    recurrent_layers: int = 0
    """Layers that mix tokens by a recurrence instead of attention."""
    scores_tokens: bool = True
    """Whether the head makes log-probabilities (and is wanted to)."""
    scalar: ScalarHead | None = None
    """What gives hidden states values; None where nothing does, or nobody asks."""

    @property
    def auxiliary(self) -> float:
        """The coefficient of the routers' auxiliary loss, of all tokens of a step; 0 without."""
        return 0.0 if self.experts is None else self.experts.auxiliary

    def asked(self, *, logprobs: bool, values: bool) -> "Capabilities":
        """The same for a call that wants these.

        Raises:
            UnsupportedModel: what is asked for, the model has no head for.
        """
        if logprobs and not self.scores_tokens:
            raise UnsupportedModel(
                f"log-probabilities are asked for, but the model's head ({type(self.head).__name__}) gives values and "
                "no logits; a critic has tt.values, and losses that need values alone (tt.losses.value(); one of your "
                "own needs predicted values alone). For both in one pass give a causal LM and a value head."
            )
        if values and self.scalar is None:
            raise UnsupportedModel(
                "values are asked for, but the model has a language-model head only; pass the head that makes them "
                "(value_head=... of TreeEngine and tt.logprobs, head=... of tt.values), or a model for token "
                "classification."
            )
        return replace(self, scores_tokens=logprobs, scalar=self.scalar if values else None)


def causal_lm(model: nn.Module) -> nn.Module:
    """The Hugging Face causal LM inside ``model``: itself, or what peft wraps."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model  # type: ignore[return-value]


def check_model(model: nn.Module, *, critics: bool = False, value_head: nn.Module | None = None) -> Capabilities:
    """Refuse what would not be exact.

    Args:
        critics: accept models for the classification of tokens or sequences, whose head gives values.
        value_head: of the user's own, on the hidden states that a causal LM hands to its head.

    Raises:
        UnsupportedModel: naming the layer or setting, its value, and what would be accepted.
    """
    _check_compiled(model)
    lm = causal_lm(model)
    config = getattr(lm, "config", None)
    if config is None or not hasattr(lm, "get_output_embeddings"):
        raise UnsupportedModel(
            f"{type(lm).__name__} is not a Hugging Face model with a language-model head (no config or no "
            "get_output_embeddings); pass an AutoModelForCausalLM."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _check_kind(lm, text)
    check_own_attention(lm)
    recurrent_layers = check_recurrence(lm, text)
    _check_layers(text)
    _check_modules(model)
    rotary_positions = check_rotary(lm, text)
    _check_adapter(model)
    scalar = None if value_head is None else users_head(value_head)
    scores_tokens = not critics or lm.get_output_embeddings() is not None  # type: ignore[operator]
    if scores_tokens:
        head, head_is_linear = _check_head(lm)
    elif scalar is None:
        scalar = models_own_head(lm, text)
        head, head_is_linear = scalar.module, is_plain_linear(scalar.module)
    else:
        raise UnsupportedModel(
            f"{type(lm).__name__} has a value head of its own and was given another; give one of both: this model "
            "alone, or a causal LM with the head."
        )
    if value_head is not None:
        _check_modules(value_head)
    # Layers may differ in the size of their heads; transformers then refuses to tell one size for all.
    widths = [_heads_times_size(lm, layer) for layer in _layer_configs(text)]
    return Capabilities(
        layers=text.num_hidden_layers,
        heads_times_size=max(widths),
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        head=head,
        head_is_linear=head_is_linear,
        logit_map=_logit_map(text) if scores_tokens else IDENTITY,
        rotary_positions=rotary_positions,
        experts=check_experts(lm, text),
        recurrent_layers=recurrent_layers,
        scores_tokens=scores_tokens,
        scalar=scalar,
    )


def _layer_configs(config: Any) -> list[Any]:
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _heads_times_size(lm: nn.Module, config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UnsupportedModel(f"{type(lm).__name__} has no attention heads; only attention layers are supported.")
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


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
    for module_name, module in lm.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModel(
                f"{module_name} ({type(module).__name__}) numbers the positions of a row by itself, from its padding "
                "id on and leaving padding out (create_position_ids_from_input_ids); a tree numbers them from 0, so "
                "every token would be at another place than in its row."
            )
    if any("shared_kv_states" in inspect.signature(forward).parameters for forward in forwards):
        raise UnsupportedModel(
            f"{name} drafts tokens for another model, from that model's keys and values (shared_kv_states): it has no "
            "rows of its own. Pass the model that it drafts for."
        )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} has is_causal=False; a tree needs causal attention.")


def _check_adapter(model: nn.Module) -> None:
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"{type(adapter).__name__}: prompt, prefix and p-tuning put tokens of their own before every row, which a "
            "tree has no place for; use LoRA or another adapter of weights."
        )
    if getattr(adapter, "alora_invocation_tokens", None):
        raise UnsupportedModel(
            f"alora_invocation_tokens={list(adapter.alora_invocation_tokens)}: an activated LoRA begins at the last "  # type: ignore[union-attr]
            "such tokens of a call, which on a tree are those of another row; use LoRA without them."
        )


def _check_layers(config: Any) -> None:
    for number, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in LAYER_KINDS:
            raise UnsupportedModel(
                f"layer {number} is of kind {kind!r}; exact on a tree are only {', '.join(LAYER_KINDS)}."
            )
    if getattr(config, "alibi", None):
        raise UnsupportedModel(f"alibi={config.alibi}: biases of attention by distance are not supported.")


def _check_compiled(model: nn.Module) -> None:
    """Refuse compiled modules that hold attention: a traced graph keeps the mask that it was traced with."""
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule"
        compiled = wrapped or getattr(module, "_compiled_call_impl", None) is not None
        # Attention and recurrent layers of transformers know the number of their layer; norms and MLPs do not.
        if compiled and any(hasattr(inner, "layer_idx") for inner in module.modules()):
            what = f"{name} is" if name else "the model is"
            how = "an OptimizedModule (torch.compile)" if wrapped else f"a {type(module).__name__} after .compile()"
            plain = "the model without it" if name or not wrapped else "the model within, model._orig_mod"
            raise UnsupportedModel(
                f"{what} {how}; a graph that was traced once does not follow a tree. Pass {plain}; norms and MLPs may "
                "be compiled by themselves: layer.mlp.compile(dynamic=True)."
            )


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        _check_dropout(name, module)


def _check_dropout(name: str, module: nn.Module) -> None:
    if not module.training:
        return
    # Many layers keep their rates as plain numbers (dropout, layerdrop, ...), adapters as one for each adapter.
    rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
    for field, found in rates.items():
        for rate in found.values() if isinstance(found, dict) else (found,):
            if isinstance(rate, float) and rate > 0 and (field == "p" or "drop" in field):
                raise UnsupportedModel(
                    f"{name} ({type(module).__name__}) has dropout {rate} in training mode ({field}): a shared token "
                    "would get one mask where every row has its own. Set it to 0 or call model.eval()."
                )
    for field, what in _NOISES.items():
        if getattr(module, field, None):
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) adds noise in training mode ({what}): a shared token would get one "
                "noise where every row has its own. Switch it off or call model.eval()."
            )


def _logit_map(config: Any) -> LogitMap:
    """What the configuration says of the logits."""

    for field in _UNKNOWN_SCALES:
        if getattr(config, field, None) not in (None, 1.0):
            raise UnsupportedModel(f"{field}={getattr(config, field)}: how it changes the logits is not known here.")
    factors, divisors, caps = (
        [value for field in fields if (value := getattr(config, field, None)) is not None]
        for fields in (_FACTORS, _DIVISORS, _CAPS)
    )
    if not factors + divisors + caps:
        return IDENTITY
    if len(caps) > 1:
        raise UnsupportedModel(f"the logits are soft-capped twice ({caps}): in which order is not known here.")
    return LogitMap(factor=math.prod(factors), divisor=math.prod(divisors), cap=caps[0] if caps else None)


def _check_head(lm: nn.Module) -> tuple[nn.Module, bool]:
    head = lm.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise UnsupportedModel(f"{type(lm).__name__} has no output embeddings; an unknown head cannot be scored.")
    if inner_linear(head) is not None:
        return head, is_plain_linear(head)
    raise UnsupportedModel(
        f"the head is a {type(head).__name__}; known heads are nn.Linear and peft layers around one."
    )
