"""Recurrence along the paths of one packed run, as the recurrent layers of a forward call it.

`Paths` runs the convolution of this file, and rules: the gated delta rule (`delta_rule.py`) and the state-space dual
(`state_space.py`), each by tiles or by a kernel (`scans.py`). The recurrent cache holds the states that a part passes
to the parts below it, and the gradients that come back. Every token of a path has keys and values, but one state stands
for the whole path down to a token. So states are kept only at tokens where other parts attach, one *slot* each. A slot
holds what each layer needs to continue (the state of a rule, the last inputs of a convolution) and an accumulator of
its gradient in float32 (float64 for a float64 model). Autograd sees two functions: an entry, whose backward adds to the
accumulator, and an export, whose backward reads it.

Shape letters: N tokens, D channels, T taps of a convolution, x exported tokens; J heads of queries and keys, H heads of
values, K and V sizes of keys and values.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.core.attention.kv_cache import RowBuffers
from treetrain.core.device_arrays import on_device
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Int64s
from treetrain.kernels.checks import CHECKED
from treetrain.layers.recurrence.delta_rule import gated_delta
from treetrain.layers.recurrence.scans import (
    GATED_DELTA_KERNEL,
    STATE_SPACE_KERNEL,
    Kernel,
    Scans,
    scan_for,
    scanned,
)
from treetrain.layers.recurrence.self_check import failure_of_kernel
from treetrain.layers.recurrence.state_space import state_space
from treetrain.layers.recurrence.tiles import Tiles

# ---- the recurrent cache


Key = tuple[Hashable, str]
"""(layer, name of one of its states)."""


class StateCache(RowBuffers):
    """The states of all layers at the tokens where parts attach. Its rows are *slots*.

    Args:
        tokens: M, the number of tokens of the layout.
        slots: number of states held at once; `allocate` grows the buffers when it needs more.
        attach: the tokens where parts attach (-1 is none); only these get slots.
        options: `gradients` and `may_need`, as for `RowBuffers`.
    """

    def __init__(self, tokens: int, slots: int, attach: Int64s, **options: Any):
        super().__init__(slots, tokens=tokens, **options)
        self._attach = np.zeros(tokens, bool)
        self._attach[attach[attach >= 0]] = True
        self._groups: list[Int64s] = []
        """The tokens with slots, in the groups that were allocated at once."""

    def follow(self, kv_rows: Int64s, tokens: Int64s) -> None:
        """Give slots to those of a pass's tokens that hold rows of the KV cache and that parts attach to.

        Slots of tokens that have left the KV cache are freed. It allocates and frees its rows like a stack, so the
        slots are one too.

        Args:
            kv_rows: int64 [M], the row of each token in the KV cache, -1 for those that are not held.
        """
        while self._groups and kv_rows[self._groups[-1][0]] < 0:
            self.release(self._groups.pop())
        fresh = tokens[self._attach[tokens] & (kv_rows[tokens] >= 0) & (self.row_of[tokens] < 0)]
        if len(fresh):
            self.allocate(fresh)
            self._groups.append(fresh)

    def view(self, tokens: Int64s, attach: int) -> "StateView":
        """A view for one pass over tokens; `attach` is the token that the pass continues, -1 for none."""
        exported = np.flatnonzero(self.row_of[tokens] >= 0)
        entry = int(self.row_of[attach]) if attach >= 0 else -1
        assert attach < 0 or entry >= 0, "a part continues a token whose state was not handed on"
        return StateView(self, entry, exported, self.row_of[tokens[exported]])


class StateView:
    """One pass's view of the cache. Made by `StateCache.view`."""

    def __init__(self, cache: StateCache, entry: int, exported: Int64s, slots: Int64s):
        self.exported = exported
        """int64 [x]: indices of the pass's tokens whose states are exported."""
        self.continues = entry >= 0
        """Whether the pass starts from a state of the cache."""
        self.cache = cache
        self.entry = entry
        self._slots = slots
        self._needed = frozenset(cache.needs.needed)
        self._slot_index: Tensor | None = None

    def slots_on(self, device: torch.device) -> Tensor:
        """int64 [x]: the exported tokens' slots, copied to the device once for all layers."""
        if self._slot_index is None or self._slot_index.device != device:
            self._slot_index = on_device(self._slots, device)
        return self._slot_index

    def enter(self, key: Key, *depends: Tensor) -> Tensor:
        """The state that the pass starts from, in the shape of one slot.

        Args:
            depends: the tensors from which this pass computes its own states; the entry needs a gradient if they do, or
                if the path above does.
        """
        above = self.cache.needs.input_for(key, *depends, needed=self._needed)
        return _Enter.apply(self, key, above, *depends)  # type: ignore[return-value]

    def export(self, key: Key, out: Tensor, states: Tensor) -> Tensor:
        """Store the states [x, ...] of the exported tokens. Use the returned `out` in place of the given one.

        Its backward also sends the accumulated gradients into `states`.
        """
        if not len(self.exported):
            return out
        self.cache.needs.written(key, states)
        return _Export.apply(out, states, self, key)  # type: ignore[return-value]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, view: StateView, key: Key, *depends: Tensor | None):
        ctx.view = view
        ctx.key = key
        ctx.count = len(depends)
        # A copy: slots are overwritten while graphs that have read them are alive.
        return view.cache.value(key)[view.entry].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.view.cache.grad(ctx.key)[ctx.view.entry] += grad
        return (None, None, *[None] * ctx.count)


