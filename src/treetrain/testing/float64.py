"""Lifts the library's float32 casts, so that a float64 model computes in float64 throughout."""

from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_LIFTED = (torch.float64, torch.int64, torch.int32)
_SOFTMAX = {torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax}
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_LOG_SOFTMAX = {torch.nn.functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax}


class PureFloat64(TorchFunctionMode):
    """Every cast of a float64 (or integer) tensor to float32 becomes one to float64; holds in backward too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _BACKWARDS:
            return self._lifted_backward(func, args, kwargs)
        source = args[0] if args else None
        if isinstance(source, torch.Tensor) and source.dtype in _LIFTED:
            if func is torch.Tensor.float:
                return source.double()
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if func in (_SOFTMAX | _LOG_SOFTMAX | {torch.Tensor.to}) and kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        if func in _PRODUCTS and {x.dtype for x in args if isinstance(x, torch.Tensor)} == {
            torch.float32,
            torch.float64,
        }:
            # Positions were lifted, frequencies loaded in float32 were not. Unlike sums, products do not promote.
            args = tuple(x.double() for x in args if isinstance(x, torch.Tensor))
        return func(*args, **kwargs)

    def _lifted_backward(self, func, args, kwargs):
        # A mode is off while it handles a function, but layers that are recomputed in backward need it on.
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*engine_args, **engine_kwargs):
            with self:
                return engine(*engine_args, **engine_kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            return func(*args, **kwargs)


class RoundsToFloat32(TorchDispatchMode):
    """Counts float32 results computed from float64 tensors, to prove that nothing was left to lift."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
        outputs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor)]
        if any(i.dtype == torch.float64 for i in inputs) and any(o.dtype == torch.float32 for o in outputs):
            self.found.append(str(func))
        return out
