"""Gradients of a whole run, and hooks of parameters that see them once.

A run of several parts has a backward for each. A hook on a parameter would see each part's gradient, where in plain
training it sees one. So hooks are set aside while parts run, and run once on the sum.

FSDP2 puts gradients into the ``.grad`` of its shards by itself, not by autograd. It runs the hooks that come after the
accumulation, and no hooks on the gradients themselves. With trees it is the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.engine.extension import Extension


class HooksOnce(Extension):
    """Runs hooks once, on the sum of the gradients of all backwards of a run, unless the run fails.

    Args:
        parameters: all that get gradients.
        shards: the parameters among them whose gradients FSDP2 puts into ``.grad``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: Sequence[nn.Parameter] = ()):
        self._parameters, self._shards = parameters, {id(p) for p in shards}

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        # Hooks are looked for here, since tensor parallelism changes them within the block around this one.
        parameters = [p for p in self._parameters if self._has_hooks(p)] if graph else []
        with gradients_aside(parameters) as totals:
            yield
        for p, total in zip(parameters, totals):
            if total is None:
                continue
            if id(p) not in self._shards:
                p.backward(total)  # as if a backward had just computed it: hooks run, and it is added to .grad
                continue
            p.grad = total if p.grad is None else p.grad.add_(total)
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                hook(p)

    def _has_hooks(self, p: nn.Parameter) -> bool:
        return bool(p._post_accumulate_grad_hooks or (p._backward_hooks and id(p) not in self._shards))
