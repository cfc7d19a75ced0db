"""Checks that a model is exact on a tree before it runs, and refuses it with a reason otherwise.

The checks look at layers (their kind, window and rotary scaling), not at the name of the model. Static checks cannot
see everything, such as a layer that mixes tokens without the attention interface, or a forward that rescales the logits
after the head. The first call catches these before any gradient exists: see ``core/engine/model_passes.py``.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from transformers import PreTrainedConfig, PreTrainedModel

from treetrain.core.errors import UnsupportedModel

# ---- heads


# Configuration fields by their effect on the logits. The first call checks that the model behaves accordingly.
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_MIXING = (_BatchNorm, _InstanceNorm, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)
"""Modules whose output for one input row may depend on the other rows of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitMap:
    """Multiplies logits by a factor, divides them by a divisor, then maps z to cap * tanh(z / cap)."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "LogitMap":
        """Read the map from a configuration. Raises UnsupportedModel for two caps."""
        factors, divisors, caps = (
            [value for field in fields if (value := getattr(config, field, None)) is not None]
            for fields in (_FACTORS, _DIVISORS, _CAPS)
        )
        if not factors + divisors + caps:
            return IDENTITY
        if len(caps) > 1:
            raise UnsupportedModel(f"the logits are soft-capped twice ({caps}): in which order is not known here.")
        return cls(factor=math.prod(factors), divisor=math.prod(divisors), cap=caps[0] if caps else None)

    def __call__(self, logits: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        """Apply the map, differentiably, in the order of operations that models use."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def apply_(self, logits: Float[Tensor, "*rows"], *, want_slope: bool) -> Float[Tensor, "*rows"] | None:
        """Apply the map in place. With a cap and `want_slope`, returns its derivative at the given logits."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.cap is None:
            return None
        logits.div_(self.cap).tanh_()
        slope = (1 - logits.square()).mul_(self.factor / self.divisor) if want_slope else None
        logits.mul_(self.cap)
        return slope

    def pull_back_(self, grad: Float[Tensor, "*rows"], slope: Float[Tensor, "*rows"] | None) -> Float[Tensor, "*rows"]:
        """Turn the gradient of the mapped logits into the gradient of the given logits, in place."""
        if slope is not None:
            return grad.mul_(slope)
        scale = self.factor / self.divisor
        return grad if scale == 1.0 else grad.mul_(scale)

    def __str__(self) -> str:
        words = [
            f"times {self.factor}" if self.factor != 1.0 else "",
            f"over {self.divisor}" if self.divisor != 1.0 else "",
            f"soft-capped at {self.cap}" if self.cap is not None else "",
        ]
        return ", ".join(word for word in words if word) or "as they are"


IDENTITY = LogitMap()
"""The map of a model whose configuration has none of these fields: it must return its logits unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarHead:
    """A head that maps each of n hidden states of size D to one value, or to c values."""

    module: nn.Module
    is_models_own: bool
    """Whether it is the model's own head, in place of a language-model head; otherwise it is the user's."""
    labels: int | None
    """c; None for a user's head, whose c is known after its first call."""
    pooled: bool = False
    """Whether the model keeps only the value of each row's last token."""
    pad_token: int | None = None
    """The padding id that a pooled model skips to find the last token of a row."""

    def values(self, forward: Callable[[Tensor], object], rows: Float[Tensor, "n D"]) -> Float[Tensor, " n *c"]:
        """The values, in float32 or wider.

        Args:
            forward: the forward of the module.

        Raises:
            UnsupportedModel: the head does not return one value, or c values, per row.
        """
        given = rows
        if not self.is_models_own and not torch.is_autocast_enabled(rows.device.type):
            # A float32 head on a bf16 model is common.
            first = next(self.module.parameters(), None)
            given = rows if first is None or not first.dtype.is_floating_point else rows.to(first.dtype)
        found = forward(given)
        if not isinstance(found, Tensor) or found.dim() not in (1, 2) or len(found) != len(rows):
            shape = tuple(found.shape) if isinstance(found, Tensor) else f"of type {type(found).__name__}"
            raise UnsupportedModel(
                f"the value head {type(self.module).__name__} gives {shape} for hidden states {tuple(rows.shape)}; "
                f"it must give [{len(rows)}] or [{len(rows)}, c], one value (or c) for each."
            )
        wide = torch.promote_types(rows.dtype, torch.float32)
        return (found.squeeze(1) if found.dim() == 2 and found.shape[1] == 1 else found).to(wide)


