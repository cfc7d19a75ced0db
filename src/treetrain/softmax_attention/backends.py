"""Chooses the tree attention backend of a device.

The default is rectangles on a CPU and FlexAttention on a GPU. The environment variable ``TREETRAIN_ATTENTION`` or the
context manager `using` names another. All backends compute the same; they differ in speed.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from treetrain.softmax_attention.flex import FlexTreeAttention
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.rectangles import RectangleAttention
from treetrain.softmax_attention.schedule import Forest
from treetrain.softmax_attention.varlen import VarlenAttention

ENVIRONMENT = "TREETRAIN_ATTENTION"
BACKENDS = {
    "rectangles": "stock flash attention calls merged by log-sum-exp",
    "flex": "FlexAttention with a block mask made from the subtree intervals",
    "flex-flash": "FlexAttention's FlashAttention-4 kernels with the same block mask",
    "triton": "Triton kernels over lists of visible tiles",
    "varlen": "stock varlen flash attention calls by light depth, merged by log-sum-exp",
}
DEFAULTS = {"cpu": "rectangles", "cuda": "flex"}
_named: ContextVar[str | None] = ContextVar("treetrain_attention", default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name and the reason for choosing it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Use this backend within the block, whatever the environment says; None uses the device's default.

    Raises:
        ValueError: no backend has that name.
    """
    if name is not None:
        _check_name(name, "using")
    token = _named.set("auto" if name is None else name)
    try:
        yield
    finally:
        _named.reset(token)


def choose_backend(device: torch.device) -> Choice:
    """The backend for a device.

    Raises:
        NotImplementedError: a device that no backend covers.
        ValueError: a backend was named that does not exist, or cannot run there.
    """
    if device.type not in DEFAULTS:
        raise NotImplementedError(f"no tree attention for device {device.type!r}; use 'cpu' or 'cuda'")
    named = _named.get()
    wanted, source = (named, "the program asks for it") if named else (os.environ.get(ENVIRONMENT, ""), ENVIRONMENT)
    if wanted in ("", "auto"):
        name = DEFAULTS[device.type]
        return Choice(name, f"{device.type.upper()}: {BACKENDS[name]}{_whats_missing(device)}")
    _check_name(wanted, source)
    hindrance = why_not(wanted, device)
    if hindrance is not None:
        raise ValueError(
            f"tree attention {wanted!r} cannot run here: {hindrance}; unset {ENVIRONMENT} for "
            f"{DEFAULTS[device.type]!r}, or name one of {', '.join(runnable(device))}"
        )
    reason = f"{ENVIRONMENT}={wanted}" if source == ENVIRONMENT else source
    return Choice(wanted, f"{device.type.upper()}: {reason}: {BACKENDS[wanted]}")


def _check_name(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source}: no tree attention is named {name!r}; there are auto, {', '.join(BACKENDS)}")


def _whats_missing(device: torch.device) -> str:
    return "; FlexAttention has no CPU backward" if device.type == "cpu" else ""


def runnable(device: torch.device) -> list[str]:
    """The backends that can run on a device."""
    return [name for name in BACKENDS if why_not(name, device) is None]


def why_not(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device; None if it can."""
    if name == "rectangles":
        return None if device.type == "cpu" else "its calls are the CPU's"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
        return None if device.type == "cuda" or interpreted else "it needs a CUDA device (or TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return "it needs a CUDA device"
    if name == "flex-flash" and not _has_flash_attention_4():
        return "the package flash-attn-4 (module flash_attn.cute) is not installed"
    return None


def _has_flash_attention_4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def make_attention(
    forest: Forest, device: torch.device, heads_times_size: int, cache: KVCacheView | None = None
) -> Any:
    """Tree attention for one packed forest on ``device``.

    Args:
        heads_times_size: H * D of the model.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
    """
    name = choose_backend(device).name
    if name == "rectangles":
        return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size)
    if name == "triton":
        # Imports Triton, which not every machine has.
        from treetrain.softmax_attention.triton_attention import TritonTreeAttention

        return TritonTreeAttention(forest, device, cache=cache)
    if name == "varlen":
        return VarlenAttention(
            forest, device, cache=cache, otherwise=lambda: FlexTreeAttention(forest, device, cache=cache)
        )
    return FlexTreeAttention(forest, device, cache=cache, kernels="FLASH" if name == "flex-flash" else None)
