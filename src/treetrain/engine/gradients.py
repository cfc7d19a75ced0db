"""Gradients on their way to ``.grad``: buffers, hooks that run once per step, and the rollback of a failed step.

Autograd would make a new [vocabulary, hidden] gradient of embedding and head in every part, and add it to ``.grad``: as
much traffic per part as all layers together. Here every part adds to one buffer per matrix (one for both where they are
tied). Autograd gets the sum once, at the end, so that hooks on the parameters see one gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.engine.distributed import drop_waiting_gradients, waiting_gradients
from treetrain.engine.memory import StepOutOfMemory
from treetrain.models.tree_mode import replaced_forward

T = TypeVar("T")


class _Deliver(torch.autograd.Function):
    """Gives a parameter a gradient as if a backward had just computed it."""

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
    """Hand a gradient to autograd: the parameter's hooks run, and it is added to ``.grad``."""
    _Deliver.apply(parameter, gradient).backward()  # type: ignore[union-attr]


@contextmanager
def hooks_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """No hook of these parameters runs in the block."""
    set_aside: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for hooks in (hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)):
        if hooks:
            set_aside.append((hooks, dict(hooks)))
            hooks.clear()  # in place: autograd holds on to the dictionary itself
    try:
        yield
    finally:
        for hooks, before in set_aside:
            hooks.update(before)


@contextmanager
def hooks_once(*modules: nn.Module) -> Iterator[None]:
    """Run hooks once, at the end of the block, on the sum of all gradients of its backwards.

    After an error, the hooked parameters have their old gradients.
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


def gradients_of(parameters: Sequence[nn.Parameter], run: Callable[[], None]) -> tuple[Tensor | None, ...]:
    """Return the gradients that a call leaves in ``.grad``, and restore ``.grad``. No hook of the parameters runs."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        with hooks_aside(parameters):
            run()
        return tuple(p.grad for p in parameters)
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad


class Rollback:
    """Undoes the gradients of a failed step, or reports that it cannot. Create it before the step.

    Args:
        parameters: all that the step may add gradients to.
        modules: what FSDP2 may have sharded.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *modules: nn.Module | None):
        self._parameters, self._modules = parameters, modules
        self._obstacle: str | None = None
        if waiting_gradients(*modules):
            self._obstacle = (
                "gradients of earlier calls waited to be reduced (sync=False) and are dropped: begin the step again"
            )
        elif any(p.grad is not None for p in parameters):
            self._obstacle = "gradients of earlier calls lay in .grad"

    def attempt(self, run: Callable[[], T]) -> T:
        """Call a function; if it fails, gradients are restored, or the error says that they are not."""
        try:
            return run()
        except StepOutOfMemory as error:
            if error.backward_begun and self._obstacle is not None:
                raise RuntimeError(
                    f"{error}; {self._obstacle}, so the step cannot start over, and its gradients are incomplete: set "
                    f"them to None (zero_grad) and run the step again with budget={max(error.tokens // 2, 1)} or less"
                ) from error
            if error.backward_begun:
                self.undo(error)
            raise
        except BaseException as error:
            self.undo(error)
            raise

    def undo(self, error: BaseException) -> None:
        """Restore the gradients, or note on the error that this is impossible."""
        drop_waiting_gradients(*self._modules)
        if self._obstacle is None:
            for parameter in self._parameters:
                parameter.grad = None
            return
        note = f"{self._obstacle}; what this step has added to them is incomplete"
        if note not in getattr(error, "__notes__", []):
            error.add_note(note)


class GradientBuffer:
    """The gradient of one matrix, added up over parts."""

    def __init__(self, weight: nn.Parameter):
        self._weight = weight
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """[V, D] in float32 or wider, zero at first; add to it."""
        if self._total is None:
            self._total = torch.zeros_like(self._weight, dtype=torch.promote_types(self._weight.dtype, torch.float32))
        return self._total

    def deliver(self) -> None:
        """Hand the sum to autograd, as one gradient of the parameter."""
        if self._total is not None:
            deliver(self._weight, self._total.to(self._weight.dtype))
            self._total = None


class GradientBuffers:
    """The buffers of embedding and head."""

    def __init__(self) -> None:
        self._by_weight: dict[int, GradientBuffer] = {}

    def of(self, weight: Tensor) -> GradientBuffer | None:
        """The buffer of a matrix; None where autograd must see every gradient."""
        if not (type(weight) is nn.Parameter and weight.requires_grad):
            return None
        return self._by_weight.setdefault(id(weight), GradientBuffer(weight))

    def deliver(self) -> None:
        """Hand all sums to autograd."""
        for buffer in self._by_weight.values():
            buffer.deliver()


class _Embed(torch.autograd.Function):
    """A plain embedding whose gradient goes into a buffer."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding_idx: int | None, buffer: GradientBuffer):
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.buffer = padding_idx, buffer
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        flat, rows = ids.flatten(), grad.flatten(0, -2).to(ctx.buffer.total.dtype)
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((flat == ctx.padding_idx)[:, None], 0.0)
        ctx.buffer.total.index_add_(0, flat, rows)
        return None, None, None, None


@contextmanager
def gradient_buffers(model: nn.Module) -> Iterator[GradientBuffers]:
    """Collect the gradients of embedding and head in buffers during the block; autograd gets them at its end."""
    buffers = GradientBuffers()
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    # Plain: it only looks rows up, and nothing has replaced its forward.
    plain = (
        type(embedding) is nn.Embedding
        and "forward" not in vars(embedding)
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
    )
    buffer = buffers.of(embedding.weight) if plain else None
    if buffer is None:
        yield buffers
    else:

        def forward(ids: Tensor) -> Tensor:
            return _Embed.apply(embedding.weight, ids, embedding.padding_idx, buffer)  # type: ignore[return-value]

        with replaced_forward(embedding, forward):
            yield buffers
    buffers.deliver()
