"""The backends of tree attention on a CPU and on a GPU, their order, and the check before their first use.

On a CPU the backend is "rectangles". On a GPU it is the first of these that serves the forest and the layer, and that
gives the right result on small forests: varlen flash attention (chains and large rectangles), FlexAttention (16 bits,
full attention, no path above), the Triton kernels, stock flash calls for rectangles, matrix products. The environment
variable ``TREETRAIN_ATTENTION`` names another. All backends compute the same result; they differ in speed.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from treetrain.core.attention.attention import Backends, Constructor
from treetrain.core.attention.kv_cache import CachedAttention, KVCacheView, TreeAttention
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.engine.memory import is_out_of_memory
from treetrain.kernels.checks import CHECKED, Run, failure_of
from treetrain.kernels.launch import why_no_triton

ENVIRONMENT = "TREETRAIN_ATTENTION"
ORDER = {"cpu": ("rectangles",), "cuda": ("varlen", "flex", "triton", "rectangles", "matmul")}
"""The backends of a device, by its type; the first that serves a layer runs. Those stand first that others have run
more: our own Triton kernels have not run on a GPU yet."""
PARTIAL = ("varlen", "flex", "cudnn")
"""Backends that serve some forests and layers only; where one is named, others serve the rest."""


def _rectangles(
    forest: Forest, cache: KVCacheView | None, device: torch.device, heads_times_size: int
) -> TreeAttention:
    if device.type == "cpu":
        return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size)
    from treetrain.kernels.flash_kernel import kernel_of

    return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size, kernel_of=kernel_of)


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


BACKENDS: dict[str, Constructor] = {
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


class DeviceBackends(Backends):
    """The backends of this module, each compared with its reference before a GPU uses it."""

    def order(self, device: torch.device, name: str | None) -> tuple[str, ...]:
        return choose_backends(device, name)

    def make(
        self, name: str, forest: Forest, cache: KVCacheView | None, device: torch.device, heads_times_size: int
    ) -> TreeAttention | Exception | None:
        """See `Backends`. On a GPU an error is returned, so that the next backend is tried."""
        try:
            return BACKENDS[name](forest, cache, device, heads_times_size)
        except Exception as error:
            if device.type not in CHECKED or is_out_of_memory(error):
                raise
            return error

    def failure(
        self,
        name: str,
        made: TreeAttention | Exception,
        given: tuple[Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        *,
        sinks: bool,
        below_path: bool,
    ) -> str | None:
        device = given[0].device
        if device.type not in CHECKED:
            return None
        from treetrain.kernels.attention_check import failure_of_backend

        if isinstance(made, Exception):  # an import or a compiler failed
            return failure_of(f"tree attention {name!r}", (str(device),), given[0].dtype, _raising(made))
        return failure_of_backend(made.name, BACKENDS[name], *given, spec, sinks=sinks, below_path=below_path)

    def named(self, name: str | None) -> bool:
        return (name or os.environ.get(ENVIRONMENT) or "auto") != "auto"


def _raising(error: Exception) -> Callable[[], Iterable[Run]]:
    def raises() -> Iterable[Run]:
        raise error

    return raises
