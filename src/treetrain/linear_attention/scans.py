"""The gated delta rule over a forest by a kernel that scans sequences: flash-linear-attention's.

Runs without a fork are the sequences, a level of them one call (see `segments.py`). A run starts from the state that
the call above has given for the run before it; gathering it is what adds up the branches' gradients at a fork.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n runs of t
tokens in a call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.linear_attention.segments import Call, Segments

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""`chunk_gated_delta_rule` of flash-linear-attention, or what has its signature: query and key [1, t, J, K], value
[1, t, H, V], g and beta [1, t, H]; by keyword initial_state [n, H, K, V], output_final_state, cu_seqlens and
cu_seqlens_cpu [n + 1], use_qk_l2norm_in_kernel -> out [1, t, H, V] in the dtype of value, and final states
[n, H, K, V] in that of the initial ones."""


class _Call(NamedTuple):
    """A call on the device."""

    tokens: int
    offsets: Tensor
    offsets_cpu: Tensor
    entry: Tensor


class Scans:
    """The calls of a forest on a device, for every layer of a run."""

    def __init__(self, segments: Segments, device: torch.device):
        self.segments = segments
        self.levels = [_on_device(call, device) for call in segments.levels]
        self.last = None if segments.last is None else _on_device(segments.last, device)
        self.order = on_device(segments.order, device)
        self.place = on_device(np.argsort(segments.order, kind="stable"), device)
        self.exported = on_device(segments.exported, device)


def _on_device(call: Call, device: torch.device) -> _Call:
    offsets = torch.from_numpy(call.offsets)
    return _Call(int(call.offsets[-1]), on_device(call.offsets, device), offsets, on_device(call.entry, device))


def scanned_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scans: Scans,
    state: Tensor | None,
    kernel: Kernel,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule along every path; arguments and results are those of `delta_rule.gated_delta`.

    Args:
        kernel: rounds to the dtype of `query` between its products; states are in at least float32.
    """
    with torch.autocast(query.device.type, enabled=False):
        packed = [x.index_select(0, scans.order) for x in (query, key, value, decay, beta)]
        sizes = [call.tokens for call in scans.levels] + ([] if scans.last is None else [scans.last.tokens])
        pieces = list(zip(*(x.split(sizes) for x in packed)))
        if state is None:
            state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        outs, states = [], [state.to(torch.promote_types(query.dtype, torch.float32))[None]]
        for call, piece in zip(scans.levels, pieces):
            out, after = _scan(kernel, piece, call, states[-1].index_select(0, call.entry), final=True)
            outs.append(out)
            states.append(after)
        found = torch.cat(states)
        if scans.last is not None:
            out, _ = _scan(kernel, pieces[-1], scans.last, found.index_select(0, scans.last.entry), final=False)
            outs.append(out)
        out = torch.cat(outs).index_select(0, scans.place)
    return out, found.index_select(0, scans.exported + 1) if len(scans.exported) else None


def _scan(kernel: Kernel, piece: Any, call: _Call, entry: Tensor, *, final: bool) -> tuple[Tensor, Any]:
    query, key, value, decay, beta = (x.unsqueeze(0) for x in piece)
    out, after = kernel(
        query,
        key,
        value,
        decay,
        beta,
        initial_state=entry,
        output_final_state=final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=call.offsets,
        cu_seqlens_cpu=call.offsets_cpu,
    )
    return out[0], after