def models_own_head(lm: nn.Module, text_config: PreTrainedConfig) -> ScalarHead:
    """The head of a Hugging Face model for token or sequence classification.

    Raises:
        UnsupportedModel: there is no head under a known name, or it is not a plain linear layer.
    """
    name = type(lm).__name__
    found = [getattr(lm, attribute, None) for attribute in ("score", "classifier")]
    heads = [head for head in found if isinstance(head, nn.Module)]
    if len(heads) != 1:
        raise UnsupportedModel(
            f"{name} has no output embeddings and {len(heads)} heads called score or classifier; an unknown head "
            "cannot be scored. Pass a causal LM, or a model for token or sequence classification."
        )
    linear = inner_linear(heads[0])
    if linear is None:
        raise UnsupportedModel(
            f"the head of {name} is a {type(heads[0]).__name__}; known are nn.Linear and peft layers around one. Pass "
            "the causal LM, and this head as the value head."
        )
    pooled = any("ForSequenceClassification" in kind.__name__ for kind in type(lm).__mro__)
    return ScalarHead(
        module=heads[0],
        is_models_own=True,
        labels=linear.out_features,
        pooled=pooled,
        pad_token=getattr(text_config, "pad_token_id", None) if pooled else None,
    )


def users_head(head: nn.Module) -> ScalarHead:
    """Wrap a user's head, whose modules must treat every hidden state independently.

    Raises:
        UnsupportedModel: it is not a module, or has modules that mix rows.
    """
    if not isinstance(head, nn.Module):
        raise UnsupportedModel(f"the value head is a {type(head).__name__}; give an nn.Module, [n, hidden] -> [n]")
    for name, module in head.named_modules():
        if isinstance(module, _MIXING):
            raise UnsupportedModel(
                f"the value head has a {type(module).__name__}{f' ({name})' if name else ''}, which mixes the hidden "
                "states of a call: on a tree these are other ones than in a row. Every value must come from one state."
            )
    return ScalarHead(module=head, is_models_own=False, labels=None)


def vocabulary_of(lm: nn.Module, config: PreTrainedConfig) -> int:
    """Tokens that the model can embed: the configuration may name more."""
    embedded = getattr(lm.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    return min(config.vocab_size, embedded or config.vocab_size)


def is_plain_linear(head: nn.Module) -> bool:
    """Whether a head is exactly an ``nn.Linear``, or the class that FSDP2 makes of an ``nn.Linear`` that it shards."""
    kind = type(head)
    return kind is nn.Linear or (kind.__name__ == "FSDPLinear" and kind.__bases__[-1] is nn.Linear)


def inner_linear(head: nn.Module) -> nn.Linear | None:
    """The ``nn.Linear`` of a head, unwrapped from a peft layer; None for any other head."""
    if is_plain_linear(head):
        return head  # type: ignore[return-value]
    inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
    return inner if isinstance(inner, nn.Linear) else None


# ---- the model


LAYER_KINDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"), 1),
    "hybrid": 2,  # attention and a recurrence
    **dict.fromkeys(("moe", "mlp"), 0),
}
"""Layer types that a configuration may name, and how often each mixes tokens; recurrent layers are also checked module
by module."""
STATIC_SCALINGS = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary scalings whose frequencies do not depend on the length of the call."""
_NOISES = {
    "neftune_noise_alpha": "NEFTune",
    "pvera_lambda_d": "PVeRA",
    "lora_monteclora_sampler": "MonteCLoRA",
}
"""Fields of modules that draw random numbers in training mode, which generator states do not always reveal."""


class SpecialLayers:
    """Layers that a dense model lacks. Rooms outside the core have subclasses."""

    auxiliary: float = 0.0
    """The coefficient of a loss that they add, over all tokens of a step; 0 if they add none."""
    loss_name: str = ""
    """The loss in words, with the settings that ask for it."""

    @property
    def heads(self) -> dict[int, str]:
        """The units by which ranks can divide such a layer: their name, by how many of them it has."""
        return {}


Finder = Callable[[nn.Module, PreTrainedConfig], SpecialLayers | None]
"""Finds special layers in a model, plain or wrapped, with this text configuration; None if it has none. Raises
UnsupportedModel for what would not be exact on a tree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The properties of a supported model that the engine needs."""

    layers: int
    """How often every forward must mix tokens by tree attention or recurrence: mostly once in each layer."""
    vocab_size: int
    max_positions: int | None
    head: nn.Module
    """The module that makes the logits, or the values of a model without a language-model head."""
    head_is_linear: bool
    """Whether the head is a plain ``nn.Linear``, which the fused path scores; other heads are called in chunks."""
    logit_map: LogitMap = IDENTITY
    """The map that the model applies to its logits after the head."""
    rotary_positions: int | None = None
    """Longest row whose rotary frequencies do not depend on the length of the call; None for any length."""
    special: tuple[SpecialLayers, ...] = ()
    """The layers that a dense model lacks."""
    scores_tokens: bool = True
    """Whether the head makes log-probabilities and the call wants them."""
    scalar: ScalarHead | None = None
    """The head that makes values; None if there is none or the call does not want values."""

    @property
    def auxiliary(self) -> float:
        """The coefficient of a loss that the model adds, over all tokens of a step; 0 if there is none."""
        return sum(layers.auxiliary for layers in self.special)

    def asked(self, *, logprobs: bool, values: bool) -> "Capabilities":
        """The capabilities for a call that wants log-probabilities, values or both.

        Raises:
            UnsupportedModel: the model has no head for one of them.
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


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM inside ``model``: itself, or what peft wraps."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model  # type: ignore[return-value]


