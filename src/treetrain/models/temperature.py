"""Queries that a layer scales by their position (the temperature tuning of Llama 4's layers without rotary embedding).

The layer counts positions over the call, which in a packed tree are not those of the rows. So its own scaling is
switched off for the call, and done here by each token's place on its path.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SWITCH = "attn_temperature_tuning"


def _scales_itself(module: nn.Module) -> bool:
    fields = ("use_rope", "floor_scale", "attn_scale")
    return hasattr(module, _SWITCH) and all(hasattr(module, field) for field in fields) and not module.use_rope


@contextmanager
def without_own_scales(model: nn.Module) -> Iterator[None]:
    """Switch the layers' own scaling off for the length of the block."""
    before = [(module, getattr(module, _SWITCH)) for module in model.modules() if _scales_itself(module)]
    try:
        for module, _ in before:
            setattr(module, _SWITCH, False)
        yield
    finally:
        for module, value in before:
            setattr(module, _SWITCH, value)


def position_scales(module: nn.Module, query: Tensor, positions: Tensor | None) -> Tensor:
    """Scale queries [1, H, N, D] as the layer would in a row by itself; only where it would."""
    if not _scales_itself(module) or not getattr(getattr(module, "config", None), _SWITCH, False):
        return query
    assert positions is not None
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)  # type: ignore[operator]
    scales = torch.log1p(steps) * module.attn_scale + 1.0  # type: ignore[operator]
    return (query * scales[:, None]).to(query.dtype)
