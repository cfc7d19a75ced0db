"""The gated delta rule over a forest by flash-linear-attention's kernel, which scans sequences.

The forest is cut into runs without a fork. The kernel returns only the state after a run's last token, so runs end at
every fork and at every exported token. A run starts from the state at the end of the run above it. The backward of
gathering that state adds up the branches' gradients at a fork. Runs of one depth in the tree of runs form a *level*,
and a level is one call. All runs whose final state is not needed share one last call.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n runs of t
tokens in a call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.linear_attention.delta_rule import levels_of
from treetrain.tree.assemble import Int64s, ranges
from treetrain.tree.layout import PackedLayout


class Call(NamedTuple):
    """Runs that one call scans, on the device: n runs, t tokens in total."""

    tokens: int
    """t."""
    offsets: Tensor
    """int64 [n + 1]: where each run starts among the call's tokens."""
    offsets_cpu: Tensor
    entry: Tensor
    """int64 [n]: index of the state that each run starts from. In a level it counts the final states of the level
    before (0 in the first level: the state before the roots). In the last call it counts all states: 0 is the state
    before the roots, 1 + e that of end e."""


Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""`chunk_gated_delta_rule` of flash-linear-attention, or a function with its signature: query, key [1, t, J, K], value
[1, t, H, V], g and beta [1, t, H]; by keyword initial_state [n, H, K, V], output_final_state, cu_seqlens and
cu_seqlens_cpu [n + 1], use_qk_l2norm_in_kernel -> out [1, t, H, V] in the dtype of value, and final states
[n, H, K, V] in that of the initial ones."""


class Scans:
    """The calls of a forest on a device, shared by all layers of a run, and the E ends whose final state is needed.

    Args:
        layout: N tokens, N > 0.
        exported: int64 [x]: tokens whose state is exported.
    """

    def __init__(self, layout: PackedLayout, exported: Int64s, device: torch.device):
        tokens = np.arange(layout.num_tokens)
        children = np.bincount(layout.parent[layout.parent >= 0], minlength=len(tokens))
        wanted = np.zeros(len(tokens), bool)
        wanted[exported] = True
        begins = (layout.parent != tokens - 1) | np.append(True, (children[:-1] != 1) | wanted[:-1])
        start = np.flatnonzero(begins)
        self._length = length = np.diff(start, append=len(tokens))
        run_of = np.cumsum(begins) - 1
        above = np.where(layout.parent[start] >= 0, run_of[layout.parent[start]], -1)
        end = start + length - 1
        level = levels_of(above)
        goes_on = (children[end] > 0) | wanted[end]

        inner = np.flatnonzero(goes_on)[np.argsort(level[goes_on], kind="stable")]
        number = np.full(len(start), -1, np.int64)  # number of each run's end
        number[inner] = np.arange(len(inner))
        counts = np.bincount(level[inner])
        first = np.cumsum(counts) - counts
        self.levels: list[Call] = []
        """Runs whose final state is needed. Ends are numbered in this order, from 0."""
        for depth, (begin, count) in enumerate(zip(first.tolist(), counts.tolist())):
            runs = inner[begin : begin + count]
            entry = number[above[runs]] - first[depth - 1] if depth else np.zeros(count, np.int64)
            self.levels.append(_call(length[runs], entry, device))
        rest = np.flatnonzero(~goes_on)
        entry = np.where(above[rest] >= 0, 1 + number[above[rest]], 0)
        self.last = _call(length[rest], entry, device) if len(rest) else None
        """Runs whose final state is not needed."""
        runs = np.concatenate([inner, rest])
        order = ranges(start[runs], length[runs])
        self.order = on_device(order, device)
        """int64 [N]: the tokens in the order of the calls."""
        self.place = on_device(np.argsort(order, kind="stable"), device)
        self.exported = on_device(number[run_of[exported]], device)
        """int64 [x]: the number of the end at every exported token."""

    @property
    def calls(self) -> int:
        """Number of kernel calls in a forward."""
        return len(self.levels) + (self.last is not None)

    @property
    def runs(self) -> int:
        """Number of runs in all calls."""
        return len(self._length)

    def slots(self, chunk: int) -> int:
        """Number of tokens with every run padded to whole chunks, as the kernels compute them."""
        return int((-(-self._length // chunk)).sum()) * chunk


def _call(length: Int64s, entry: Int64s, device: torch.device) -> Call:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    return Call(int(offsets[-1]), on_device(offsets, device), torch.from_numpy(offsets), on_device(entry, device))


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
    """Run the rule along every path, as `delta_rule.gated_delta` does; outputs are in the dtype of `value`.

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


def _scan(kernel: Kernel, piece: Any, call: Call, entry: Tensor, *, final: bool) -> tuple[Tensor, Any]:
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