def model_device(model: nn.Module) -> torch.device:
    """The device that the model takes its input on."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = next(embeddings.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())  # offloaded


def is_checkpointed(model: nn.Module) -> bool:
    """Whether a step runs every layer's forward again in its backward."""
    lm = causal_lm(model)
    # transformers 5 renamed the flag, and warns when the old name is read.
    name = "is_activation_checkpointing" if hasattr(lm, "is_activation_checkpointing") else "is_gradient_checkpointing"
    return model.training and bool(getattr(lm, name, False))


def check_model(
    model: nn.Module,
    *,
    critics: bool = False,
    value_head: nn.Module | None = None,
    finders: Sequence[Finder] = (),
) -> Capabilities:
    """Refuse a model that would not be exact on a tree; describe one that is.

    Args:
        critics: accept models for token or sequence classification, whose head returns values.
        value_head: a user's head, applied to the hidden states that a causal LM passes to its head.
        finders: find the layers that a dense model lacks. Without them such layers pass unseen here, and the model's
            first pass finds that they did not go through tree attention.

    Raises:
        UnsupportedModel: the message names the layer or setting, its value, and the accepted ones.
    """
    lm = causal_lm(model)
    config = getattr(lm, "config", None)
    if config is None or not hasattr(lm, "get_output_embeddings"):
        raise UnsupportedModel(
            f"{type(lm).__name__} is not a Hugging Face model with a language-model head (no config or no "
            "get_output_embeddings); pass an AutoModelForCausalLM."
        )
    text = text_config_of(config)
    _check_class(lm, text)
    special = [layers for find in finders if (layers := find(model, text)) is not None]
    kinds = getattr(text, "layer_types", None) or []
    for number, kind in enumerate(kinds):
        if kind not in LAYER_KINDS:
            raise UnsupportedModel(
                f"layer {number} is of kind {kind!r}; exact on a tree are only {', '.join(LAYER_KINDS)}."
            )
    _check_noise(model)
    rotary_positions = _check_rotary(lm, text)
    scalar = None if value_head is None else users_head(value_head)
    embeddings = lm.get_output_embeddings()
    if embeddings is not None or not critics:
        if embeddings is None or inner_linear(embeddings) is None:
            found = "missing" if embeddings is None else f"a {type(embeddings).__name__}"
            raise UnsupportedModel(
                f"the head of {type(lm).__name__} is {found}; known heads are nn.Linear and peft layers around one."
            )
        head, logit_map = embeddings, LogitMap.from_config(text)
    elif scalar is None:
        scalar = models_own_head(lm, text)
        head, logit_map = scalar.module, IDENTITY
    else:
        raise UnsupportedModel(
            f"{type(lm).__name__} has a value head of its own and was given another; give one of both: this model "
            "alone, or a causal LM with the head."
        )
    if value_head is not None:
        _check_noise(value_head)
    # Layers may have different numbers of heads; transformers then raises for `num_attention_heads`.
    if not getattr(text, "is_heterogeneous", False) and not getattr(text, "num_attention_heads", None):
        raise UnsupportedModel(f"{type(lm).__name__} has no attention heads; only attention layers are supported.")
    return Capabilities(
        layers=text.num_hidden_layers + sum(LAYER_KINDS[kind] - 1 for kind in kinds),
        vocab_size=vocabulary_of(lm, text),
        max_positions=getattr(text, "max_position_embeddings", None),
        head=head,
        head_is_linear=is_plain_linear(head),
        logit_map=logit_map,
        rotary_positions=rotary_positions,
        special=tuple(special),
        scores_tokens=head is embeddings,
        scalar=scalar,
    )


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_class(lm: nn.Module, config: PreTrainedConfig) -> None:
    name = type(lm).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only causal LMs are supported.")
    can_switch = getattr(lm, "_can_set_attn_implementation", None)
    if can_switch is None or not can_switch():
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface, so its attention cannot be switched."
        )
    forwards = [vars(kind)["forward"] for kind in type(lm).__mro__ if "forward" in vars(kind)]
    taken = {parameter for forward in forwards for parameter in inspect.signature(forward).parameters}
    if "position_ids" not in taken:
        # Such a model (decoders of the BART family) counts positions itself, through all branches without a reset.
        raise UnsupportedModel(f"{name} takes no position_ids, so a branch cannot start at its own position.")
    for module_name, module in lm.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModel(
                f"{module_name} ({type(module).__name__}) numbers the positions of a row by itself, from its padding "
                "id on and leaving padding out (create_position_ids_from_input_ids); a tree numbers them from 0, so "
                "every token would be at another place than in its row."
            )


