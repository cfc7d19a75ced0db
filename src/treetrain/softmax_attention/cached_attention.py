"""Tree attention as one autograd Function: a backend computes, and the KV cache takes and gives keys and gradients."""

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.softmax_attention.kv_cache import Inputs, KVCacheView
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec


class CachedAttention(ABC):
    """A backend that computes its own gradients; one autograd Function moves what the cache holds."""

    name: str
    cache: KVCacheView | None
    """Reads the path above and stores the forest's own keys; None for whole trees."""

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
        return _Attend.apply(query, key, value, sinks, self, scale, layer, spec)  # type: ignore[return-value]

    @abstractmethod
    def takes(self, query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        """Whether the backend has kernels for a layer's dtype, head sizes and spec."""

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
    def forward(ctx, query, key, value, sinks, backend: CachedAttention, scale: float, layer, spec: AttentionSpec):
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
        return (*own, None, None, None, None)
