"""Recurrence along the paths of one packed run, as the recurrent layers of a forward call it."""

from collections.abc import Hashable
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treetrain.linear_attention.backends import KERNELS, choose_for, choose_rule, load_kernel
from treetrain.linear_attention.convolution import Taps, convolve, make_taps
from treetrain.linear_attention.delta_rule import DeltaTiles, gated_delta
from treetrain.linear_attention.scans import Scans, scanned_gated_delta
from treetrain.linear_attention.state_cache import StateView
from treetrain.softmax_attention.backends import Choice
from treetrain.tree.layout import PackedLayout

_NONE = np.zeros(0, np.int64)


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
    """Runs convolutions and the gated delta rule along the paths of a run, for all its recurrent layers.

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
        self._layout, self._device, self._states = layout, device, states
        self._exported = _NONE if states is None else states.exported
        self._taps: dict[int, Taps] = {}
        self.rule: Choice | None = None
        """The implementation of the gated delta rule that ran last, and why; None before the first."""

    @property
    def tokens(self) -> int:
        """Tokens of the run, N."""
        return self._layout.num_tokens

    def convolve(self, layer: Hashable, inputs: Tensor, weight: Tensor) -> Tensor:
        """Causal depthwise convolution along every path.

        Args:
            layer: key of the layer's states.
            inputs: [N, D].
            weight: [D, K]; the last tap multiplies the newest input.

        Returns:
            [N, D] in at least float32, without bias or activation.
        """
        width = weight.shape[1]
        taps = self._taps_of(width)
        if self._states is not None and self._states.continues:
            before = self._states.enter((layer, "inputs"), inputs)
        else:
            before = inputs.new_zeros(width - 1, inputs.shape[1])
        extended = torch.cat([before, inputs])
        out = convolve(extended, weight, taps)
        if self._states is None or not len(self._exported):
            return out
        return self._states.export((layer, "inputs"), out, extended[taps.tails])

    def gated_delta(
        self, layer: Hashable, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """The gated delta rule along every path; see `delta_rule.gated_delta`. Returns [N, H, V]."""
        state = None
        if self._states is not None and self._states.continues:
            state = self._states.enter((layer, "state"), key, value, decay, beta)
        rule = choose_rule(query.device, query.dtype, query.shape[-1], value.shape[-1])
        self.rule = choose_for(self._scans, rule) if rule.name == KERNELS else rule
        given = query, key, value, decay, beta
        if self.rule.name == KERNELS:
            out, handed_on = scanned_gated_delta(*given, self._scans, state, load_kernel())
        else:
            out, handed_on = gated_delta(*given, self._tiles, state)
        if self._states is None or handed_on is None:
            return out
        return self._states.export((layer, "state"), out, handed_on)

    def _taps_of(self, width: int) -> Taps:
        if width not in self._taps:
            self._taps[width] = make_taps(self._layout.parent, self._exported, width, self._device)
        return self._taps[width]

    @cached_property
    def _scans(self) -> Scans:
        return Scans(self._layout, self._exported, self._device)

    @cached_property
    def _tiles(self) -> DeltaTiles:
        return DeltaTiles(self._layout, self._exported, self._device)
