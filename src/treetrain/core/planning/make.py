"""Find a plan for a budget in tokens or bytes, and explain it in words and numbers."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Bytes, Costs, Plan, Purpose
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree

_UNITS = {"b": 1} | {
    f"{letter}{ending}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for ending, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e\+?[0-9]{1,2})?\s*([a-z]+)")
_SMALLEST_PARTS = 10_000
"""A search for a budget in bytes tries token budgets down to the number of tokens divided by this. Smaller parts would
take minutes to plan and hours to run."""
_TRIES, _CLOSE = 40, 0.97
"""A search for a budget in bytes stops after this many plans, or when the predicted peak reaches this share of the
budget. Predictions err by more than the 3% that are left (`USABLE`)."""


def parse_budget(value: object) -> int | Bytes | None:
    """Read a budget.

    Args:
        value: a number of tokens (also as text, "4096"), bytes as text with a unit ("8GiB", "1.5 GB", "2e9B";
            KiB MiB GiB TiB are powers of 1024, KB MB GB TB of 1000), Bytes, or None for no budget.

    Raises:
        ValueError: anything else, or less than 1.
    """
    budget: int | Bytes | None = None
    if value is None or isinstance(value, Bytes):
        budget = value
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        budget = int(value)
    elif isinstance(value, str):
        text = value.strip().lower()
        match = _SIZE.fullmatch(text)
        if re.fullmatch("[0-9]+", text):
            budget = int(text)
        elif match is not None and match[3] in _UNITS:  # unlike a number alone, which counts tokens
            budget = Bytes(int(float(match[1] + (match[2] or "")) * _UNITS[match[3]]))
    count = budget.count if isinstance(budget, Bytes) else budget
    if value is not None and (count is None or count < 1):
        raise ValueError(
            f"budget={value!r}: give a whole number of tokens from 1 (4096), or bytes with a unit: B, KiB, MiB, GiB, "
            'TiB, KB, MB, GB or TB ("8GiB", "900 MB")'
        )
    return budget


def within_bytes(layout: PackedLayout, cost: Costs, limit: Bytes) -> tuple[Plan, int]:
    """Find the plan of nearly the largest budget in tokens that is predicted to fit, and that budget.

    Predicted peaks grow with the budget, nearly in proportion to it. So the search interpolates linearly between a
    budget that fits and one that does not.

    Returns:
        the plan, and the budget in tokens.

    Raises:
        ValueError: no plan fits.
    """
    tokens = max(layout.num_tokens, 1)
    smallest = max(1, tokens // _SMALLEST_PARTS)
    fits: tuple[int, float, Plan] | None = None
    above, peak_above = tokens + 1, math.inf  # the smallest budget that did not fit
    guess = tokens
    for _ in range(_TRIES):
        plan = partition(layout, guess, cost.seconds)
        peak = cost.peak_bytes(plan)
        if peak <= limit.count:
            fits = guess, peak, plan
        else:
            above, peak_above = guess, peak
        if fits is None:
            if above <= smallest:
                break
            # In proportion, and a tenth less, so that this one fits; at most half, so that few plans are made.
            guess = max(smallest, min(int(above * limit.count / peak_above * 0.9), above // 2))
        else:
            low, low_peak, _ = fits
            if low_peak >= _CLOSE * limit.count or above - low <= max(1, low // 50):
                break
            # A straight line between both, but at least a tenth of the way from either, so that both ends move.
            share = (limit.count - low_peak) / (peak_above - low_peak)
            guess = min(max(low + int((above - low) * min(max(share, 0.1), 0.9)), low + 1), above - 1)
    if fits is None:
        least = Bytes(math.ceil(peak_above))
        raise ValueError(
            f"budget={limit}: the smallest plan of this batch, {smallest} tokens at once, needs {least} "
            f"({least.count} bytes) above model, gradients and optimiser state; give at least that"
        )
    return fits[2], fits[0]


PART_TOKENS = {"cpu": 8192, "cuda": 32_768}
"""Sufficient part size if no budget binds, by kind of device: measured on a CPU, estimated for a GPU. Parts are smaller
if memory is short."""


def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: CostModel,
    *,
    budget: int | str | Bytes | None = None,
    free_bytes: int | None = None,
    purpose: type[Purpose] = Purpose,
) -> Plan:
    """Find a fast plan for a batch within a budget; see `treetrain.make_plan`."""
    budget = parse_budget(budget)
    layout = rows if isinstance(rows, PackedLayout) else trained_layout(as_tree(rows))
    if isinstance(budget, Bytes):
        plan, tokens = within_bytes(layout, cost, budget)
    elif budget is not None:
        plan, tokens = partition(layout, budget, cost.seconds), budget
    else:
        size = max(PART_TOKENS[cost.device], cost.hiding_tokens)  # larger parts would be no faster
        tokens = None
        if layout.num_tokens <= size:
            plan = Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
        else:
            plan = partition(layout, None, cost.seconds, part_tokens=size)
        if free_bytes is not None and cost.peak_bytes(plan) > free_bytes:
            plan, tokens = within_bytes(layout, cost, Bytes(free_bytes))
    return replace(plan, purpose=purpose(cost=cost, budget=budget, tokens=tokens))


def trained_layout(tree: TokenTree) -> PackedLayout:
    """The layout of the tokens that training computes."""
    return pack(tree, tree.trained_edges()[0] > 0)
