"""Rotary embeddings whose frequencies follow the length of the call: exact where no row makes them change."""

from typing import Any

from torch import nn

from treetrain.errors import UnsupportedModel

_STATIC = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary scalings whose frequencies do not depend on the length of the call."""
_LONGEST = "max_seq_len_cached"
"""Where rotary embeddings keep how long a call their frequencies were made for."""


def check_rotary(model: nn.Module, config: Any) -> int | None:
    """The longest row up to which the frequencies stay the same; None where they always do.

    A tree is run in one call or in several, whose lengths are not those of its rows. So scalings that look at the
    length are exact as long as every row is on the near side of the border.

    Raises:
        UnsupportedModel: naming a scaling that is not known, or frequencies that an earlier call has stretched.
    """
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [v for v in scaling.values() if isinstance(v, dict)]
    borders = [border for entry in nested or [scaling] if (border := _border(entry, config)) is not None]
    for name, module in model.named_modules():
        original = getattr(module, "original_max_seq_len", None)
        # Kinds of layers may have frequencies of their own, each under its name.
        cached = max((int(value) for field, value in vars(module).items() if field.endswith(_LONGEST)), default=0)
        if borders and isinstance(original, int) and cached > original:
            raise UnsupportedModel(
                f"{name}: an earlier call of {cached} tokens has stretched its rotary frequencies beyond "
                f"{original} positions; run a row of less than that through the model (which sets them back in newer "
                "releases of transformers), or load it anew."
            )
    return min(borders, default=None)


def _border(entry: dict[str, Any], config: Any) -> int | None:
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind in _STATIC:
        return None
    if kind == "dynamic":
        return config.max_position_embeddings
    if kind == "longrope":
        original = entry.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    raise UnsupportedModel(
        f"rotary scaling {kind!r}: its frequencies may depend on the length of the call, which differs between a tree "
        f"and its rows. Supported: {', '.join(sorted(_STATIC))}; dynamic and longrope for rows that do not reach the "
        "length at which their frequencies change."
    )
