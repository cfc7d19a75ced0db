"""Gradients of a whole run, and hooks of parameters that see them once.

A run of several parts has a backward for each. A hook on a parameter would see each part's gradient, where in plain
training it sees one. So hooks are set aside while parts run, and run once on the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from treetrain.engine.extension import Extension


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of a block in the yielded list. No hook of the parameters runs.

    ``.grad`` is None at the start of the block; the old gradients are restored after it.
    """
    before, set_aside, found = [p.grad for p in parameters], [], []
    for p in parameters:
        p.grad = None
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            if hooks:
                set_aside.append((hooks, dict(hooks)))
                hooks.clear()  # in place: autograd keeps a reference to the dictionary
    try:
        yield found
        found += [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
        for hooks, own in set_aside:
            hooks.update(own)


def gradients_of(parameters: Sequence[nn.Parameter], run: Callable[[], None]) -> tuple[Tensor | None, ...]:
    """Return the gradients that a call leaves in ``.grad``, and restore ``.grad``. No hook of the parameters runs."""
    with gradients_aside(parameters) as found:
        run()
    return tuple(found)


def hooked(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that have hooks on their gradients."""
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


class HooksOnce(Extension):
    """Runs hooks once, on the sum of the gradients of all backwards of a run, unless the run fails."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        # Looked for here: tensor parallelism changes hooks within the block around this one.
        parameters = hooked(self._parameters) if graph else []
        with gradients_aside(parameters) as totals:
            yield
        for p, total in zip(parameters, totals):
            if total is not None:
                p.backward(total)  # as if a backward had just computed it: hooks run, and it is added to .grad
