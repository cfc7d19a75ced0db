"""A plan for a budget in tokens or bytes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from treetrain.planning.align import choose, offers_of, ways_of
from treetrain.planning.balance import balance
from treetrain.planning.budget import Bytes, parse_budget
from treetrain.planning.cost import ModelShape
from treetrain.planning.explain import Prices, Purpose
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.planning.ranked import RankedPlan
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree

PART_TOKENS = 8192
"""Size that parts need not exceed where no budget binds."""
_SMALLEST_PARTS = 10_000
"""The smallest budget tried for a number of bytes: one token, or so many parts where that is more."""
_TRIES, _CLOSE = 40, 0.97
"""A budget in bytes: most plans looked at, and the share of it that is not worth another."""


@overload
def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    *,
    budget: Any = ...,
    ranks: Literal[1] = ...,
    free_bytes: int | None = ...,
) -> Plan: ...
@overload
def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    *,
    budget: Any = ...,
    ranks: int,
    free_bytes: int | None = ...,
    aligned: bool = ...,
) -> Plan | RankedPlan: ...
def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    *,
    budget: Any = None,
    ranks: int = 1,
    free_bytes: int | None = None,
    aligned: bool = False,
) -> Plan | RankedPlan:
    """The fastest plan found for a batch within a budget; `plan.explain()` says what it does and why.

    Args:
        rows: the batch: K rows (trajectories, or lists or arrays of token ids), their tree, or a packed layout. Of rows
            and trees it plans what their trained predictions need.
        cost: a cost model, or a model's shape for one by formula; a shape may be named ("qwen3-8b", see
            `ModelShape.named`).
        budget: tokens whose graph may be alive at once (int), or bytes above model, gradients and optimiser state
            ("8GiB"; see `parse_budget`). None: parts of about PART_TOKENS where nothing is recomputed for it, and no
            bound but `free_bytes`.
        ranks: processes that share the batch. Above 1: a `RankedPlan`, which says who runs which trajectories, with a
            plan for each rank; not of a packed layout.
        free_bytes: without a budget, what the device has free.
        aligned: plans of ranks that run every pass together, as under FSDP (see `plan.align`). A rank's tree is then
            that of its rows in runs that share nothing, where that is faster.

    Raises:
        ValueError: no budget, one below the smallest that this batch needs, no number of ranks, or no shape's name.
        DataError: rows that are none.
    """
    tree = rows if isinstance(rows, PackedLayout) else as_tree(rows)
    if ranks is not True and isinstance(ranks, int | np.integer) and ranks > 1:
        return over_ranks(tree, cost, int(ranks), budget=budget, free_bytes=free_bytes, aligned=aligned)
    if isinstance(ranks, bool) or ranks != 1:
        raise ValueError(f"ranks={ranks!r}: give the number of processes, from 1")
    given = parse_budget(budget)
    layout = _trained(tree) if isinstance(tree, TokenTree) else tree
    prices = _prices(cost)
    if isinstance(given, Bytes):
        plan, tokens = _within_bytes(layout, prices, given)
    elif given is not None:
        plan, tokens = partition(layout, given, prices.seconds), given
    else:
        plan, tokens = partition(layout, None, prices.seconds, part_tokens=PART_TOKENS), None
        if free_bytes is not None and prices.peak_bytes(plan) > free_bytes:
            plan, tokens = _within_bytes(layout, prices, Bytes(free_bytes))
    return replace(plan, made_for=Purpose(prices=prices, budget=given, tokens=tokens))


def over_ranks(
    tree: TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    ranks: int,
    *,
    budget: Any = None,
    free_bytes: int | None = None,
    aligned: bool = False,
) -> RankedPlan:
    """`make_plan` over any number of ranks, 1 included; arguments and errors are the same."""
    if not isinstance(tree, TokenTree):
        raise ValueError(f"ranks={ranks}: a layout no longer knows its trajectories; give the token tree")
    prices = _prices(cost)
    found = balance(tree, prices if isinstance(prices, CostModel) else None, ranks)
    trees = [build_tree([tree.trajectories[number] for number in own.tolist()]) for own in found.trajectories]
    plans = []
    for rank, own in enumerate(trees):
        try:
            plans.append(make_plan(own, prices, budget=budget, free_bytes=free_bytes))
        except ValueError as error:
            raise ValueError(f"rank {rank} of {ranks}: {error}") from error
    if aligned:
        ways = [ways_of(own, plan, _trained, free_bytes=free_bytes) for own, plan in zip(trees, plans)]
        chosen = choose([offers_of(own) for own in ways])
        plans = [own[number].plan for own, number in zip(ways, chosen)]
    return RankedPlan(plans=plans, dispatch=found, prices=prices)


def _prices(cost: Prices | ModelShape | str) -> Prices:
    return CostModel.from_shape(ModelShape.of(cost)) if isinstance(cost, ModelShape | str) else cost


def _trained(tree: TokenTree) -> PackedLayout:
    """What training computes."""
    return pack(tree, tree.trained_edges()[0] > 0)


def _within_bytes(layout: PackedLayout, prices: Prices, limit: Bytes) -> tuple[Plan, int]:
    """The plan of the largest budget in tokens that is predicted to fit, and that budget.

    Predicted peaks grow with the budget, nearly in proportion to it, so that the search is between what fits and what
    does not, where a straight line through both meets the limit.
    """
    tokens = max(layout.num_tokens, 1)
    smallest = max(1, tokens // _SMALLEST_PARTS)
    fits: tuple[int, float, Plan] | None = None
    above = (tokens + 1, float("inf"))  # the smallest budget that did not fit, and its peak
    guess = tokens
    for _ in range(_TRIES):
        plan = partition(layout, guess, prices.seconds)
        peak = prices.peak_bytes(plan)
        if peak <= limit.count:
            fits = (guess, peak, plan)
        else:
            above = (guess, peak)
        if _is_close(fits, above, limit) or (fits is None and above[0] <= smallest):
            break
        guess = _next_guess(fits, above, limit, smallest)
    if fits is None:
        least = Bytes(math.ceil(above[1]))
        raise ValueError(
            f"budget={limit}: the smallest plan of this batch, {smallest} tokens at once, needs {least} "
            f"({least.count} bytes) above model, gradients and optimiser state; give at least that"
        )
    return fits[2], fits[0]


def _is_close(fits: tuple[int, float, Plan] | None, above: tuple[int, float], limit: Bytes) -> bool:
    return fits is not None and (fits[1] >= _CLOSE * limit.count or above[0] - fits[0] <= max(1, fits[0] // 50))


def _next_guess(fits: tuple[int, float, Plan] | None, above: tuple[int, float], limit: Bytes, smallest: int) -> int:
    low, low_peak = (smallest, 0.0) if fits is None else fits[:2]
    high, high_peak = above
    if fits is None:
        guess = int(high * limit.count / high_peak * 0.9)
        return max(smallest, min(guess, high // 2))
    share = (limit.count - low_peak) / (high_peak - low_peak)
    guess = low + int((high - low) * min(max(share, 0.1), 0.9))
    return min(max(guess, low + 1), high - 1)
