"""Tree attention with `cudnn.flex_attention` (nvidia-cudnn-frontend 1.32, experimental), where it is named.

Its masks are intervals of visible keys for every query. In pre-order, the ancestors of a token are one interval for
each chain of first children on its path: one more than the forks at which the path leaves the first child. The plan of
a mask is made once for a forest and a kind of layer.

It has not run on a GPU here. What is known is its interface, from the sources of version 1.32: shapes, dtypes, and that
intervals ascend and do not overlap. So it runs only if TREETRAIN_ATTENTION (or ``backend=``) names it, and after the
same check as every backend. It needs 16 bits and Hopper or Blackwell.

Shape letters: N tokens, F endpoints, H query heads, G key/value heads, D size of query and key heads, V size of value
heads.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from treetrain.core.attention.schedule import Forest, path_tops
from treetrain.core.device_arrays import on_device
from treetrain.kernels.flex import FlexTreeAttention


def intervals(forest: Forest) -> Int32[np.ndarray, "F N"]:
    """The endpoints of every query's visible keys: [0, F0), [F1, F2), [F3, F4) ...

    The first interval is empty. A token's last one ends with itself; those after it are empty and stand there.
    """
    start = forest.segment_start
    parent = forest.segment_parent
    count = len(forest.ends)
    top = path_tops(parent)
    tops, chain = np.unique(top, return_inverse=True)
    depth = np.zeros(len(tops), np.int64)  # forks above a chain at which its path leaves the first child
    above: list[list[int]] = []
    for number, segment in enumerate(tops.tolist()):  # parents come before children
        fork = int(parent[segment])
        if fork < 0:
            above.append([])
            continue
        upper = int(chain[fork])
        above.append([*above[upper], int(start[tops[upper]]), int(start[fork + 1])])
        depth[number] = depth[upper] + 1
    of_token = np.repeat(chain, np.diff(start))
    own = np.arange(1, count + 1)
    found = np.zeros((1 + 2 * (int(depth.max(initial=0)) + 1), count), np.int32)
    found[1:] = own
    table = np.zeros((len(tops), len(found) - 1), np.int64)
    for number, endpoints in enumerate(above):
        table[number, : len(endpoints)] = endpoints
    for place in range(len(found) - 1):
        found[1 + place] = np.where(place < 2 * depth[of_token], table[of_token, place], found[1 + place])
    begins = 1 + 2 * depth[of_token]
    found[begins, np.arange(count)] = start[tops[of_token]]
    return found


class CudnnTreeAttention(FlexTreeAttention):
    """Tree attention for one forest without a path above it; see `FlexTreeAttention`."""

    name = "cudnn"

    def __init__(self, forest: Forest, device: torch.device, **options: Any):
        super().__init__(forest, device, **options)
        self._endpoints = on_device(intervals(forest), device)[None]
        self._plans: dict[object, Any] = {}

    def _attention(
        self, query: Float[Tensor, "N H D"], key: Float[Tensor, "N G D"], value: Float[Tensor, "N G V"], scale: float
    ) -> Float[Tensor, "N H V"]:
        from cudnn.flex_attention import (  # pyright: ignore[reportMissingImports]
            create_mask_plan,
            flex_attn_func,
        )

        q, k, v = (x.contiguous().unsqueeze(0) for x in (query, key, value))
        backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        kind = backward, q.dtype, q.shape, k.shape, v.shape
        if kind not in self._plans:
            self._plans[kind] = create_mask_plan(self._endpoints, q, k, v, build_backward=backward)
        return flex_attn_func(q, k, v, mask_plan=self._plans[kind], softmax_scale=scale)[0]
