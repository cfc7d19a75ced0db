"""Chooses the implementation of the gated delta rule for a tree.

Tiles (`delta_rule.py`) run everywhere, in any dtype; forks and short branches cost them nothing. The kernels of
flash-linear-attention are far faster on long runs of tokens but restart at every fork: they take one call per level of
the tree, pad runs to chunks of 64 tokens, and keep a state in memory for every run.
"""

import importlib
import importlib.metadata
import re
from functools import lru_cache

import torch

from treetrain.linear_attention.scans import Kernel, Scans
from treetrain.softmax_attention.backends import Choice

TILES, KERNELS = "tiles", "flash-linear-attention"
OLDEST = (0, 6)
"""Oldest supported version: its kernels allow more value heads than key heads, and lengths on both host and device."""
CHUNK = 64
"""Chunk size of the kernels, in tokens."""
FILLED = 1.5
"""Largest ratio of padded tokens (runs padded to chunks) to the tree's tokens: runs of about a chunk each. With shorter
runs the kernels hold more states than tiles do and compute on padding."""
TOKENS_PER_CALL = 512
"""Least mean tokens per call of the kernels. Estimated from the number of kernels that a call launches forward and
backward, not measured."""
_LARGEST_KEY = 256
_DTYPES = {torch.bfloat16, torch.float16}


def choose_rule(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> Choice:
    """The faster implementation that is available: the kernels if they are exact enough and installed.

    Args:
        dtype: dtype of queries, keys and values.
    """
    if device.type != "cuda":
        return Choice(TILES, f"{device.type}: flash-linear-attention's kernels are for CUDA")
    if dtype not in _DTYPES:
        how = "multiply float32 in TF32, which is not exact" if dtype == torch.float32 else f"do not take {dtype}"
        return Choice(TILES, f"flash-linear-attention's kernels {how}")
    if key_size > _LARGEST_KEY or key_size % 2 or value_size % 2:
        return Choice(
            TILES,
            f"heads of {key_size} and {value_size} entries: flash-linear-attention's kernels take even sizes, keys to "
            f"{_LARGEST_KEY}",
        )
    kernel = _found()
    if isinstance(kernel, str):
        return Choice(TILES, kernel)
    return Choice(KERNELS, "CUDA: one call per level of the tree")


def choose_for(scans: Scans, rule: Choice) -> Choice:
    """The implementation for one forest; `rule` is the result of `choose_rule`."""
    if rule.name == TILES:
        return rule
    tokens, slots = len(scans.order), scans.slots(CHUNK)
    if slots > FILLED * tokens:
        return Choice(
            TILES, f"{scans.runs} runs of {tokens / scans.runs:.0f} tokens would leave chunks of {CHUNK} empty"
        )
    if tokens < TOKENS_PER_CALL * scans.calls:
        return Choice(TILES, f"{tokens} tokens are too few for {scans.calls} calls, one after the other")
    return Choice(KERNELS, f"CUDA: {scans.runs} runs of {tokens / scans.runs:.0f} tokens in {scans.calls} calls")


def load_kernel() -> Kernel:
    """The kernel of flash-linear-attention, which must be installed."""
    kernel = _found()
    assert not isinstance(kernel, str), kernel
    return kernel


@lru_cache(maxsize=1)
def _found() -> Kernel | str:
    """The kernel, or why there is none."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "flash-linear-attention is not installed"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        return f"flash-linear-attention {version} is older than {'.'.join(map(str, OLDEST))}, which is tested"
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception as error:  # its import looks for drivers, compilers and other libraries
        return f"flash-linear-attention {version} cannot be imported ({type(error).__name__}: {error})"
