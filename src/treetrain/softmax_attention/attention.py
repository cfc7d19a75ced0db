"""`tt.attention`: softmax attention of packed tokens along the paths of their tree, and the choice of its backend.

On a CPU the backend is rectangles. On a GPU each forest has its own: varlen flash attention where the forest is chains
and large rectangles, and the Triton kernels elsewhere. The environment variable ``TREETRAIN_ATTENTION`` or the context
manager `using` names another. All backends compute the same; they differ in speed.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.softmax_attention.flex import FlexTreeAttention
from treetrain.softmax_attention.kv_cache import CachedAttention, KVCacheView
from treetrain.softmax_attention.rectangles import RectangleAttention
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.varlen import VarlenAttention, pieces_of, suits
from treetrain.tree.layout import AttentionRange

ENVIRONMENT = "TREETRAIN_ATTENTION"
BACKENDS = {
    "rectangles": "stock flash attention calls merged by log-sum-exp",
    "varlen": "varlen flash attention where a forest is chains and large rectangles, Triton kernels elsewhere",
    "triton": "Triton kernels over lists of visible tiles",
    "flex": "FlexAttention with a block mask made from the subtree intervals",
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


def choose_backend(device: torch.device, name: str | None = None) -> Choice:
    """The backend of that name for a device; None takes what `using`, the environment or the device's default says.

    Raises:
        NotImplementedError: a device that no backend covers.
        ValueError: a backend was named that does not exist, or cannot run there.
    """
    if device.type not in DEFAULTS:
        raise NotImplementedError(f"no tree attention for device {device.type!r}; use 'cpu' or 'cuda'")
    named = name or _named.get()
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
    return None


TreeAttention = CachedAttention | FlexTreeAttention


class AttentionTree:
    """A packed forest as attention takes it, with all that its layers share (schedules, masks, tile lists).

    Args:
        forest: N tokens.
        cache: reads the path above the forest and stores the forest's own keys; None for whole trees.
    """

    def __init__(self, forest: Forest, cache: KVCacheView | None = None):
        self.num_tokens = len(forest.ends)
        self.layer_calls: Counter[Any] = Counter()
        """Number of calls by each layer."""
        self.calls: Counter[str] = Counter()
        """Forward calls by the backend that ran."""
        self._forest, self._cache = forest, cache
        self._chosen: dict[tuple[str | None, torch.device], str] = {}
        self._made: dict[tuple[str, torch.device], TreeAttention | None] = {}

    def __call__(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        scale: float,
        layer: Any = None,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Float[Tensor, "H"] | None = None,
        backend: str | None = None,
    ) -> Float[Tensor, "N H V"]:
        """See `attention`."""
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # A normalised query may be float32 while the value is bfloat16: cast as stock attention would.
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        self._check(query, key, value, sinks)
        if self._cache is not None and layer is None:
            raise ValueError("this tree continues other tokens or is continued: give layer=, the number of the layer")
        self.layer_calls[layer] += 1
        if not self.num_tokens:
            return query[..., :1].expand(*query.shape[:2], value.shape[2])
        chosen = self.backend(query, value, spec, backend)
        self.calls[chosen.name] += 1
        return chosen(query, key, value, scale, layer, spec, sinks)

    def backend(self, query: Tensor, value: Tensor, spec: AttentionSpec, name: str | None = None) -> TreeAttention:
        """The backend of a layer with these tensors: the named one; for None the one that the first call chose."""
        device, place = query.device, (name, query.device)
        if place not in self._chosen:
            self._chosen[place] = choose_backend(device, name).name
        chosen, size = self._chosen[place], query.shape[1] * query.shape[2]
        if chosen == "varlen":
            varlen = self._make("varlen", device, size)
            if isinstance(varlen, VarlenAttention) and varlen.takes(query, value, spec):
                return varlen
            chosen = "triton"
        made = self._make(chosen, device, size)
        assert made is not None
        return made

    def _make(self, name: str, device: torch.device, heads_times_size: int) -> TreeAttention | None:
        """The backend of that name, made once for all layers; None for varlen calls where they do not suit."""
        place = name, device
        if place not in self._made:
            forest, cache = self._forest, self._cache
            if name == "rectangles":
                self._made[place] = RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size)
            elif name == "varlen":
                # Parts below a path are left to other backends: see varlen.py.
                below = cache is not None and cache.path_tokens > 0
                fits = not below and suits(pieces := pieces_of(forest))
                self._made[place] = VarlenAttention(pieces, device, cache=cache) if fits else None
            elif name == "triton":
                # Imports Triton, which not every machine has.
                from treetrain.softmax_attention.triton_attention import TritonTreeAttention

                self._made[place] = TritonTreeAttention(forest, device, cache=cache)
            else:
                self._made[place] = FlexTreeAttention(forest, device, cache=cache)
        return self._made[place]

    def _check(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
        given = {"query": query, "key": key, "value": value}
        for name, x in given.items():
            if x.dim() != 3 or len(x) != self.num_tokens:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; expected [{self.num_tokens}, heads, head size], one entry for "
                    "each token of the tree"
                )
        dtypes, devices = {x.dtype for x in given.values()}, {x.device for x in given.values()}
        if len(dtypes) > 1 or not query.is_floating_point() or len(devices) > 1:
            found = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in given.items())
            raise ValueError(f"{found}: all three must have one floating dtype and one device")
        (heads, size), groups = query.shape[1:], key.shape[1]
        if value.shape[1] != groups or not groups or heads % groups:
            raise ValueError(
                f"{heads} heads of queries, {groups} of keys, {value.shape[1]} of values: keys and values need the "
                "same number, which divides that of the queries"
            )
        if key.shape[2] != size:
            raise ValueError(f"heads of queries have {size} entries, those of keys {key.shape[2]}; they must agree")
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"sinks have shape {list(sinks.shape)}; expected [{heads}], one logit for each head")


def attention(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N G D"],
    value: Float[Tensor, "N G V"],
    tree: AttentionTree,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    layer: Any = None,
    backend: str | None = None,
) -> Float[Tensor, "N H V"]:
    """Attention of every packed token to itself and its ancestors in the tree, differentiable.

    The result at a token is that of causal attention on the token's row by itself. Positions are the model's business:
    apply rotary embeddings for ``positions`` of `pack` beforehand.

    Args:
        query: N tokens, H heads of size D; any floating dtype.
        key: G heads; H is a multiple of G (grouped queries).
        value: heads of size V, which may differ from D.
        tree: ``tt.pack(rows).tree``, or the tree of a part.
        scale: factor on the scores; None is ``D ** -0.5``.
        window: a token sees itself and the window - 1 tokens before it on its path; None sees the whole path.
        chunk: a token sees the tokens of its own chunk, counted from the start of its path; not with a window.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: logits of an extra key without a value.
        layer: a number or name, different for each layer; needed only in parts, where keys are cached by layer.
        backend: "rectangles" (CPUs), "flex", "triton" or "varlen" (GPUs). None chooses by device, or what the
            environment variable TREETRAIN_ATTENTION names.

    Returns:
        In the dtype of the query.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a backend that does not exist or cannot run here.
        NotImplementedError: a device that no backend covers.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: give a number above 0, or None for no cap")
    spec = AttentionSpec(AttentionRange(window=window, chunk=chunk), softcap)
    return tree(
        query, key, value, float(query.shape[-1]) ** -0.5 if scale is None else scale, layer, spec, sinks, backend
    )
