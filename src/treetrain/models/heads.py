"""The heads of a model: the map from a language-model head to its final logits, and heads that return values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from treetrain.errors import UnsupportedModel

# Configuration fields by their effect on the logits. The first call checks that the model behaves accordingly.
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_UNKNOWN_SCALES = ("logits_scale", "mup_width_multiplier")
_MIXING = (_BatchNorm, _InstanceNorm, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)
"""Modules whose output for one input row may depend on the other rows of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitMap:
    """Multiplies logits by a factor, divides them by a divisor, then maps z to cap * tanh(z / cap)."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> "LogitMap":
        """Read the map from a configuration. Raises UnsupportedModel for unknown scales."""
        for field in _UNKNOWN_SCALES:
            if getattr(config, field, None) not in (None, 1.0):
                raise UnsupportedModel(
                    f"{field}={getattr(config, field)}: how it changes the logits is not known here."
                )
        factors, divisors, caps = (
            [value for field in fields if (value := getattr(config, field, None)) is not None]
            for fields in (_FACTORS, _DIVISORS, _CAPS)
        )
        if not factors + divisors + caps:
            return IDENTITY
        if len(caps) > 1:
            raise UnsupportedModel(f"the logits are soft-capped twice ({caps}): in which order is not known here.")
        return cls(factor=math.prod(factors), divisor=math.prod(divisors), cap=caps[0] if caps else None)

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply the map, differentiably, in the order of operations that models use."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def apply_(self, logits: Tensor, *, want_slope: bool) -> Tensor | None:
        """Apply the map in place. With a cap and `want_slope`, returns the derivative by the given logits."""
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

    def pull_back_(self, grad: Tensor, slope: Tensor | None) -> Tensor:
        """Turn the gradient of the mapped logits into that of the given logits, in place."""
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
    """A head that maps hidden states [n, D] to values [n] or [n, c], each state independently."""

    module: nn.Module
    is_models_own: bool
    """Whether it is the model's own head, in place of a language-model head; otherwise it is the user's."""
    labels: int | None
    """c; None for a user's head, whose c is known after its first call."""
    pooled: bool = False
    """Whether the model keeps only the value of each row's last token."""
    pad_token: int | None = None
    """The padding id that such a model skips to find the last token of a row."""

    def values(self, forward: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
        """The values [n] or [n, c] of rows [n, D], in float32 or wider.

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


def models_own_head(lm: nn.Module, text_config: Any) -> ScalarHead:
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


def is_plain_linear(head: nn.Module) -> bool:
    """Whether a head is exactly an ``nn.Linear``, or the class that FSDP2 makes from one that it shards on its own."""
    kind = type(head)
    return kind is nn.Linear or (kind.__name__ == "FSDPLinear" and kind.__bases__[-1] is nn.Linear)


def inner_linear(head: nn.Module) -> nn.Linear | None:
    """The ``nn.Linear`` of a head, unwrapped from a peft layer; None for any other head."""
    if is_plain_linear(head):
        return head  # type: ignore[return-value]
    inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
    return inner if isinstance(inner, nn.Linear) else None