class _Export(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, states: Tensor, view: StateView, key: Key):
        ctx.view = view
        ctx.key = key
        ctx.dtype = states.dtype
        view.cache.buffer(key, states).value.index_copy_(0, view.slots_on(states.device), states)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        states = None
        if ctx.needs_input_grad[1]:
            states = ctx.view.cache.grad(ctx.key)
            states = states.index_select(0, ctx.view.slots_on(states.device)).to(ctx.dtype)
        return grad, states, None, None


# ---- causal depthwise convolution along paths


@dataclass(frozen=True, slots=True)
class Taps:
    """The positions of a convolution's taps."""

    width: int
    elsewhere: Int64[Tensor, " b"] | None
    """Tokens whose last T - 1 inputs are not the ones right before them in pre-order; None if there are none."""
    index: Int64[Tensor, "b T"]
    """The indices of these tokens' taps in the extended inputs, oldest first."""
    tails: Int64[Tensor, "x _"]
    """For every exported token, the indices of the last T - 1 inputs, which its child tokens need."""


def make_taps(
    parent: Int64[np.ndarray, " N"], exported: Int64[np.ndarray, " x"], width: int, device: torch.device
) -> Taps:
    """The taps of a forest, in its *extended* inputs: the last T - 1 of the path above it (zeros before a root), then
    its own in pre-order. `parent` is -1 at roots, `width` is T."""
    count, before = len(parent), width - 1
    # For every index of `extended`, the index before it on its path; index 0 stands for everything earlier.
    back = np.concatenate([np.arange(-1, before - 1), np.where(parent >= 0, parent + before, before - 1)])
    back[:1] = 0
    places = np.empty((count, width), np.int64)
    places[:, -1] = np.arange(count) + before
    for tap in range(width - 2, -1, -1):
        places[:, tap] = back[places[:, tap + 1]]
    apart = np.flatnonzero((places != np.arange(count)[:, None] + np.arange(width)).any(1))
    return Taps(
        width=width,
        elsewhere=on_device(apart, device) if len(apart) else None,
        index=on_device(places[apart], device),
        tails=on_device(places[exported, 1:], device),
    )


def convolve(extended: Float[Tensor, "L D"], weight: Float[Tensor, "D T"], taps: Taps) -> Float[Tensor, "L+1-T D"]:
    """Convolve the L = T - 1 + N extended inputs; computed and returned in at least float32."""
    return _Convolve.apply(extended, weight, taps)  # type: ignore[return-value]


