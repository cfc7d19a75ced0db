"""`tt.attention`: softmax attention of packed tokens along the paths of their tree, and the choice of its backend.

On a CPU the backend is "rectangles". On a GPU it is the first of these that serves the forest and the layer, and that
gives the right result on small forests: varlen flash attention (chains and large rectangles), FlexAttention (16 bits,
full attention, no path above), the Triton kernels, stock flash calls for rectangles, matrix products. The environment
variable ``TREETRAIN_ATTENTION`` names another. All backends compute the same result; they differ in speed.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.core.attention.kv_cache import CachedAttention, KVCacheView, TreeAttention
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.device_arrays import CHECKED, why_no_triton
from treetrain.core.tree.layout import FULL, AttentionRange
from treetrain.kernels.checks import Run, failure_of

ENVIRONMENT = "TREETRAIN_ATTENTION"
ORDER = {"cpu": ("rectangles",), "cuda": ("varlen", "flex", "triton", "rectangles", "matmul")}
"""The backends of a device, by its type; the first that serves a layer runs. Those stand first that others have run
more: our own Triton kernels have not run on a GPU yet."""
PARTIAL = ("varlen", "flex", "cudnn")
"""Backends that serve some forests and layers only; where one is named, others serve the rest."""


def _rectangles(
    forest: Forest, cache: KVCacheView | None, device: torch.device, heads_times_size: int
) -> TreeAttention:
    return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size)


def _varlen(forest: Forest, cache: KVCacheView | None, device: torch.device, _size: int) -> CachedAttention | None:
    # The Triton kernels serve parts below a path: see varlen.py.
    if cache is not None and cache.path_tokens > 0:
        return None
    from treetrain.kernels.varlen import VarlenAttention, pieces_of, suits

    pieces = pieces_of(forest)
    return VarlenAttention(pieces, device, cache=cache) if suits(pieces) else None


def _flex(forest: Forest, cache: KVCacheView | None, device: torch.device, _size: int) -> TreeAttention | None:
    # The Triton kernels serve parts below a path: see flex.py.
    if cache is not None and cache.path_tokens > 0:
        return None
    from treetrain.kernels.flex import FlexTreeAttention

    return FlexTreeAttention(forest, device, cache=cache)


def _cudnn(forest: Forest, cache: KVCacheView | None, device: torch.device, _size: int) -> TreeAttention | None:
    if cache is not None and cache.path_tokens > 0:
        return None
    from treetrain.kernels.cudnn_flex import CudnnTreeAttention

    return CudnnTreeAttention(forest, device, cache=cache)


def _triton(forest: Forest, cache: KVCacheView | None, device: torch.device, _size: int) -> TreeAttention:
    # Imports Triton, which not every machine has.
    from treetrain.kernels.triton_attention import TritonTreeAttention

    return TritonTreeAttention(forest, device, cache=cache)


def _matmul(forest: Forest, cache: KVCacheView | None, device: torch.device, heads_times_size: int) -> TreeAttention:
    return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size, plain=True)


BACKENDS: dict[str, Callable[[Forest, KVCacheView | None, torch.device, int], TreeAttention | None]] = {
    "rectangles": _rectangles,
    "varlen": _varlen,
    "flex": _flex,
    "triton": _triton,
    "matmul": _matmul,
    "cudnn": _cudnn,
}
"""Constructors of backends by name, called with the forest, the cache, the device, and the query heads times their
size. "varlen" returns None for forests on which it is slow, those of `PARTIAL` below a path; others serve these.
"cudnn" runs only where it is named."""


def choose_backends(device: torch.device, name: str | None = None) -> tuple[str, ...]:
    """The names of the backends for a device, the preferred one first.

    Args:
        name: the backend to use; None: the one that the environment variable names, else all of the device in order.
            Those of `PARTIAL` do not serve every layer, so those after them follow.

    Raises:
        NotImplementedError: a device that no backend supports.
        ValueError: the named backend does not exist, or cannot run on the device.
    """
    if device.type not in ORDER:
        raise NotImplementedError(f"no tree attention for device {device.type!r}; use 'cpu' or 'cuda'")
    name = name or os.environ.get(ENVIRONMENT) or "auto"
    order = ORDER[device.type]
    if name == "auto":
        return tuple(other for other in order if why_not(other, device) is None)
    if name not in BACKENDS:
        raise ValueError(
            f"no tree attention is named {name!r} (see {ENVIRONMENT}); there are auto, {', '.join(BACKENDS)}"
        )
    if (hindrance := why_not(name, device)) is not None:
        raise ValueError(
            f"tree attention {name!r} cannot run on {device.type!r}: {hindrance}; those that can: "
            f"{', '.join(runnable(device)) or 'none'}"
        )
    rest = () if name not in PARTIAL else order[order.index(name) + 1 :] if name in order else order
    return name, *(other for other in rest if why_not(other, device) is None)


def warm_up(device: torch.device, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Check, and so compile, what a process compiles at the first irregular forest: FlexAttention.

    Ranks do so before they wait for one another: half a minute of compiling on the one rank whose forest needs it would
    keep all others waiting in the middle of a step.

    Args:
        heads: of queries, and of keys and values.
        sizes: of the heads of queries and keys, and of values.
    """
    if device.type not in CHECKED or "flex" not in choose_backends(device):
        return
    from treetrain.kernels.attention_check import failure_of_backend

    query, key, value = (
        torch.empty(1, *shape, dtype=dtype, device=device)
        for shape in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
    )
    if dtype.itemsize == 2 and max(sizes) <= 256:
        failure_of_backend("flex", BACKENDS["flex"], query, key, value, PLAIN_ATTENTION, sinks=False, below_path=False)


