"""Gradients that wait for a tree's backward, so that none is lost between a loss and its tree.

A loss's backward ends in the leaves that `TreeEngine.score` gave, and the tree's own backward comes later. In between,
the gradient of every parameter is known to come and is not there yet. A `DeferredGradient` says so where PyTorch keeps
gradients: in ``.grad``. It costs no memory and is right in every use:

- An operation on it, or an optimizer that is about to step, first has the trees run backward (trainers), or raises an
  error (loops of one's own, which call `Scored.backward` themselves).
- ``zero_grad`` drops it, and with it what waits, as it drops gradients otherwise. Nothing else remembers them.
- A gradient that autograd adds to it meanwhile is kept beneath it: sums do not depend on the order.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from treetrain.core.hf.tree_mode import hooks_replaced

_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad_fn")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_leaf", "ndim", "is_cuda", "is_cpu", "_version")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.requires_grad_),
    *(Tensor.add_, Tensor.__iadd__),
}
"""Functions that need no values of a deferred gradient, so that no tree has to run: its attributes, and sums."""
_CONVERSIONS = {Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cuda, Tensor.cpu}
_ZEROES = {Tensor.zero_, torch._foreach_zero_}  # type: ignore[attr-defined]


class DeferredGradient(Tensor):
    """Stands in ``.grad`` of a parameter while gradients wait for a tree's backward.

    Args:
        parameter: its ``.grad`` becomes this; the gradient that it has now stays `beneath`.
        waits_for: the scores whose gradients wait.
    """

    parameter: "weakref.ref[nn.Parameter]"
    beneath: Tensor | None
    """The gradient without what waits; None if there is none."""
    waits_for: "dict[Deferral, None]"

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, waits_for: "Iterable[Deferral]" = ()):
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        # Weak: autograd holds `.grad` where Python's garbage collector does not look.
        made.parameter, made.beneath = weakref.ref(parameter), parameter.grad
        made.waits_for = dict.fromkeys(waits_for)  # in order, each once
        return made

    def settle(self) -> None:
        """Have all gradients run through their trees, or raise RuntimeError."""
        with torch.inference_mode(False), torch.enable_grad():
            for deferral in list(self.waits_for):
                deferral.settle()
        if self.waits_for:  # `settle` of a loop of one's own runs nothing: it is for the user to call backward
            raise RuntimeError(next(iter(self.waits_for)).error)

    def _moved(self, parameter: nn.Parameter, convert: Callable[[Tensor], Tensor]) -> "DeferredGradient":
        """The stand-in in ``.grad`` once `nn.Module.to` has moved the parameter, and moves its gradient next.

        An error would leave the model half moved. What waits cannot run any more, and says so when it is needed.
        """
        moved = DeferredGradient(parameter, self.waits_for)
        moved.beneath = None if self.beneath is None else convert(self.beneath)
        return moved

    def drop(self) -> None:
        """Drop what waits and put zeros in its place."""
        self.waits_for.clear()
        self.beneath = self.or_zeros()
        if (parameter := self.parameter()) is not None and parameter.grad is self:
            parameter.grad = self.beneath

    def or_zeros(self) -> Tensor:
        """The gradient beneath, or zeros."""
        like = self.parameter() if self.beneath is None else self.beneath
        if like is None:
            raise RuntimeError("the parameter of this gradient is gone")
        return torch.zeros_like(like, requires_grad=False) if self.beneath is None else like

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITHOUT_VALUES and not any(isinstance(x, cls) for x in args[1:]):  # one may be added to another
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch._has_compatible_shallow_copy_type:  # type: ignore[attr-defined]
            return False  # `Module.to` then sets ``.grad``, not its data
        if func in _CONVERSIONS and isinstance(args[0], cls):
            own, empty = args[0], torch.empty(0, dtype=args[0].dtype, device=args[0].device)

            def convert(gradient: Tensor) -> Tensor:
                return func(gradient, *args[1:], **(kwargs or {}))

            if convert(empty) is empty:
                return own
            if (p := own.parameter()) is not None and (p.dtype, p.device) != (own.dtype, own.device):
                return own._moved(p, convert)
        if func in _ZEROES:
            for gradient in args if isinstance(args[0], Tensor) else args[0]:
                if isinstance(gradient, DeferredGradient):
                    gradient.drop()
        return func(*tree_map_only(cls, _value, args), **tree_map_only(cls, _value, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sums, and calls that do not come from Python: autograd adds its gradients here."""
        own, kwargs = args[0], kwargs or {}
        if func is torch.ops.aten.add_.Tensor and isinstance(own, DeferredGradient) and own.waits_for:
            with torch.no_grad():
                own.beneath = own.or_zeros().add_(args[1], **kwargs)
            return own
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"within a backward pass, {func} needs a gradient that waits for the backward of a tree, which cannot "
                "run there; read .grad after the backward pass"
            )
        return func(*tree_map_only(cls, _value, args), **tree_map_only(cls, _value, kwargs))


