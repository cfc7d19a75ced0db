"""A device with little memory: passes of a model that are too large fail as an allocator would make them fail."""

import gc
import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from support.passes import unique_ids, unnoticed

TRUNK = list(range(10))
IDS = unique_ids([[*TRUNK, 20, 21, 22], [*TRUNK, 20, 23, 24], [*TRUNK, 25, 26], [*TRUNK[:4], 27, 28, 29], [30, 31, 32]])
"""Rows whose passes are told apart by their ids."""

ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


@contextmanager
def freed_at_once(model: nn.Module) -> Iterator[None]:
    """Without gradients from before, and with nothing that waits for the garbage collector."""
    model.zero_grad()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Graph:
    """Lives as long as the graph of a pass."""


class Shortage:
    """Makes passes fail while it is entered.

    Args:
        graph: most tokens of a forward with graph.
        plain: most tokens of a forward without one.
        alive: most tokens of all graphs that are alive at once.
        total: the same, and the tokens of a forward without graph beside them.
        backward: most tokens of a pass that goes backward.
        backward_alive: most tokens of all graphs that are alive when one goes backward.
    """

    def __init__(self, model: nn.Module, error: str = "cuda", **limits: int | None):
        self.model, self.error = model, ERRORS[error]
        self.limits = {
            name: limits.get(name) for name in ("graph", "plain", "alive", "total", "backward", "backward_alive")
        }
        assert limits.keys() <= self.limits.keys()
        self.alive, self.failures, self.leaks = 0, 0, 0
        self.alive_in_backward: list[int] = []
        self._handles: list[Any] = []
        self._failed: weakref.ref | None = None
        self._tokens, self._graph = 0, None

    def __enter__(self) -> "Shortage":
        model: Any = self.model
        # A first use would compare the model within the shortage.
        self._compared = mock.patch("treetrain.check.first_use.compare_first_use", lambda engine, call, tree: None)
        self._compared.start()
        # In the middle: the first layer has run, or has not yet gone backward.
        self._handles = [
            model.get_input_embeddings().register_forward_hook(unnoticed(self._begin)),
            model.model.layers[0].register_forward_hook(unnoticed(self._in_the_middle)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._compared.stop()
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        if self._failed is not None and self._failed() is not None:
            self.leaks += 1
        self._failed, self._tokens, self._graph = None, args[0].numel(), None
        if out.requires_grad:
            graph, tokens = _Graph(), self._tokens
            self.alive += tokens
            weakref.finalize(graph, self._freed, tokens)
            out.register_hook(lambda _grad, graph=graph: None)
            self._graph = weakref.ref(graph)

    def _freed(self, tokens: int) -> None:
        self.alive -= tokens

    def _in_the_middle(self, _module: nn.Module, _args: tuple, out: torch.Tensor) -> None:
        graph, tokens = self._graph, self._tokens
        if graph is None:
            self._check(graph, plain=tokens, total=self.alive + tokens)
            return
        self._check(graph, graph=tokens, alive=self.alive, total=self.alive)
        out.register_hook(lambda _grad: self._check(graph, backward=tokens, backward_alive=self.alive))

    def _check(self, owner: weakref.ref | None, /, **sizes: int) -> None:
        limits = {name: self.limits[name] for name in sizes}
        if any(limit is not None and sizes[name] > limit for name, limit in limits.items()):
            self.failures += 1
            if "backward" in sizes:
                self.alive_in_backward.append(self.alive)
            self._failed = owner
            raise self.error()


def named_budget(caught: list[warnings.WarningMessage]) -> int:
    """The budget that the only warning names."""
    assert [w.category for w in caught] == [RuntimeWarning], [str(w.message) for w in caught]
    found = re.fullmatch(
        r"out of memory (.*)\. The result is exact.*budget=(\d+) would have avoided this", str(caught[0].message)
    )
    assert found, str(caught[0].message)
    return int(found[2])