def runnable(device: torch.device) -> list[str]:
    """List the backends that can run on a device."""
    return [name for name in BACKENDS if why_not(name, device) is None]


def why_not(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device; None if it can."""
    if name in ("rectangles", "matmul"):
        return None if device.type in ORDER else "it needs a CPU or a CUDA device"
    if name != "triton" and device.type != "cuda":
        return "it needs a CUDA device"
    if name == "cudnn" and importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend (1.32 or newer) is not installed"
    return None if name in ("varlen", "cudnn") else why_no_triton(device)


class AttentionTree:
    """The attention of a packed forest, with the data that all layers share (schedules, masks, tile lists).

    Args:
        forest: N tokens.
        cache: reads the path above the forest and stores the forest's own keys; None for whole trees.
    """

    def __init__(self, forest: Forest, cache: KVCacheView | None = None):
        self.num_tokens = len(forest.ends)
        self.layer_calls: Counter[Hashable] = Counter()
        """Number of calls by each layer."""
        self.calls: Counter[str] = Counter()
        """Forward calls by the backend that ran."""
        self.requires_grad = False
        """Whether the output of some call did."""
        self._forest, self._cache = forest, cache
        self._specs: dict[AttentionSpec, AttentionSpec] = {}
        self._order: dict[tuple[str | None, torch.device], tuple[str, ...]] = {}
        self._made: dict[tuple[str, torch.device], TreeAttention | Exception | None] = {}

    def __call__(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        scale: float,
        layer: Hashable = None,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Float[Tensor, " H"] | None = None,
        backend: str | None = None,
    ) -> Float[Tensor, "N H V"]:
        """See `attention`."""
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # A normalised query may be float32 while the value is bfloat16. Cast all, as stock attention does.
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        self._check(query, key, value, sinks)
        if self._cache is not None and layer is None:
            raise ValueError("this tree continues other tokens or is continued: give layer=, the number of the layer")
        self.layer_calls[layer] += 1
        if not self.num_tokens:
            return query[..., :1].expand(*query.shape[:2], value.shape[2])
        spec = self._effective(spec)
        chosen = self.backend(query, key, value, spec, sinks, backend)
        self.calls[chosen.name] += 1
        out = chosen(query, key, value, scale, layer, spec, sinks)
        self.requires_grad = self.requires_grad or out.requires_grad
        return out

    def _effective(self, spec: AttentionSpec) -> AttentionSpec:
        """Replace a range at least as long as every path of the forest by full attention."""
        if spec not in self._specs:
            cuts = spec.visible_range != FULL and np.asarray(spec.visible_range.lowest(self._forest.depth)).any()
            self._specs[spec] = spec if cuts else AttentionSpec(FULL, spec.softcap)
        return self._specs[spec]

    def backend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
        name: str | None = None,
    ) -> TreeAttention:
        """The backend of a layer: the first in order that serves it and, on a GPU, has passed its self-check.

        Raises:
            RuntimeError: none has; or the backend that the user named has not.
        """
        place = name, query.device
        if place not in self._order:
            self._order[place] = choose_backends(query.device, name)
        failures = []
        for candidate in self._order[place]:
            made, failure = self._make(candidate, query), None
            if made is None or not (isinstance(made, Exception) or made.takes(query, value, spec)):
                continue
            if sinks is not None and not (isinstance(made, Exception) or made.serves_sinks):
                continue
            if query.device.type in CHECKED:
                failure = self._failure(candidate, made, query, key, value, spec, sinks)
            if failure is None:
                assert made is not None and not isinstance(made, Exception)
                return made
            failures.append(f"{candidate!r} {failure}")
            if (name or os.environ.get(ENVIRONMENT) or "auto") != "auto":
                raise RuntimeError(
                    f"tree attention {candidate!r} {failure}. It was chosen by name ({ENVIRONMENT} or backend=): leave "
                    "the choice open, and the next one takes its place"
                )
        raise RuntimeError(
            f"no tree attention can run on {query.device} with {query.dtype} and heads of {query.shape[2]}: "
            f"{'; '.join(failures) or 'none takes this layer'}. Please report this with the rows of "
            "`python benchmarks/quarter_hour.py --only right --out rows`"
        )

    def _make(self, name: str, query: Tensor) -> TreeAttention | Exception | None:
        """Construct a backend, once for all layers. On a GPU an error is returned, so that the next one is tried."""
        place = name, query.device
        if place not in self._made:
            size = query.shape[1] * query.shape[2]
            try:
                self._made[place] = BACKENDS[name](self._forest, self._cache, query.device, size)
            except Exception as error:
                if query.device.type not in CHECKED or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._made[place] = error
        return self._made[place]

    def _failure(
        self,
        name: str,
        made: TreeAttention | Exception,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> str | None:
        """Say why a backend must not serve a layer, by its self-check; None if it is right."""
        from treetrain.kernels.attention_check import failure_of_backend

        if isinstance(made, Exception):  # an import or a compiler failed
            return failure_of(f"tree attention {name!r}", (str(query.device),), query.dtype, _raising(made))
        below = self._cache is not None and self._cache.path_tokens > 0
        given = (made.name, BACKENDS[name], query, key, value, spec)
        return failure_of_backend(*given, sinks=sinks is not None, below_path=below)

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


def _raising(error: Exception) -> Callable[[], Iterable[Run]]:
    def raises() -> Iterable[Run]:
        raise error

    return raises


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
    sinks: Float[Tensor, " H"] | None = None,
    layer: Hashable = None,
    backend: str | None = None,
) -> Float[Tensor, "N H V"]:
    """Attention of every packed token to itself and its ancestors in the tree, differentiable.

    The result at a token is that of causal attention on the token's row alone. Apply rotary embeddings beforehand, at
    the ``positions`` of `pack`.

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
        backend: "rectangles" or "matmul"; on a GPU "varlen", "flex", "triton" or "cudnn" too. None: the one that the
            environment variable TREETRAIN_ATTENTION names, else the first that serves the layer and gives the right
            result.

    Returns:
        The output in the dtype of the query.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a backend that does not exist or cannot run here.
        NotImplementedError: a device that no backend supports.
        RuntimeError: no backend gives the right result on this GPU, or the named one does not.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: give a number above 0, or None for no cap")
    spec = AttentionSpec(AttentionRange(window=window, chunk=chunk), softcap)
    return tree(
        query, key, value, float(query.shape[-1]) ** -0.5 if scale is None else scale, layer, spec, sinks, backend
    )