class _Convolve(torch.autograd.Function):
    """Multiplies shifted inputs by each tap; gathers the inputs of the few tokens right after a fork."""

    @staticmethod
    def forward(ctx, extended: Tensor, weight: Tensor, taps: Taps):
        ctx.save_for_backward(extended, weight)
        ctx.taps = taps
        source, factor = _wide(extended), _wide(weight)
        count = len(extended) - taps.width + 1
        out = source[:count] * factor[:, 0]
        for tap in range(1, taps.width):
            out.addcmul_(source[tap : tap + count], factor[:, tap])
        if taps.elsewhere is not None:
            out.index_copy_(0, taps.elsewhere, (source[taps.index] * factor.t()).sum(1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        extended, weight = ctx.saved_tensors
        taps: Taps = ctx.taps
        source = _wide(extended)
        factor = _wide(weight)
        count = len(grad)
        behind = None
        if taps.elsewhere is not None:
            behind = grad.index_select(0, taps.elsewhere)
            grad = grad.index_fill(0, taps.elsewhere, 0.0)
        grad_source, grad_factor = torch.zeros_like(source), torch.empty_like(factor)
        for tap in range(taps.width):
            grad_source[tap : tap + count].addcmul_(grad, factor[:, tap])
            grad_factor[:, tap] = (grad * source[tap : tap + count]).sum(0)
        if behind is not None:
            places = taps.index.flatten()
            grad_source.index_add_(0, places, (behind[:, None] * factor.t()).flatten(0, 1))
            grad_factor += (behind[:, None] * source[taps.index]).sum(0).t()
        return grad_source.to(extended.dtype), grad_factor.to(weight.dtype), None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---- paths


_NONE = np.zeros(0, np.int64)


class Rule(NamedTuple):
    """How a state follows a path."""

    tiled: Callable[..., tuple[Tensor, Tensor | None]]
    """Query, key, value, decay, what else the rule takes, tiles and the state before the roots -> output and states
    of the exported tokens."""
    kernel: Kernel


GATED_DELTA = Rule(gated_delta, GATED_DELTA_KERNEL)
STATE_SPACE = Rule(state_space, STATE_SPACE_KERNEL)


class Exchange(Protocol):
    """Exchanges tokens for heads between ranks that have n of the N tokens each; n is the same on all."""

    def to_heads(self, *states: Tensor) -> list[Tensor]:
        """[n, d] each -> [N, d / ranks]."""
        ...

    def to_tokens(self, states: Tensor) -> Tensor:
        """[N, d / ranks] -> [n, d]."""
        ...

    def own(self, weight: Tensor) -> Tensor:
        """This rank's share of weights by head or channel, [d, ...] -> [d / ranks, ...]."""
        ...


class Paths:
    """Runs convolutions and rules along the paths of a run, for all its recurrent layers.

    Args:
        states: the states that the run continues and exports; None for whole trees.
        exchange: gives a layer all tokens, where its call has only those of this rank.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        states: StateView | None = None,
        exchange: Exchange | None = None,
    ):
        self.exchange = exchange
        self._layout = layout
        self._device = device
        self._states = states
        self._exported = _NONE if states is None else states.exported
        self._taps: dict[int, Taps] = {}

    def convolve(
        self, layer: Hashable, inputs: Float[Tensor, "N D"], weight: Float[Tensor, "D T"]
    ) -> Float[Tensor, "N D"]:
        """Causal depthwise convolution along every path, in at least float32, without bias or activation.

        Args:
            layer: key of the layer's states.
            weight: the last tap multiplies the newest input.
        """
        width = weight.shape[1]
        if width not in self._taps:
            self._taps[width] = make_taps(self._layout.parent, self._exported, width, self._device)
        taps = self._taps[width]
        if self._states is not None and self._states.continues:
            before = self._states.enter((layer, "inputs"), inputs)
        else:
            before = inputs.new_zeros(width - 1, inputs.shape[1])
        extended = torch.cat([before, inputs])
        out = convolve(extended, weight, taps)
        if self._states is None or not len(self._exported):
            return out
        return self._states.export((layer, "inputs"), out, extended[taps.tails])

    def recur(self, layer: Hashable, rule: Rule, *given: Float[Tensor, "N ..."]) -> Float[Tensor, "N H V"]:
        """Run a rule along every path.

        Args:
            layer: key of the layer's states.
            given: the tensors that the rule takes: queries and keys [N, J, K], values [N, H, V], decays [N, H], and for
                the gated delta rule beta [N, H]. See `delta_rule.gated_delta` and `state_space.state_space`.
        """
        query = given[0]
        value = given[2]
        state = None
        if self._states is not None and self._states.continues:
            state = self._states.enter((layer, "state"), *given[1:])
        scan = scan_for(rule.kernel, query.device, query.dtype, query.shape[-1], value.shape[-1])
        if scan is not None and query.device.type in CHECKED:
            scan = scan if failure_of_kernel(rule.kernel, scan, *given[1:]) is None else None
        if scan is not None and self._scans.suits:
            out, handed_on = scanned(given, self._scans, state, scan)
        else:
            out, handed_on = rule.tiled(*given, self._tiles, state)
        if self._states is None or handed_on is None:
            return out
        return self._states.export((layer, "state"), out, handed_on)

    @cached_property
    def _scans(self) -> Scans:
        return Scans(self._layout, self._exported, self._device)

    @cached_property
    def _tiles(self) -> Tiles:
        return Tiles(self._layout, self._exported, self._device)
