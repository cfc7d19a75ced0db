"""Which form of the gated delta rule runs on a tree, and why.

Tiles (`delta_rule.py`) run everywhere, in any dtype, and pay for neither forks nor short branches. The kernels of
flash-linear-attention are far faster on a long run of tokens, but start anew at every fork: a call per level of the
tree, runs filled up to chunks of 64 tokens, and a state in memory for every run.
"""

import importlib
import importlib.metadata
import re
from functools import lru_cache

import torch

from treetrain.attention.backends import Choice
from treetrain.linear_attention.scans import Kernel, Segments

TILES, KERNELS = "tiles", "flash-linear-attention"
OLDEST = (0, 6)
"""The version whose kernels are tested here: more value heads than key heads, lengths given on both sides."""
CHUNK = 64
"""Tokens of the kernels' chunks."""
FILLED = 1.5
"""Tokens with runs filled up to chunks may be so many times the tree's: runs of about a chunk each. From there down the
kernels hold more states than tiles do, and compute on padding."""
TOKENS_PER_CALL = 512
"""A call of the kernels, forward and backward, must be worth so many tokens. An estimate from the number of kernels
that a call launches, not measured."""
_LARGEST_KEY = 256
_DTYPES = {torch.bfloat16, torch.float16}


def choose_rule(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> Choice:
    """The faster form that may run: the kernels, if they are exact enough and installed.

    Args:
        dtype: of queries, keys and values.
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


def choose_for(segments: Segments, rule: Choice) -> Choice:
    """The form that runs on one forest; `rule` is the fastest that may."""
    if rule.name == TILES:
        return rule
    tokens, slots = len(segments.order), segments.slots(CHUNK)
    if slots > FILLED * tokens:
        return Choice(
            TILES, f"{segments.runs} runs of {tokens / segments.runs:.0f} tokens would leave chunks of {CHUNK} empty"
        )
    if tokens < TOKENS_PER_CALL * segments.calls:
        return Choice(TILES, f"{tokens} tokens are too few for {segments.calls} calls, one after the other")
    return Choice(
        KERNELS, f"CUDA: {segments.runs} runs of {tokens / segments.runs:.0f} tokens in {segments.calls} calls"
    )


def load_kernel() -> Kernel:
    """The kernel of flash-linear-attention, which must be there."""
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
    except Exception as error:  # it looks for drivers, compilers and libraries of its own as it is imported
        return f"flash-linear-attention {version} cannot be imported ({type(error).__name__}: {error})"
