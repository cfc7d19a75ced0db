"""Activations that users' forward hooks keep from passes without graph: an error if a loss's backward reaches them.

A hook may keep an activation, and the user adds a penalty on it to the loss. Parts whose graphs are not kept are scored
without graph, so such a penalty would have no gradient, in silence. Here hooks see what they see in plain training:
autograd is on, and activations require gradients. Their backward is an error that names the hook. Code that detaches
them, for logs or probes, is not concerned.

A part whose graph is kept needs nothing: the penalty's backward frees its graph, and `Scored.backward` says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.check.stock import hook_name, is_stock
from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.tree_mode import forward_hooks, hooks_replaced


class KeptActivations(Extension):
    """Runs users' forward hooks of passes without graph on activations whose backward is an error.

    Args:
        modules: those with hooks.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        self._model = model
        self._modules = modules
        self._without_graph = False

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        def seeing(hook: Callable[..., Any]) -> Callable[..., Any]:
            return hook if is_stock(hook) else self._seeing_a_graph(hook)

        with hooks_replaced(forward_hooks(self._modules), seeing):
            yield

    def before_forward(self, model_pass: ModelPass) -> None:
        self._without_graph = not model_pass.part.graph

    def _seeing_a_graph(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *given: Any) -> Any:
            if not self._without_graph or torch.compiler.is_compiling():
                return hook(module, *given)

            def refused(x: Tensor) -> Any:
                anchor = torch.zeros((), device=x.device, requires_grad=True)
                return _Refused.apply(x.data, anchor, (hook, module, self._model))

            with torch.enable_grad():
                returned = hook(module, *(_changed(x, refused) for x in given))
            return _changed(returned, torch.Tensor.detach)

        return run


def _changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change the floating-point tensors in nested tuples; what can be written to, such as a list, stays as it is."""
    if type(value) is tuple:
        return tuple(_changed(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Refused(torch.autograd.Function):
    """An activation in the same memory, so that hooks may write to it, whose backward is an error."""

    @staticmethod
    def forward(ctx, activation: Tensor, _anchor: Tensor, place: tuple[Callable[..., Any], nn.Module, nn.Module]):
        ctx.mark_dirty(activation)
        ctx.place = place
        return activation

    @staticmethod
    def backward(ctx, _grad: Tensor):
        hook, module, model = ctx.place
        name = next((name for name, each in model.named_modules() if each is module), "a module that is gone")
        raise UnsupportedModel(
            f"what the forward hook {hook_name(hook)} on {name} has kept of a pass is part of the loss. On a tree it "
            "has the tokens of the tree, not those of rows, and no gradient: leave it out, or train without shared "
            "prefixes"
        )