def _value(gradient: DeferredGradient) -> Tensor:
    gradient.settle()
    return gradient.or_zeros()  # zeros if the tree has no gradient for this parameter


def _leave_waiting() -> None:
    """Run no backward: whoever needs the gradients gets the error of their `Deferral`."""


class Deferral:
    """The gradients that one score has received and that have not gone through its tree.

    Args:
        name: the call that scored, for messages.
        parameters: the parameters that will get gradients.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]):
        self.error = (  # for whoever needs the gradients if `settle` leaves them waiting
            f"gradients have arrived in what {name} gave and have not gone through the tree: call backward() on what "
            "it returned (scored.backward()) before .grad is read or an optimizer steps, or drop them by zero_grad()"
        )
        self.arrived = False
        """Whether gradients have arrived, which may have been dropped since."""
        # No method of its own: a cycle would keep weak references to parameters, which then cannot move to a device.
        self.settle: Callable[[], None] = _leave_waiting
        """Called before the gradients are read, or an optimizer steps with them."""
        self.at_end: Callable[[], None] = _leave_waiting
        """Called when a backward that has reached the scores ends, if no other may follow it through the same graph."""
        self._parameters = [weakref.ref(p) for p in parameters if p.requires_grad]
        self._leaves: list[weakref.ref[Tensor]] = []
        self._backward = self._begun = -1
        self._keeps_graph = False
        _watch_optimizers()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that will get gradients."""
        return [p for reference in self._parameters if (p := reference()) is not None]

    @property
    def dropped(self) -> bool:
        """Whether gradients had arrived, and no parameter waits for them any more (``zero_grad``)."""
        return self.arrived and not self.waiting()

    def set_anew(self) -> list[nn.Parameter]:
        """The parameters whose gradients were set anew while those of the others wait: they get none of what waits."""
        waiting = {id(p) for p in self.waiting()}
        return [p for p in self.parameters if id(p) not in waiting] if waiting else []

    def watch(self, leaves: Sequence[Tensor], *, refuse: bool) -> tuple[Tensor, ...]:
        """Defer the parameters' gradients when a backward ends in these leaves.

        Args:
            refuse: raise an error where a backward asks for gradients of the parameters and not of the leaves, as
                ``torch.autograd.grad(loss, parameters)`` does, which would get None for all of them.

        Returns:
            tensors with the leaves' values, to compute a loss from.
        """
        for leaf in leaves:
            self._leaves.append(weakref.ref(leaf))
            leaf.register_hook(self._begin)
            leaf.register_post_accumulate_grad_hook(self._arrive)
        if not refuse:
            return tuple(leaves)
        outputs = _Refuse.apply(self, len(leaves), *_Same.apply(*leaves), *self.parameters)
        for output in outputs:  # type: ignore[union-attr]
            output.retain_grad()  # who reads its .grad finds what the leaf has
        return outputs  # type: ignore[return-value]

    def _begin(self, _gradient: Tensor) -> None:
        """Before a backward adds its first gradient: forget what earlier ones left and ``zero_grad`` dropped."""
        number = torch._C._current_graph_task_id()
        if number != self._begun:
            self._begun = number
            if self.dropped:
                self.forget()

    def forget(self) -> None:
        """Forget the gradients that the leaves have received."""
        self.arrived = False
        for reference in self._leaves:
            if (leaf := reference()) is not None:
                leaf.grad = None

    def _arrive(self, _leaf: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._backward:  # once in a backward, at its end: autograd may still add to `.grad` itself
            self._backward = number
            self._keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
            Variable._execution_engine.queue_callback(self._defer)

    def _defer(self) -> None:
        self.arrived = True
        for p in self.parameters:
            if not isinstance(p.grad, DeferredGradient):
                p.grad = DeferredGradient(p)
            p.grad.waits_for[self] = None
        if not self._keeps_graph:
            with torch.inference_mode(False), torch.enable_grad():
                self.at_end()

    def waiting(self) -> list[nn.Parameter]:
        """The parameters whose gradients wait: what has arrived has neither been run through the tree nor dropped."""
        return [p for p in self.parameters if isinstance(p.grad, DeferredGradient) and self in p.grad.waits_for]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside the block ``.grad`` is the gradient beneath; after it, the gradients of other scores wait again.

        If the block fails, the gradients of this score wait again too: no optimizer may step without them unless they
        are dropped.
        """
        found = [(p, p.grad) for p in self.parameters if isinstance(p.grad, DeferredGradient)]
        own = [gradient for _, gradient in found if self in gradient.waits_for]
        for p, gradient in found:
            gradient.waits_for.pop(self, None)
            p.grad = gradient.beneath
        try:
            yield
        except BaseException:
            for gradient in own:
                gradient.waits_for[self] = None
            raise
        finally:
            for p, gradient in found:
                gradient.beneath = p.grad
                if gradient.waits_for:
                    # Passes may gather and release weights, and a released one has no shape of its own.
                    p.grad = gradient if gradient.shape == p.shape else DeferredGradient(p, gradient.waits_for)


class _Same(torch.autograd.Function):
    """The identity for several tensors."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradients


class _Refuse(torch.autograd.Function):
    """The identity for the outputs of `_Same`. Parameters are inputs too, so that autograd asks here for their
    gradients, which only the tree's own backward has."""

    @staticmethod
    def forward(ctx: Any, deferral: Deferral, count: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.deferral = deferral
        return tuple(value.clone() for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        same = ctx.next_functions[0][0]
        if not torch._C._will_engine_execute_node(same):  # type: ignore[attr-defined]
            raise RuntimeError(
                "gradients of the parameters alone were asked for (torch.autograd.grad, or backward(inputs=...)), but "
                "a loss that is computed from a tree's scores has none before the tree's own backward: call "
                "loss.backward() and read .grad (after scored.backward() where TreeEngine.score gave the scores), or "
                "take tt.logprobs, through which torch.autograd.grad goes"
            )
        parameters = ctx.deferral.parameters
        _call_hooks_for_gradients_alone([p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks])
        return None, None, *gradients, *[None] * (len(ctx.next_functions) - len(gradients))


def _call_hooks_for_gradients_alone(parameters: Sequence[nn.Parameter]) -> None:
    """Until the running backward ends, call no hook of these parameters where autograd has no gradient for them.

    Autograd calls hooks with None, or after nothing was accumulated, wherever a node had a parameter as its input.
    """

    def if_given(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gradient: None if gradient is None else hook(gradient)

    def if_accumulated(grad: Tensor | None, hook: Callable[..., Any]) -> Callable[..., Any]:
        version = None if grad is None else grad._version
        return lambda p: hook(p) if p.grad is not grad or (grad is not None and grad._version != version) else None

    stack = ExitStack()
    for p in parameters:
        stack.enter_context(hooks_replaced([p._backward_hooks], if_given))
        stack.enter_context(hooks_replaced([p._post_accumulate_grad_hooks], partial(if_accumulated, p.grad)))
    if parameters:
        Variable._execution_engine.queue_callback(stack.close)


@cache
def _watch_optimizers() -> None:
    """Settle deferred gradients before any optimizer steps. Its own reads are too late: its state has changed then."""

    def settle(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, DeferredGradient):
                    p.grad.settle()

    register_optimizer_step_pre_hook(settle)


# ---- gradients that are set aside


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of a block in the yielded list. No hook of the parameters runs.

    ``.grad`` is None at the start of the block; the old gradients are restored after it.
    """
    before = [p.grad for p in parameters]
    found: list[Tensor | None] = []
    for p in parameters:
        p.grad = None
    try:
        with hooks_replaced(
            (hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)),
            lambda _hook: None,
        ):
            yield found
            found += [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
