"""`tt.attention`: softmax attention of packed tokens along the paths of their tree, by any backend.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.softmax_attention.backends import make_attention, using
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.tree.attention_range import AttentionRange
from treetrain.tree.layout import PackedLayout


class AttentionTree:
    """A packed forest as attention takes it, with all that its layers share (schedules, masks, tile lists).

    Args:
        layout: N tokens.
        cache: reads the path above the forest and stores the forest's own keys; None for whole trees.
    """

    def __init__(self, layout: PackedLayout, cache: KVCacheView | None = None):
        self.num_tokens = layout.num_tokens
        self.layer_calls: Counter[Any] = Counter()
        """Number of calls by each layer."""
        self._cache = cache
        self._forest = Forest(
            ends=layout.ends,
            depth=layout.positions,
            segment_start=layout.segment_start,
            segment_parent=layout.segment_parent,
        )
        self._backends: dict[tuple[str | None, torch.device], Any] = {}

    @property
    def calls(self) -> Counter[str]:
        """Forward calls by the backend that ran."""
        return sum((backend.calls for backend in self._backends.values()), Counter())

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
        return self._backend(query, backend)(query, key, value, scale, layer, spec, sinks)

    def _backend(self, query: Tensor, name: str | None) -> Any:
        """The backend of that name; for None the one that the first call without a name chose."""
        place = name, query.device
        if place not in self._backends:
            with nullcontext() if name is None else using(name):
                size = query.shape[1] * query.shape[2]
                self._backends[place] = make_attention(self._forest, query.device, size, self._cache)
        return self._backends[place]

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
        backend: "rectangles" (CPUs), "flex", "flex-flash", "triton" or "varlen" (GPUs). None chooses by device, or what
            the environment variable TREETRAIN_ATTENTION names.

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
