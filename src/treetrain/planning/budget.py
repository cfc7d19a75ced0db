"""Parse a budget (tokens, or bytes with a unit), and search the plan for a budget in bytes."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.layout import PackedLayout

_UNITS = {"b": 1} | {
    f"{letter}{ending}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for ending, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e\+?[0-9]{1,2})?\s*([a-z]+)")
_SMALLEST_PARTS = 10_000
"""The smallest budget tried for a budget in bytes: this fraction of the tokens, at least one."""
_TRIES, _CLOSE = 40, 0.97
"""The search for a budget in bytes stops after so many plans, or when the peak reaches this share of the budget."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes."""

    count: int

    def __str__(self) -> str:
        size, unit = float(self.count), "B"
        for larger in ("KiB", "MiB", "GiB", "TiB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        return f"{self.count} B" if unit == "B" else f"{size:.1f} {unit}"


def parse_budget(value: Any) -> int | Bytes | None:
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
        elif match is not None and match[3] in _UNITS:
            budget = Bytes(int(float(match[1] + (match[2] or "")) * _UNITS[match[3]]))
    count = budget.count if isinstance(budget, Bytes) else budget
    if value is not None and (count is None or count < 1):
        raise ValueError(
            f"budget={value!r}: give a whole number of tokens from 1 (4096), or bytes with a unit: B, KiB, MiB, GiB, "
            'TiB, KB, MB, GB or TB ("8GiB", "900 MB")'
        )
    return budget


def within_bytes(layout: PackedLayout, cost: CostModel, limit: Bytes) -> tuple[Plan, int]:
    """Find the plan of the largest budget in tokens that is predicted to fit, and that budget.

    Predicted peaks grow with the budget, nearly in proportion to it. So the search interpolates linearly between a
    budget that fits and one that does not.

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
            guess = max(smallest, min(int(above * limit.count / peak_above * 0.9), above // 2))
        else:
            low, low_peak, _ = fits
            if low_peak >= _CLOSE * limit.count or above - low <= max(1, low // 50):
                break
            share = (limit.count - low_peak) / (peak_above - low_peak)
            guess = min(max(low + int((above - low) * min(max(share, 0.1), 0.9)), low + 1), above - 1)
    if fits is None:
        least = Bytes(math.ceil(peak_above))
        raise ValueError(
            f"budget={limit}: the smallest plan of this batch, {smallest} tokens at once, needs {least} "
            f"({least.count} bytes) above model, gradients and optimiser state; give at least that"
        )
    return fits[2], fits[0]
