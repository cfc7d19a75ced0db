"""Rules over a forest by flash-linear-attention's kernels, and the choice between them and tiles.

Tiles (`tiles.py`) run everywhere, in any dtype; forks and short branches cost them nothing. The kernels are far
faster on long runs of tokens, but they restart at every fork, pad runs to chunks of 64 tokens, and keep a state in
memory for every run.

A kernel scans sequences, so the forest is cut into runs without a fork. It returns only the state after a run's last
token, so runs end at every fork and at every exported token. A run starts from the state at the end of the run above
it. Branches gather the state at their fork, so its backward sums their gradients. Runs of one depth in the tree of
runs form a *level*, and a level is one call. All runs whose final state is not needed share one last call.

Shape letters: N tokens, J heads of queries and keys, H heads of values (a multiple of J), K and V sizes of keys and
values; n runs of t tokens in a call, x exported tokens.
"""

import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treetrain.core.device_arrays import on_device
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Int64s, ranges
from treetrain.layers.recurrence.tiles import levels_of


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


Scan = Callable[..., tuple[Tensor, Tensor | None]]
"""A kernel: query, key [1, t, J, K], value [1, t, H, V], decay and what else the rule takes [1, t, H]; by keyword
initial_state [n, H, K, V], output_final_state, cu_seqlens and cu_seqlens_cpu [n + 1] -> out [1, t, H, V] in the dtype
of value, and final states [n, H, K, V] in that of the initial ones."""


class Kernel(NamedTuple):
    """A kernel of flash-linear-attention."""

    rule: str
    """The rule that it runs."""
    module: str
    function: str
    options: dict[str, object]
    """Keyword arguments for every call."""
    grouped: bool
    """Whether it takes fewer heads of queries and keys than of values."""

    def bound(self, function: Scan) -> Scan:
        """Call the function with these options, and with tensors as it takes them."""

        def scan(
            query: Tensor, key: Tensor, value: Tensor, *others: Tensor, **keywords: object
        ) -> tuple[Tensor, Tensor | None]:
            repeat = value.shape[2] // query.shape[2]
            if repeat > 1 and not self.grouped:
                query, key = (x.repeat_interleave(repeat, 2) for x in (query, key))
            return function(query, key, value.to(query.dtype), *others, **keywords, **self.options)

        return scan


GATED_DELTA_KERNEL = Kernel(
    "gated delta rule",
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    {"use_qk_l2norm_in_kernel": True},
    grouped=True,
)
STATE_SPACE_KERNEL = Kernel("state-space dual", "fla.ops.simple_gla", "chunk_simple_gla", {"scale": 1.0}, grouped=False)


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


def scanned(
    inputs: Sequence[Tensor], scans: Scans, state: Float[Tensor, "H K V"] | None, scan: Scan
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "x H K V"] | None]:
    """Run a rule along every path, as its tiles do.

    Args:
        inputs: of the rule: query, key, value, decay, and what else it takes.
        scan: rounds to the dtype of the query between its products; states are in at least float32.

    Returns:
        The output in the kernel's dtype, and the states of the exported tokens (None if there are none).
    """
    query, key, value = inputs[:3]
    with torch.autocast(query.device.type, enabled=False):
        packed = [x.index_select(0, scans.order) for x in inputs]
        sizes = [call.tokens for call in scans.levels] + ([] if scans.last is None else [scans.last.tokens])
        pieces = list(zip(*(x.split(sizes) for x in packed)))
        if state is None:
            state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        outs, states = [], [state.to(torch.promote_types(query.dtype, torch.float32))[None]]
        for call, piece in zip(scans.levels, pieces):
            out, after = _call_on(scan, piece, call, states[-1].index_select(0, call.entry), final=True)
            outs.append(out)
            states.append(after)
        found = torch.cat(states)
        if scans.last is not None:
            entry = found.index_select(0, scans.last.entry)
            outs.append(_call_on(scan, pieces[-1], scans.last, entry, final=False)[0])
        out = torch.cat(outs).index_select(0, scans.place)
    return out, found.index_select(0, scans.exported + 1) if len(scans.exported) else None


def _call_on(scan: Scan, piece: Sequence[Tensor], call: Call, entry: Tensor, *, final: bool) -> tuple[Tensor, Any]:
    out, after = scan(
        *(x.unsqueeze(0) for x in piece),
        initial_state=entry,
        output_final_state=final,
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


def scan_for(kernel: Kernel, device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> Scan | None:
    """The kernel, if it is installed and takes heads of these sizes exactly enough; it multiplies float32 in TF32."""
    fits = key_size <= _LARGEST_KEY and key_size % 2 == value_size % 2 == 0
    exact = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    function = _installed(kernel.module, kernel.function) if exact and fits else None
    return None if function is None else kernel.bound(function)


@lru_cache
def _installed(module: str, function: str) -> Scan | None:
    """Return a kernel of flash-linear-attention if it is installed; warn once about one that cannot be used."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        reason = f"is older than {'.'.join(map(str, OLDEST))}, which is tested"
    else:
        try:
            return getattr(importlib.import_module(module), function)
        except Exception as error:  # its import looks for drivers, compilers and other libraries
            reason = f"cannot be imported ({type(error).__name__}: {error})"
    warnings.warn(f"flash-linear-attention {version} {reason}; recurrent layers run without it", stacklevel=2)
    return None