def _check_noise(model: nn.Module) -> None:
    """Refuse dropout and noise: a shared token would get one draw for all its rows."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        # Many layers keep their rates as plain numbers (dropout, layerdrop, ...), adapters as a dict by adapter.
        rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
        for field, found in rates.items():
            for rate in found.values() if isinstance(found, dict) else (found,):
                if isinstance(rate, float) and rate > 0 and (field == "p" or "drop" in field):
                    raise UnsupportedModel(
                        f"{name} ({type(module).__name__}) has dropout {rate} in training mode ({field}): a shared "
                        "token would get one mask where every row has its own. Set it to 0 (in the model's "
                        "configuration, or LoraConfig(lora_dropout=0.0)), or call model.eval()."
                    )
        for field, what in _NOISES.items():
            if getattr(module, field, None):
                raise UnsupportedModel(
                    f"{name} ({type(module).__name__}) adds noise in training mode ({what}): a shared token would get "
                    "one noise where every row has its own. Switch it off or call model.eval()."
                )


def _check_rotary(model: nn.Module, config: PreTrainedConfig) -> int | None:
    """The longest row for which rotary frequencies do not depend on the length; None for any length.

    A tree runs in one or several calls, whose lengths are not the lengths of its rows. So scalings that depend on the
    length are exact only if every row is within this limit.

    Raises:
        UnsupportedModel: the scaling is not known, or an earlier call has stretched the frequencies.
    """
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [entry for entry in scaling.values() if isinstance(entry, dict)] or [scaling]
    borders = [border for entry in entries if (border := _rotary_border(entry, config)) is not None]
    for name, module in model.named_modules() if borders else ():
        original = getattr(module, "original_max_seq_len", None)
        # Each layer type may have its own frequencies, under its name.
        stretched = [int(value) for field, value in vars(module).items() if field.endswith("max_seq_len_cached")]
        if isinstance(original, int) and max(stretched, default=0) > original:
            raise UnsupportedModel(
                f"{name}: an earlier call of {max(stretched)} tokens has stretched its rotary frequencies beyond "
                f"{original} positions; run a row of less than that through the model (which sets them back in newer "
                "releases of transformers), or load it anew."
            )
    return min(borders, default=None)


def _rotary_border(entry: dict[str, Any], config: PreTrainedConfig) -> int | None:
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind in STATIC_SCALINGS:
        return None
    if kind == "dynamic":
        return config.max_position_embeddings
    if kind == "longrope":
        original = entry.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    raise UnsupportedModel(
        f"rotary scaling {kind!r}: its frequencies may depend on the length of the call, which differs between a tree "
        f"and its rows. Supported: {', '.join(sorted(STATIC_SCALINGS))}; dynamic and longrope for rows that do not "
        "reach the length at which their frequencies change."
    )
