"""The specification of recurrence on a tree: token by token, each from its parent's state. Slow and obvious.

Shape letters: N tokens, D channels, T taps; J heads of queries and keys, H heads of values, K and V sizes of keys and
values.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor


def reference_convolution(
    inputs: Float[Tensor, "N D"], weight: Float[Tensor, "D T"], parent: Int64[np.ndarray, " N"]
) -> Float[Tensor, "N D"]:
    """Causal depthwise convolution along paths; `parent` is -1 at roots."""
    rows = []
    for token in range(len(parent)):
        total, at = torch.zeros_like(inputs[0]), token
        for tap in range(weight.shape[1] - 1, -1, -1):
            if at >= 0:
                total = total + weight[:, tap] * inputs[at]
                at = int(parent[at])
        rows.append(total)
    return torch.stack(rows)


def reference_gated_delta(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    beta: Float[Tensor, "N H"],
    parent: Int64[np.ndarray, " N"],
    state: Float[Tensor, "H K V"],
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "N H K V"]]:
    """The output of the gated delta rule along paths, and the state after every token.

    Args:
        parent: -1 at roots.
        state: the state that the roots start from.
    """
    repeat = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeat, 1) for x in (query, key))
    query, key = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))

    def stored(token: int, decayed: Tensor) -> Tensor:
        held = torch.einsum("hk,hkv->hv", key[token], decayed)
        return torch.einsum("hk,hv->hkv", key[token], beta[token][:, None] * (value[token] - held))

    states = _states(decay, parent, state, stored)
    return torch.einsum("nhk,nhkv->nhv", query, states) / key.shape[-1] ** 0.5, states


def reference_state_space(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    parent: Int64[np.ndarray, " N"],
    state: Float[Tensor, "H K V"],
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "N H K V"]]:
    """The output of a state-space recurrence along paths, and the state after every token; arguments as above."""
    repeat = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeat, 1) for x in (query, key))
    states = _states(decay, parent, state, lambda token, _: torch.einsum("hk,hv->hkv", key[token], value[token]))
    return torch.einsum("nhk,nhkv->nhv", query, states), states


def _states(
    decay: Float[Tensor, "N H"],
    parent: Int64[np.ndarray, " N"],
    state: Float[Tensor, "H K V"],
    stored: Callable[[int, Tensor], Tensor],
) -> Float[Tensor, "N H K V"]:
    """The state after every token: its parent's, decayed, and what the token stores, given the decayed state."""
    states: list[Tensor] = []
    for token, before in enumerate(parent.tolist()):
        decayed = (state if before < 0 else states[before]) * decay[token].exp()[:, None, None]
        states.append(decayed + stored(token, decayed))
    return torch.stack(states)
