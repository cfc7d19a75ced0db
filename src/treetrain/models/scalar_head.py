"""Heads that give every hidden state a number (or several): critics, reward models, and heads of the user's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from treetrain.errors import UnsupportedModel

NAMES = ("score", "classifier")
"""What the classification models of transformers call their heads."""
_MIXING = (_BatchNorm, _InstanceNorm, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)
"""Modules whose result at one row depends on the other rows of a call (or may)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarHead:
    """A head that maps hidden states [n, D] to values [n] or [n, c], each by itself."""

    module: nn.Module
    is_models_own: bool
    """Whether the model calls it, in place of a language-model head; otherwise it is the user's."""
    labels: int | None
    """c; None for a head of the user's, which its first call tells."""
    pooled: bool = False
    """Whether the model keeps the value of each row's last token only."""
    pad_token: int | None = None
    """Ids at the end of a row that such a model does not take for its last token."""

    def values(self, forward: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
        """[n] or [n, c] values of rows [n, D], float32 or wider.

        Args:
            forward: what the module does when it is called.

        Raises:
            UnsupportedModel: something else than one value, or c, per row.
        """
        if not self.is_models_own and not torch.is_autocast_enabled(rows.device.type):
            # A float32 head on a bf16 model is common.
            first = next(self.module.parameters(), None)
            given = rows if first is None or not first.dtype.is_floating_point else rows.to(first.dtype)
        else:
            given = rows
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
    """The head of a Hugging Face model for the classification of tokens or sequences.

    Raises:
        UnsupportedModel: no head of a name that is known, or one that is more than a matrix.
    """
    name = type(lm).__name__
    heads = [getattr(lm, attribute) for attribute in NAMES if isinstance(getattr(lm, attribute, None), nn.Module)]
    if len(heads) != 1:
        raise UnsupportedModel(
            f"{name} has no output embeddings and {len(heads)} heads called {' or '.join(NAMES)}; an unknown head "
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
    """A head of the user's own, whose modules must treat every hidden state by itself.

    Raises:
        UnsupportedModel: it is no module, or has modules that mix rows.
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
    """A matrix and nothing more; FSDP2 makes a class of its own of one that is a shard by itself."""
    kind = type(head)
    return kind is nn.Linear or (kind.__name__ == "FSDPLinear" and kind.__bases__[-1] is nn.Linear)


def inner_linear(head: nn.Module) -> nn.Linear | None:
    """The matrix of a head, within what peft has put around it; None for anything else."""
    if is_plain_linear(head):
        return head  # type: ignore[return-value]
    inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
    return inner if isinstance(inner, nn.Linear) else None
