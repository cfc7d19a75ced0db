"""Whether the attention that a model runs its rows with, by itself, computes what its configuration says.

A tree follows the configuration. Some releases of transformers let a model with a soft-cap on its attention scores run
by torch's fused attention (`sdpa`), which has no soft-cap and leaves it out without a word: the rows by themselves are
then another computation than the tree, and than the model that was trained.
"""

import inspect
from typing import TYPE_CHECKING, Any

from treetrain.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

_KEYWORD = "softcap"
"""By which transformers' layers hand the cap to the function of attention."""


def drops_softcap(model: Any) -> bool:
    """Whether the model's own attention leaves out the soft-cap that its configuration asks for."""
    config = _text_config(model)
    if not getattr(config, "attn_logit_softcapping", None):
        return False
    from transformers import AttentionInterface

    # Under "eager" there is no function here: a family's own file has it.
    function = AttentionInterface().get(config._attn_implementation)
    return function is not None and _KEYWORD not in inspect.signature(function).parameters


def check_own_attention(lm: "nn.Module") -> None:
    """Raise UnsupportedModel where rows by themselves would run without the soft-cap."""
    if not drops_softcap(lm):
        return
    config = _text_config(lm)
    raise UnsupportedModel(
        f"{type(lm).__name__} asks for attn_logit_softcapping={config.attn_logit_softcapping}, but its own attention "
        f"({config._attn_implementation}) has no soft-cap, so its rows by themselves are another computation than its "
        'configuration says: call model.set_attn_implementation("eager"), or load it with attn_implementation="eager".'
    )


def with_softcap(model: Any) -> Any:
    """The model, on the family's own attention where that of transformers' choice would leave out the soft-cap."""
    if drops_softcap(model):
        model.set_attn_implementation("eager")
    return model


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
