"""Softmax attention of packed tokens along the paths of their tree, and the choice of its backend.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.core.attention.kv_cache import KVCacheView, TreeAttention
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.tree.layout import FULL

Constructor = Callable[[Forest, KVCacheView | None, torch.device, int], TreeAttention | None]
"""Constructs a backend for a forest, a cache, a device, and the query heads times their size; None: it does not serve
the forest."""


class Backends:
    """The implementations of tree attention that a run may use: here rectangles by PyTorch's own kernels.

    `kernels/backends.py` has those of GPUs.
    """

    def order(self, device: torch.device, name: str | None) -> tuple[str, ...]:
        """The names of the backends for a device, the preferred one first.

        Args:
            name: the backend that the caller wants; None leaves the choice open.

        Raises:
            ValueError: the named backend does not exist, or cannot run on the device.
            NotImplementedError: a device that no backend supports.
        """
        if name not in (None, "rectangles"):
            raise ValueError(f"no tree attention is named {name!r} here; there is rectangles")
        return ("rectangles",)

    def make(
        self, name: str, forest: Forest, cache: KVCacheView | None, device: torch.device, heads_times_size: int
    ) -> TreeAttention | Exception | None:
        """Construct a backend for all layers of a run; None if it does not serve the forest."""
        return RectangleAttention(forest, cache=cache, heads_times_size=heads_times_size)

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
        """Why a backend must not serve a layer with such queries, keys and values; None if it may."""
        return None

    def named(self, name: str | None) -> bool:
        """Whether the user has chosen the backend, so that no other takes its place."""
        return name is not None


STOCK = Backends()
"""The backends without kernels for GPUs."""


class AttentionTree:
    """The attention of a packed forest, with the data that all layers share (schedules, masks, tile lists).

    Args:
        forest: N tokens.
        cache: reads the path above the forest and stores the forest's own keys; None for whole trees.
        backends: the implementations to choose from.
    """

    def __init__(self, forest: Forest, cache: KVCacheView | None = None, backends: Backends = STOCK):
        self.num_tokens = len(forest.ends)
        self.layer_calls: Counter[Hashable] = Counter()
        """Number of calls by each layer."""
        self.calls: Counter[str] = Counter()
        """Forward calls by the backend that ran."""
        self.requires_grad = False
        """Whether the output of some call did."""
        self._forest, self._cache, self._backends = forest, cache, backends
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
        """See `treetrain.attention`."""
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # A normalised query may be float32 while the value is bfloat16. Cast all, as stock attention does.
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        if self._cache is not None and layer is None:
            raise ValueError("this tree continues other tokens or is continued: give layer=, the number of the layer")
        self.layer_calls[layer] += 1
        if not self.num_tokens:  # kernels refuse empty tensors; the result still belongs to the graph
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
            # So that kernels without windows, which are the faster ones, serve the layer.
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
            self._order[place] = self._backends.order(query.device, name)
        failures = []
        below_path = self._cache is not None and self._cache.path_tokens > 0
        for candidate in self._order[place]:
            made = self._make(candidate, query)
            if made is None or not (isinstance(made, Exception) or made.takes(query, value, spec)):
                continue
            if sinks is not None and not (isinstance(made, Exception) or made.serves_sinks):
                continue
            failure = self._backends.failure(
                candidate, made, (query, key, value), spec, sinks=sinks is not None, below_path=below_path
            )
            if failure is None:
                assert not isinstance(made, Exception)
                return made
            failures.append(f"{candidate!r} {failure}")
            if self._backends.named(name):
                raise RuntimeError(
                    f"tree attention {candidate!r} {failure}. It was chosen by name (TREETRAIN_ATTENTION or backend=): "
                    "leave the choice open, and the next one takes its place"
                )
        raise RuntimeError(
            f"no tree attention can run on {query.device} with {query.dtype} and heads of {query.shape[2]}: "
            f"{'; '.join(failures) or 'none takes this layer'}. Please report this with the rows of "
            "`python benchmarks/quarter_hour.py --only right --out rows`"
        )

    def _make(self, name: str, query: Tensor) -> TreeAttention | Exception | None:
        place = name, query.device
        if place not in self._made:
            size = query.shape[1] * query.shape[2]
            self._made[place] = self._backends.make(name, self._forest, self._cache, query.device, size)
        return self._made[place]
