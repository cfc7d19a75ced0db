"""The gated delta rule over a forest by flash-linear-attention's kernel, and the choice between it and tiles.

Tiles (`delta_rule.py`) run everywhere, in any dtype; forks and short branches cost them nothing. The kernel is far
faster on long runs of tokens, but it restarts at every fork, pads runs to chunks of 64 tokens, and keeps a state in
memory for every run.

The kernel scans sequences, so the forest is cut into runs without a fork. It returns only the state after a run's last
token, so runs end at every fork and at every exported token. A run starts from the state at the end of the run above
it. Branches gather the state at their fork, so its backward sums their gradients. Runs of one depth in the tree of
runs form a *level*, and a level is one call. All runs whose final state is not needed share one last call.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n runs of t
tokens in a call, x exported tokens.
"""

import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.linear_attention.delta_rule import levels_of
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import Int64s, ranges


class Call(NamedTuple):
    """Runs that one call scans, on the device: n runs, t tokens in total."""

    tokens: int
    offsets: Int64[Tensor, " _"]
    """Where each run starts among the call's tokens, then t."""
    offsets_cpu: Int64[Tensor, " _"]
    entry: Int64[Tensor, " n"]
    """Index of the state that each run starts from. In a level, it indexes the final states of the level before (the
    first level: 0, the state before the roots). In the last call, it indexes all states: 0 is the state before the
    roots, 1 + e that of end e."""


Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""`chunk_gated_delta_rule` of flash-linear-attention, or a function with its signature: query, key [1, t, J, K], value
[1, t, H, V], g and beta [1, t, H]; by keyword initial_state [n, H, K, V], output_final_state, cu_seqlens and
cu_seqlens_cpu [n + 1], use_qk_l2norm_in_kernel -> out [1, t, H, V] in the dtype of value, and final states
[n, H, K, V] in that of the initial ones."""


class Scans:
    """The kernel calls of a forest, shared by all layers, and the E run ends whose state is needed.

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
    def suits(self) -> bool:
        """Whether the kernel is faster than tiles on this forest: few empty chunks, few calls one after the other."""
        slots = int((-(-self._length // CHUNK)).sum()) * CHUNK
        calls = len(self.levels) + (self.last is not None)
        return slots <= FILLED * len(self.order) and len(self.order) >= TOKENS_PER_CALL * calls


def _call(length: Int64s, entry: Int64s, device: torch.device) -> Call:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    return Call(int(offsets[-1]), on_device(offsets, device), torch.from_numpy(offsets), on_device(entry, device))


def scanned_gated_delta(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    beta: Float[Tensor, "N H"],
    scans: Scans,
    state: Float[Tensor, "H K V"] | None,
    kernel: Kernel,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "x H K V"] | None]:
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


# ---- the choice


OLDEST = (0, 6)
"""Oldest supported version: its kernels allow more value heads than key heads, and lengths on both host and device."""
CHUNK = 64
"""Chunk size of the kernels, in tokens."""
FILLED = 1.5
"""Largest ratio of padded tokens (runs padded to chunks) to the tree's tokens; runs of about one chunk reach it. With
shorter runs the kernels hold more states than tiles do and compute on padding."""
TOKENS_PER_CALL = 512
"""Minimum mean tokens per kernel call. Estimated from the number of kernels that a call launches forward and backward,
not measured."""
_LARGEST_KEY = 256


def kernel_for(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> Kernel | None:
    """The kernel, if it is installed and takes heads of these sizes exactly enough; it multiplies float32 in TF32."""
    fits = key_size <= _LARGEST_KEY and key_size % 2 == value_size % 2 == 0
    exact = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return _installed() if exact and fits else None


@lru_cache(maxsize=1)
def _installed() -> Kernel | None:
    """Return the kernel of flash-linear-attention if it is installed; warn once about one that cannot be used."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        reason = f"is older than {'.'.join(map(str, OLDEST))}, which is tested"
    else:
        try:
            return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        except Exception as error:  # its import looks for drivers, compilers and other libraries
            reason = f"cannot be imported ({type(error).__name__}: {error})"
    warnings.warn(f"flash-linear-attention {version} {reason}; recurrent layers run without it", stacklevel=2)
    return None
