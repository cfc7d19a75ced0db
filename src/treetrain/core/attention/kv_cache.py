"""The KV cache: keys and values that a part passes to the parts below it, and the gradients that come back.

`CachedAttention` is a layer's attention as one autograd Function: a backend computes, and the cache takes and gives
keys and gradients.

Keys and values of exported tokens are rows of buffers that all parts reuse. Each buffer has an accumulator for its
gradient in float32 (float64 for a float64 model). In forward a part reads the rows of its root path and writes its own.
In backward it adds to the gradients of the path and collects those of its own tokens. Autograd sees none of this, so it
also works under activation checkpointing, which runs a layer's forward again.

But autograd runs a function backward only if one of its inputs requires a gradient. Where a part's own tokens depend
on nothing trained, the keys of its path still may: they may be those of an image, whose encoder is trained below frozen
layers. So the cache remembers which layers' rows need gradients, and whatever reads them gets an input that requires
one (`GradientNeeds`).

Shape letters: C rows, N tokens of a part, P tokens on a path, K = P + N keys, X exported tokens, H query heads, G
key/value heads, D size of query and key heads, V size of value heads.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec
from treetrain.core.device_arrays import Rows, add_rows, put_rows, rows_on, take_rows
from treetrain.core.errors import UnsupportedModel


@dataclass(slots=True)
class Buffer:
    """One tensor of one layer; the gradient is None if no backward follows."""

    value: Float[Tensor, "C ..."]
    grad: Float[Tensor, "C ..."] | None


class GradientNeeds:
    """Which keys of a cache hold rows whose gradients a part above needs.

    A pass with graph says by its tensors whether they are needed. A pass without graph cannot (a prefill, or a layer
    under reentrant checkpointing), so `may_need` decides there.

    Args:
        may_need: whether rows of a key that were written without graph may need gradients.
    """

    def __init__(self, may_need: Callable[[Any], bool] = lambda _key: True):
        self._may_need = may_need
        self.needed = set[Hashable]()
        """The keys with rows that need gradients."""
        self._assumed_not = set[Hashable]()
        self._read_as_constants = set[Hashable]()
        """Keys of which some pass took rows for constants because `may_need` said so."""

    def written(self, key: Hashable, *own: Tensor) -> None:
        """Remember what a pass writes.

        Args:
            own: what the rows are computed from.

        Raises:
            UnsupportedModel: the rows need gradients, and passes that read them have run without any.
        """
        if not torch.is_grad_enabled():
            (self.needed if self._may_need(key) else self._assumed_not).add(key)
        elif any(x.requires_grad for x in own):
            if key in self._read_as_constants:
                raise UnsupportedModel(
                    f"the cache of layer {key!r} needs gradients, though no trained parameter of the model comes "
                    "before this layer: what is trained there is not among the model's parameters, or a layer after "
                    "it. Register it as a parameter of the model (model.register_parameter)."
                )
            self.needed.add(key)

    def input_for(self, key: Hashable, *own: Tensor, needed: Collection[Hashable]) -> Tensor | None:
        """An input that requires a gradient, for a function that reads rows of a key; None if these need none.

        Args:
            own: the other inputs of the function.
            needed: the keys whose rows needed gradients when the pass began. (Activation checkpointing calls a layer
                again later, and must find the same graph.)
        """
        if not torch.is_grad_enabled():
            return None
        if key in needed:
            return own[0].new_empty(0, requires_grad=True)
        if key in self._assumed_not and not any(x.requires_grad for x in own):
            self._read_as_constants.add(key)
        return None


class RowBuffers:
    """Tensors of all layers by key, with rows of their own for every token that is held.

    Rows are given to tokens like a stack: on the way down a path, and back on the way up.

    Args:
        rows: C, the number of tokens held at once; `clear` makes room for more.
        gradients: whether a backward will follow.
        tokens: M, the number of tokens of the plan.
        may_need: see `GradientNeeds`.
    """

    def __init__(
        self, rows: int, *, gradients: bool, tokens: int = 0, may_need: Callable[[Any], bool] = lambda _key: True
    ):
        self._rows, self._gradients, self._in_use = rows, gradients, 0
        self.needs = GradientNeeds(may_need if gradients else lambda _key: False)
        self.row_of = np.full(tokens, -1, np.int64)
        """int64 [M]: the row of each token, -1 for those that are not held."""
        self._buffers: dict[Hashable, Buffer] = {}

    def allocate(self, tokens: Int64[np.ndarray, " X"]) -> None:
        """Give the next free rows to these tokens; the gradients of the rows start at 0."""
        rows = slice(self._in_use, self._in_use + len(tokens))
        self.clear(rows)
        self.row_of[tokens] = np.arange(rows.start, rows.stop)
        self._in_use = rows.stop

    def release(self, tokens: Int64[np.ndarray, " X"]) -> None:
        """Free the rows of these tokens, the last ones that were allocated."""
        self.row_of[tokens] = -1
        self._in_use -= len(tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers made so far."""
        tensors = [t for buffer in self._buffers.values() for t in (buffer.value, buffer.grad)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def clear(self, rows: slice) -> None:
        """Zero the gradients of newly allocated rows; grows the buffers, with their contents, if they have fewer."""
        grow = rows.stop > self._rows
        self._rows = max(self._rows, rows.stop)
        for buffer in self._buffers.values():
            if grow:
                buffer.value = _grown(buffer.value, self._rows)
                buffer.grad = None if buffer.grad is None else _grown(buffer.grad, self._rows)
            if buffer.grad is not None:
                buffer.grad[rows].zero_()

    def buffer(self, key: Hashable, like: Float[Tensor, "_ ..."]) -> Buffer:
        """The buffer of a key, allocated at its first call for rows like these."""
        if key not in self._buffers:
            shape, wide = (self._rows, *like.shape[1:]), torch.promote_types(like.dtype, torch.float32)
            grad = torch.zeros(shape, dtype=wide, device=like.device) if self._gradients else None
            self._buffers[key] = Buffer(torch.zeros(shape, dtype=like.dtype, device=like.device), grad)
        return self._buffers[key]

    def value(self, key: Hashable) -> Tensor:
        """The rows of a key."""
        return self._buffers[key].value

    def grad(self, key: Hashable) -> Tensor:
        """The accumulated gradients of a key."""
        grad = self._buffers[key].grad
        assert grad is not None
        return grad


class KVCache(RowBuffers):
    """The keys and values of all layers."""

    def __init__(self, rows: int, device: torch.device, **options: Any):
        super().__init__(rows, **options)
        self.device = device

    def view(self, path: Int64[np.ndarray, " P"], tokens: Int64[np.ndarray, " N"]) -> "KVCacheView | None":
        """A view for one pass over tokens that continue a path; None if the pass neither reads nor writes."""
        own = self.row_of[tokens]
        return self.view_of_rows(self.row_of[path], own) if len(path) or (own >= 0).any() else None

    def view_of_rows(self, path_rows: Int64[np.ndarray, " P"], own_rows: Int64[np.ndarray, " N"]) -> "KVCacheView":
        """A view of the rows that one pass reads (the root path, from the root down) and writes (-1 is none)."""
        exported = np.flatnonzero(own_rows >= 0)
        return KVCacheView(self, path_rows, exported, own_rows[exported])


class KVCacheView:
    """One pass's view of the cache. Made by `KVCache.view`."""

    def __init__(self, cache: KVCache, path_rows: np.ndarray, exported: np.ndarray, exported_rows: np.ndarray):
        self.path_tokens = len(path_rows)
        self.exports = len(exported) > 0
        self._cache = cache
        self._needed = frozenset(cache.needs.needed)
        self._path_rows, self._path = path_rows, rows_on(cache.device, path_rows)
        self._tails: dict[int, Rows] = {}
        self._own, self._own_rows = (rows_on(cache.device, rows) for rows in (exported, exported_rows))

    @property
    def row_of(self) -> Int64[np.ndarray, " M"]:
        """The row of every token of the plan, -1 for those that are not held."""
        return self._cache.row_of

    def gradient_input(self, layer: Hashable, *own: Tensor) -> Tensor | None:
        """See `GradientNeeds.input_for`; called before `read` and `write`, with the layer's own tensors."""
        needs = self._cache.needs
        made = needs.input_for(layer, *own, needed=self._needed) if self.path_tokens else None
        if self.exports:
            needs.written(layer, *own)
        return made

    def read(
        self, layer: Hashable, key: Float[Tensor, "N G D"], value: Float[Tensor, "N G V"], tail: int | None = None
    ) -> tuple[Float[Tensor, "P G D"], Float[Tensor, "P G V"]]:
        """Keys and values of the path (or its last `tail` tokens); views if rows are consecutive."""
        rows = self._rows(tail)
        keys, values = self._cache.buffer((layer, "key"), key), self._cache.buffer((layer, "value"), value)
        return take_rows(keys.value, rows), take_rows(values.value, rows)

    def _rows(self, tail: int | None) -> Rows:
        if tail is None or tail == self.path_tokens:
            return self._path
        if tail not in self._tails:
            self._tails[tail] = rows_on(self._cache.device, self._path_rows[self.path_tokens - tail :])
        return self._tails[tail]

    def write(self, layer: Hashable, key: Float[Tensor, "N G D"], value: Float[Tensor, "N G V"]) -> None:
        """Store the exported tokens' rows of keys and values for the parts below."""
        if self.exports:
            for name, x in (("key", key), ("value", value)):
                put_rows(self._cache.buffer((layer, name), x).value, self._own_rows, take_rows(x, self._own))

    def add_path_gradients(
        self,
        layer: Hashable,
        grad_key: Float[Tensor, "P G D"],
        grad_value: Float[Tensor, "P G V"],
        tail: int | None = None,
    ) -> None:
        """Add gradients (of the whole path, or of its last `tail` tokens) to the accumulators of the path."""
        rows = self._rows(tail)
        add_rows(self._cache.grad((layer, "key")), rows, grad_key)
        add_rows(self._cache.grad((layer, "value")), rows, grad_value)

    def collect(self, layer: Hashable, grad_key: Float[Tensor, "N G D"], grad_value: Float[Tensor, "N G V"]) -> None:
        """Add the accumulated gradients from the parts below to the part's own, in place."""
        if self.exports:
            add_rows(grad_key, self._own, take_rows(self._cache.grad((layer, "key")), self._own_rows))
            add_rows(grad_value, self._own, take_rows(self._cache.grad((layer, "value")), self._own_rows))


class Inputs(NamedTuple):
    """The tensors of one layer's attention over N tokens below the P tokens of their path that the layer sees."""

    query: Float[Tensor, "N H D"]
    key: Float[Tensor, "N G D"]
    value: Float[Tensor, "N G V"]
    sinks: Float[Tensor, " H"] | None
    """Logits of an extra key without a value."""
    path: tuple[Float[Tensor, "P G D"], Float[Tensor, "P G V"]] | None
    """Keys and values of the path; None if the layer sees none of it."""

    def below_path(self) -> tuple[Float[Tensor, "K G D"], Float[Tensor, "K G V"]]:
        """Keys and values of the path, then the tokens' own."""
        if self.path is None:
            return self.key, self.value
        return torch.cat([self.path[0], self.key]), torch.cat([self.path[1], self.value])

    def gradients(
        self, query: Tensor, key: Float[Tensor, "K G D"], value: Float[Tensor, "K G V"], sinks: Tensor | None
    ) -> "Inputs":
        """The gradients of the inputs, from those of `below_path`."""
        if self.path is None:
            return Inputs(query, key, value, sinks, None)
        count = len(self.path[0])
        return Inputs(query, key[count:], value[count:], sinks, (key[:count], value[:count]))


def sink_gradient(
    sinks: Float[Tensor, " H"],
    grad_out: Float[Tensor, "N H V"],
    out: Float[Tensor, "N H V"],
    lse: Float[Tensor, "N H"],
) -> Float[Tensor, " H"]:
    """Gradient of the sinks: a sink takes the weight exp(sink - lse) and has no value."""
    wide = lse.dtype
    share = (sinks.to(wide) - lse).exp_()
    return -(share * (grad_out.to(wide) * out).sum(-1)).sum(0).to(sinks.dtype)


class AttentionCall(Protocol):
    """Tree attention over the packed tokens of a forest, as a layer calls it."""

    @abstractmethod
    def __call__(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G V"],
        scale: float,
        layer: Hashable = 0,
        spec: AttentionSpec = PLAIN_ATTENTION,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "N H V"]:
        """`layer` is the key of the layer's cache; every sink takes a share of a query's weights and has no value."""
        ...


class TreeAttention(AttentionCall, Protocol):
    """A backend: the attention of one forest, for every layer of a run that it takes."""

    name: str
    serves_sinks: bool

    @abstractmethod
    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        """Whether the backend has kernels for a layer's dtype, head sizes and spec."""
        ...


# ---- attention over the cache, as one autograd Function


class CachedAttention(TreeAttention):
    """A backend that computes its own gradients; one autograd Function moves what the cache holds."""

    serves_sinks = True
    cache: KVCacheView | None
    """Reads the path above and stores the forest's own keys; None for whole trees."""

    def __call__(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None) -> Tensor:
        above = None if self.cache is None else self.cache.gradient_input(layer, query, key, value)
        return _Attend.apply(query, key, value, sinks, above, self, scale, layer, spec)  # type: ignore[return-value]

    @abstractmethod
    def path_seen(self, spec: AttentionSpec) -> int:
        """The number of last tokens of the path that some token of the forest sees."""

    @abstractmethod
    def forward(self, given: Inputs, scale: float, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """The output [N, H, V] in the dtype of the query, and its log-sum-exp with sinks, in the backend's layout."""

    @abstractmethod
    def backward(
        self, grad_out: Tensor, given: Inputs, out: Tensor, lse: Tensor, scale: float, spec: AttentionSpec
    ) -> Inputs:
        """The gradients of the inputs. With a cache, those of keys and values are in float32 or wider."""

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: Hashable, spec: AttentionSpec
    ) -> Inputs:
        """The inputs with what the layer sees of the path."""
        seen = self.path_seen(spec)
        path = None if self.cache is None or not seen else self.cache.read(layer, key, value, seen)
        return Inputs(query, key, value, sinks, path)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, _above, backend: CachedAttention, scale: float, layer, spec):
        if backend.cache is not None:
            backend.cache.write(layer, key, value)
        out, lse = backend.forward(backend.inputs(query, key, value, sinks, layer, spec), scale, spec)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call = backend, scale, layer, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        *tensors, out, lse = ctx.saved_tensors
        backend, scale, layer, spec = ctx.call
        given = backend.inputs(*tensors, layer, spec)
        grads = backend.backward(grad_out.to(given.query.dtype), given, out, lse, scale, spec)
        if backend.cache is not None:
            if grads.path is not None:
                backend.cache.add_path_gradients(layer, *grads.path, backend.path_seen(spec))
            backend.cache.collect(layer, grads.key, grads.value)
        own = (None if x is None else grad.to(x.dtype) for x, grad in zip(tensors, grads))
        return (*own, None, None, None, None, None)


# ---- rows of buffers


def _grown(tensor: Tensor, rows: int) -> Tensor:
    grown = tensor.new_zeros((rows, *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
