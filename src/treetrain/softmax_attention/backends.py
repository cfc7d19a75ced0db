"""Chooses the tree attention backend of a forest.

On a CPU it is rectangles. On a GPU each forest has its own: varlen flash attention where the forest is chains and large
rectangles, and the Triton kernels elsewhere. The environment variable ``TREETRAIN_ATTENTION`` or the context manager
`using` names another. All backends compute the same; they differ in speed.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.softmax_attention.flex import FlexTreeAttention
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.rectangles import RectangleAttention
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.varlen import VarlenAttention, pieces_of, suits

ENVIRONMENT = "TREETRAIN_ATTENTION"
BACKENDS = {
    "rectangles": "stock flash attention calls merged by log-sum-exp",
    "varlen": "varlen flash attention where a forest is chains and large rectangles, Triton kernels elsewhere",
    "triton": "Triton kernels over lists of visible tiles",
    "flex": "FlexAttention with a block mask made from the subtree intervals",
    "flex-flash": "FlexAttention's FlashAttention-4 kernels with the same block mask",
}
DEFAULTS = {"cpu": "rectangles", "cuda": "varlen"}
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
        name, reason = DEFAULTS[device.type], "the default"
    else:
        _check_name(wanted, source)
        name, reason = wanted, f"{ENVIRONMENT}={wanted}" if source == ENVIRONMENT else source
    hindrance = why_not(name, device)
    if hindrance is not None:
        instead = ", ".join(runnable(device)) or "none"
        raise ValueError(f"tree attention {name!r} ({reason}) cannot run here: {hindrance}; those that can: {instead}")
    return Choice(name, f"{device.type.upper()}: {reason}: {BACKENDS[name]}")


def _check_name(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source}: no tree attention is named {name!r}; there are auto, {', '.join(BACKENDS)}")


def runnable(device: torch.device) -> list[str]:
    """The backends that can run on a device."""
    return [name for name in BACKENDS if why_not(name, device) is None]


def why_not(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device; None if it can."""
    if name == "rectangles":
        return None if device.type == "cpu" else "its calls are the CPU's"
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type != "cuda" and not interpreted:
        return "it needs a CUDA device" + (" (or TRITON_INTERPRET=1)" if name == "triton" else "")
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if name == "flex-flash" and not _has_flash_attention_4():
        return "the package flash-attn-4 (module flash_attn.cute) is not installed"
    return None


def _has_flash_attention_4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


class ForestAttention:
    """Tree attention for one forest, used by every layer of a run: each goes to the backend that has what it needs."""

    def __init__(
        self, forest: Forest, device: torch.device, name: str, heads_times_size: int, cache: KVCacheView | None
    ):
        self._forest, self._device, self._name, self._size, self._cache = forest, device, name, heads_times_size, cache
        self.calls: Counter[str] = Counter()
        """Forward calls by the backend that ran."""

    @property
    def name(self) -> str:
        """The backend of plain layers."""
        return self._block_lists.name if self._varlen is None else self._varlen.name

    @cached_property
    def _varlen(self) -> VarlenAttention | None:
        """Varlen calls, where they are chosen and suit the forest; see `varlen.suits` for parts below a path."""
        if self._name != "varlen" or (self._cache is not None and self._cache.path_tokens):
            return None
        pieces = pieces_of(self._forest)
        return VarlenAttention(pieces, self._device, cache=self._cache) if suits(pieces) else None

    @cached_property
    def _block_lists(self) -> Any:
        """The backend for all other forests and layers."""
        forest, cache = self._forest, self._cache
        if self._name == "rectangles":
            return RectangleAttention(forest, cache=cache, heads_times_size=self._size)
        if self._name in ("varlen", "triton"):
            # Imports Triton, which not every machine has.
            from treetrain.softmax_attention.triton_attention import TritonTreeAttention

            return TritonTreeAttention(forest, self._device, cache=cache)
        kernels = "FLASH" if self._name == "flex-flash" else None
        return FlexTreeAttention(forest, self._device, cache=cache, kernels=kernels)

    def __call__(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        scale: float,
        layer: int = 0,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "N H V"]:
        varlen = self._varlen
        backend = varlen if varlen is not None and varlen.takes(query, value, spec) else self._block_lists
        self.calls[backend.name] += 1
        return backend(query, key, value, scale, layer, spec, sinks)


def make_attention(
    forest: Forest, device: torch.device, heads_times_size: int, cache: KVCacheView | None = None
) -> ForestAttention:
    """Tree attention for one packed forest on ``device``.

    Args:
        heads_times_size: H * D of the model.
        cache: reads the path above and stores the forest's own keys; None for whole trees.
    """
    return ForestAttention(forest, device, choose_backend(device).name, heads_times_size, cache)
