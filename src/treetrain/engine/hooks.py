"""Hooks on parameters see one gradient per backward, however many parts it took."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Deliver(torch.autograd.Function):
    """A gradient as if a backward had just made it."""

    @staticmethod
    def forward(ctx, parameter: Tensor, gradient: Tensor):
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


def deliver(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Hand a gradient to autograd: its hooks run, and it is added to ``.grad``."""
    _Deliver.apply(parameter, gradient).backward()  # type: ignore[union-attr]


@contextmanager
def hooks_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """No hook of these parameters runs in the block."""
    found: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for hooks in (hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)):
        if hooks:
            found.append((hooks, dict(hooks)))
            hooks.clear()  # in place: autograd holds on to the dictionary itself
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


@contextmanager
def hooks_once(*modules: nn.Module) -> Iterator[None]:
    """Gradients that backwards in the block leave reach the hooks of their parameters once, added up, at its end.

    After an error the hooked parameters have the gradients from before.
    """
    parameters = {p: None for module in modules for p in module.parameters()}
    hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
    before = [p.grad for p in hooked]
    for p in hooked:
        p.grad = None
    totals: list[Tensor | None] = []
    try:
        with hooks_aside(hooked):
            yield
            totals = [p.grad for p in hooked]
    finally:
        for p, grad in zip(hooked, before):
            p.grad = grad
    for p, total in zip(hooked, totals):
        if total is not None:
            deliver(p, total)
