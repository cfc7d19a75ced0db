"""Launches Triton kernels, and says why they cannot run."""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "it needs a CUDA device (or TRITON_INTERPRET=1)"
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of `like`, which need not be the current one."""
    if like.device.type == "cuda":
        with torch.cuda.device(like.device):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


def tf32_is_allowed() -> bool:
    """Whether either of PyTorch's settings allows float32 products in less than float32 precision."""
    chosen = torch.backends.cuda.matmul.fp32_precision
    # PyTorch raises if the older setting is read while the newer one says something else.
    return torch.get_float32_matmul_precision() != "highest" if chosen == "none" else chosen != "ieee"
