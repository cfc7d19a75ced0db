"""The rules, and the forests and random inputs that their forms are tested on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from treetrain.check.forests import bushy_rows
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.recurrence.paths import GATED_DELTA, STATE_SPACE
from treetrain.layers.recurrence.reference import reference_gated_delta, reference_state_space
from treetrain.layers.recurrence.scans import Kernel
from treetrain.layers.recurrence.tiles import TILE

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 3, 5


def layout_of(rows) -> PackedLayout:
    return pack(build_tree(rows), trim=False)


class Rule(NamedTuple):
    """A rule by tiles and by a kernel, and by its specification."""

    tiled: Callable[..., Any]
    kernel: Kernel
    reference: Callable[..., Any]


RULES = {
    "gated delta": Rule(*GATED_DELTA, reference_gated_delta),
    "state space": Rule(*STATE_SPACE, reference_state_space),
}


def inputs(
    rule: str, tokens: int, seed: int = 0, dtype=torch.float64, *, key: int = KEY, value: int = VALUE
) -> list[torch.Tensor]:
    """Query, key, value, decay, beta (of the gated delta rule) and the state before the roots."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(tokens, KEY_HEADS, key)] * 2 + [(tokens, VALUE_HEADS, value)] + [(tokens, VALUE_HEADS)] * 2
    q, k, v, g, b = (torch.randn(shape, generator=make, dtype=dtype) for shape in shapes)
    state = torch.randn(VALUE_HEADS, key, value, generator=make, dtype=dtype)
    strength = [b.sigmoid()] if rule == "gated delta" else []
    return [x.requires_grad_() for x in (q, k, v, -torch.nn.functional.softplus(g - 1), *strength, state)]


SHAPES = {
    "a chain longer than a tile": [list(range(150))],
    "a chain of exactly one tile": [list(range(TILE))],
    "forks at the first token": [[1, i, *range(5)] for i in range(90)],
    "a bushy star": [[0, 1, 2, i] for i in range(200)],
    "nested forks": [[*range(i), 500 + i] for i in range(130)],
    "long branches off a comb": [[*range(i), 500 + i, *range(40)] for i in range(0, 30, 3)],
    "levels of segments": bushy_rows(np.random.default_rng(0), rows=30, segment=9, levels=4),
}
