"""Watches the passes that a model makes: which tokens, with or without graph, forward and backward."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.check import first_use
from treetrain.core.attention.kv_cache import Buffer, RowBuffers
from treetrain.core.engine import executor
from treetrain.core.tree.token_tree import build_tree


def unique_ids(rows: list[list[int]]) -> list[list[int]]:
    """Rows that share the same prefixes, with an id of its own for every tree token."""
    tree = build_tree(rows)
    return [tree.path(k).tolist() for k in range(len(rows))]


def unnoticed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook as one of PyTorch's own: users' hooks see a graph in passes that have none (`kept_activations.py`)."""
    function = getattr(hook, "__func__", hook)
    there = {**function.__globals__, "__name__": "torch"}
    made = types.FunctionType(function.__code__, there, function.__name__, function.__defaults__, function.__closure__)
    return types.MethodType(made, hook.__self__) if hasattr(hook, "__self__") else made


@dataclass
class Passes:
    """Ids of the tokens of every pass, in order."""

    graph: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    backward: list[list[int]] = field(default_factory=list)


@contextmanager
def watched(model: nn.Module) -> Iterator[Passes]:
    """Record every forward of the embedding, and every backward that reaches its output; none of a comparison."""
    seen = Passes()

    def hook(_module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        ids = args[0].flatten().tolist()
        (seen.graph if torch.is_grad_enabled() else seen.plain).append(ids)
        if out.requires_grad:
            out.register_hook(lambda _grad: seen.backward.append(ids))

    handle = model.get_input_embeddings().register_forward_hook(unnoticed(hook))  # type: ignore[operator]
    try:
        with mock.patch.object(first_use, "compare_first_use", lambda engine, call, tree: None):
            yield seen
    finally:
        handle.remove()


def cache_bytes(cache: RowBuffers) -> int:
    """Bytes of all buffers that a cache has made so far."""
    tensors = [t for buffer in cache._buffers.values() for t in (buffer.value, buffer.grad)]
    return sum(t.nbytes for t in tensors if t is not None)


class WatchedCache(executor.KVCache):
    """A cache that notes what is asked of it; `made` lists all of them."""

    made: list["WatchedCache"] = []  # noqa: RUF012 - executors make them out of sight

    def __init__(self, rows: int, device: torch.device, **options: Any):
        super().__init__(rows, device, **options)
        self.first_rows, self.reserved = rows, [0]
        self.made_at: dict[Any, int] = {}
        self.views: list[tuple[np.ndarray, np.ndarray]] = []
        self.made.append(self)

    def clear(self, rows: slice) -> None:
        self.reserved.append(rows.stop)
        super().clear(rows)

    def buffer(self, key: Any, like: Tensor) -> Buffer:
        found = super().buffer(key, like)
        self.made_at.setdefault(key, found.value.data_ptr())
        return found

    def view_of_rows(self, path_rows: np.ndarray, own_rows: np.ndarray):
        self.views.append((path_rows, own_rows))
        return super().view_of_rows(path_rows, own_rows)
