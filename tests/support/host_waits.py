"""A step on the meta device, where whatever would make the host wait for a GPU raises.

Tensors there have shapes and no values, so `.item()`, `.tolist()`, `bool()`, `.cpu()`, `nonzero` and boolean masks
raise by themselves. What a GPU would also wait for, and meta would not, is looked for here: a copy from the host that
is not said to be asynchronous, a tensor made of Python numbers, and an index that lies on the host.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treetrain.engine import runtime
from treetrain.softmax_attention.attention import AttentionTree, Choice
from treetrain.softmax_attention.kv_cache import cached_keys

META = torch.device("meta")


MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class _Made(TorchFunctionMode):
    """Numbers of the host that become a tensor there, which no dispatcher sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        there = func in MADE_OF_NUMBERS and made.device == META
        assert not there or (isinstance(args[0], Tensor) and func is torch.as_tensor), f"waits: {func} of the host's"
        return made


class _Copied(TorchDispatchMode):
    """Copies from the host that are waited for, and what reads its tensors where they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        from_host = [x for x in tensors if x.device.type == "cpu" and x.dim()]
        there = any(x.device.type == "meta" for x in tensors) or torch.device(kwargs.get("device") or "cpu") == META
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert not (copies and from_host and there and not kwargs.get("non_blocking")), f"waits: {func} from the host"
        assert copies or not (from_host and there), f"waits: {func} reads a tensor of the host"
        return func(*args, **kwargs)


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Raise where a GPU in place of meta would be waited for, and meta itself does not see it."""
    with _Made(), _Copied():
        yield


class StandIn:
    """In place of tree attention: the right shapes, and all of the cache."""

    name = "stand-in"

    def __init__(self, cache: Any):
        self._cache = cache

    def __call__(self, query, key, value, scale, layer=0, spec=None, sinks=None):
        if self._cache is not None:
            key, value = cached_keys(key, value, self._cache, layer, self._cache.path_tokens)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Let steps run on meta; everything that is put out of the way for it is named here."""
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, found: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, found))

        # What meta has not: a backend, free memory, autocast.
        replace(runtime, "choose_backend", lambda device: Choice("stand-in", "meta"))
        replace(AttentionTree, "backend", lambda tree, *_: StandIn(tree._cache))
        replace(runtime, "free_bytes", lambda device: None)
        replace(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
        replace(torch, "is_autocast_enabled", lambda kind=None: False)
        replace(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        stack.enter_context(noticed())
        yield
