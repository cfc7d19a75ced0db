"""Compiles a model's decoder layers for tree mode.

A layer's norms, rotary embedding, residuals and MLP read and write the hidden states a dozen times; compiled, a few
times. They do not depend on the tree. Tree attention does, and its arguments are new objects for every part, so it runs
outside of the compiled graphs (`tree_mode` disables the compiler around it). Lengths are dynamic: one compilation of
each kind of layer serves all parts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

COMPILATIONS = 64
"""Recompilation limit; PyTorch counts kinds of layers, dtypes and passes with and without gradients together."""


@contextmanager
def compiled_layers(model: nn.Module, compiled: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Run decoder layers compiled within the block. Enter it last, when all hooks of the pass are in place.

    Args:
        compiled: the caller's cache of compiled modules; it keeps the model alive.

    A hook or a replaced forward (a router that records its choices, a recurrent layer) may run other code in every
    pass. A layer with one inside, or with a module that the user has compiled, is not compiled as a whole; those of its
    children that have none are. So are the children of a checkpointed layer: in recent releases of transformers its
    forward calls the checkpointing function, and PyTorch compiles nothing that breaks the graph inside of that.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=COMPILATIONS))
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                whole = _is_plain(layer) and not (layer.gradient_checkpointing and layer.training)
                for module in [layer] if whole else filter(_is_plain, layer.children()):
                    if module not in compiled:
                        compiled[module] = torch.compile(module._call_impl, dynamic=True)
                    stack.callback(setattr, module, "_compiled_call_impl", None)
                    module._compiled_call_impl = compiled[module]
        yield


def _is_plain(module: nn.Module) -> bool:
    return not any(
        "forward" in vars(inner)
        or inner._compiled_call_impl is not None
        or inner._forward_hooks
        or inner._forward_pre_hooks
        or inner._backward_hooks
        or inner._backward_pre_hooks
        for inner in module.modules()
    )
