"""The recurrent cache: states that a part passes to the parts below it, and the gradients that come back.

Every token of a path has keys and values, but one state stands for the whole path down to a token. So states are kept
only at tokens where other parts attach, one *slot* each. A slot holds what each layer needs to continue (the state of a
scan, the last inputs of a convolution) and an accumulator of its gradient in float32 (float64 for a float64 model).
Autograd sees two functions: an entry, whose backward adds to the accumulator, and an export, whose backward reads it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.device_arrays import on_device
from treetrain.tree.assemble import Int64s

Key = tuple[Any, str]
"""(layer, name of one of its states)."""


@dataclass(slots=True)
class _Buffer:
    """One state of one layer: values and gradients [slots, ...]."""

    value: Tensor
    grad: Tensor | None


class StateCache:
    """The states of all layers at the tokens where parts attach.

    Args:
        tokens: M, the number of tokens of the layout.
        slots: number of states held at once; `allocate` grows the buffers when it needs more.
        gradients: whether a backward will follow.
    """

    def __init__(self, tokens: int, slots: int, *, gradients: bool):
        self._slots, self._gradients = slots, gradients
        self._attach = np.zeros(tokens, bool)
        self._slot_of = np.full(tokens, -1, np.int64)
        self._top = 0
        self._buffers: dict[Key, _Buffer] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers made so far."""
        tensors = [t for buffer in self._buffers.values() for t in (buffer.value, buffer.grad)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def attach_at(self, tokens: Int64s) -> None:
        """Mark tokens (-1 is none) where parts attach; only these get slots."""
        self._attach[tokens[tokens >= 0]] = True

    def allocate(self, tokens: Int64s) -> Int64s:
        """Give the next free slots to those tokens where parts attach that have none yet; returns these tokens."""
        fresh = tokens[self._attach[tokens] & (self._slot_of[tokens] < 0)]
        slots = slice(self._top, self._top + len(fresh))
        self._reserve(slots.stop)
        for buffer in self._buffers.values():
            if buffer.grad is not None:
                buffer.grad[slots].zero_()
        self._slot_of[fresh] = np.arange(slots.start, slots.stop)
        self._top = slots.stop
        return fresh

    def release(self, tokens: Int64s) -> None:
        """Free the slots of these tokens, which must be the last ones that were allocated."""
        self._slot_of[tokens] = -1
        self._top -= len(tokens)

    def view(self, tokens: Int64s, attach: int) -> "StateView":
        """A view for one pass over tokens; `attach` is the token that the pass continues, -1 for none."""
        exported = np.flatnonzero(self._slot_of[tokens] >= 0)
        entry = int(self._slot_of[attach]) if attach >= 0 else -1
        assert attach < 0 or entry >= 0, "a part continues a token whose state was not handed on"
        return StateView(self, entry, exported, self._slot_of[tokens[exported]])

    def buffer(self, key: Key, like: Tensor) -> _Buffer:
        """The buffer of a key, allocated at its first call for values [x, ...] like these."""
        if key not in self._buffers:
            shape = (self._slots, *like.shape[1:])
            wide = torch.promote_types(like.dtype, torch.float32)
            grad = torch.zeros(shape, dtype=wide, device=like.device) if self._gradients else None
            self._buffers[key] = _Buffer(torch.zeros(shape, dtype=like.dtype, device=like.device), grad)
        return self._buffers[key]

    def _reserve(self, slots: int) -> None:
        if slots <= self._slots:
            return
        for key, buffer in self._buffers.items():
            grad = None if buffer.grad is None else _grown(buffer.grad, slots)
            self._buffers[key] = _Buffer(_grown(buffer.value, slots), grad)
        self._slots = slots


class StateView:
    """One pass's view of the cache. Made by `StateCache.view`."""

    def __init__(self, cache: StateCache, entry: int, exported: Int64s, slots: Int64s):
        self.exported = exported
        """int64 [x]: indices of the pass's tokens whose states are exported."""
        self.continues = entry >= 0
        """Whether the pass starts from a state of the cache."""
        self._cache, self._entry, self._slots = cache, entry, slots
        self._slot_index: Tensor | None = None

    def _slots_on(self, device: torch.device) -> Tensor:
        """int64 [x]: the exported tokens' slots, copied to the device once for all layers."""
        if self._slot_index is None or self._slot_index.device != device:
            self._slot_index = on_device(self._slots, device)
        return self._slot_index

    def enter(self, key: Key, *depends: Tensor) -> Tensor:
        """The state that the pass starts from, in the shape of one slot.

        Args:
            depends: the tensors from which this pass computes its own states; the entry needs a gradient if they do.
        """
        return _Enter.apply(self, key, *depends)  # type: ignore[return-value]

    def export(self, key: Key, out: Tensor, states: Tensor) -> Tensor:
        """Store the states [x, ...] of the exported tokens. Use the returned `out` in place of the given one.

        Its backward also sends the accumulated gradients into `states`.
        """
        return _Export.apply(out, states, self, key) if len(self.exported) else out  # type: ignore[return-value]

    def value(self, key: Key) -> Tensor:
        """A copy of the entry's value; slots are overwritten while graphs that have read them are alive."""
        return self._cache._buffers[key].value[self._entry].clone()

    def write(self, key: Key, states: Tensor) -> None:
        """Write the exported tokens' states."""
        self._cache.buffer(key, states).value.index_copy_(0, self._slots_on(states.device), states)

    def add_entry_gradient(self, key: Key, grad: Tensor) -> None:
        """Add a gradient to the accumulator of the entry."""
        buffer = self._cache._buffers[key]
        assert buffer.grad is not None
        buffer.grad[self._entry] += grad

    def collect(self, key: Key) -> Tensor:
        """The gradients [x, ...] of the exported tokens' states, accumulated by the parts below."""
        buffer = self._cache._buffers[key]
        assert buffer.grad is not None
        return buffer.grad.index_select(0, self._slots_on(buffer.grad.device))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, view: StateView, key: Key, *depends: Tensor):
        ctx.view, ctx.key, ctx.count = view, key, len(depends)
        return view.value(key)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.view.add_entry_gradient(ctx.key, grad)
        return (None, None, *[None] * ctx.count)


class _Export(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, states: Tensor, view: StateView, key: Key):
        ctx.view, ctx.key, ctx.dtype = view, key, states.dtype
        view.write(key, states)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        states = ctx.view.collect(ctx.key).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return grad, states, None, None


def _grown(tensor: Tensor, slots: int) -> Tensor:
    grown = tensor.new_zeros((slots, *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
