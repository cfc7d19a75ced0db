"""A plan for a budget in tokens or bytes, for one process or for several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np

from treetrain.planning.balance import Dispatch, balance, slowest_over_mean
from treetrain.planning.budget import Bytes, parse_budget, within_bytes
from treetrain.planning.collective_order import candidates, choose, offers_of
from treetrain.planning.cost import ModelShape
from treetrain.planning.explain import Purpose
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan, Prices
from treetrain.planning.price import CostModel, Floats
from treetrain.tree.assemble import Int64s
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree

PART_TOKENS = 8192
"""Size that parts need not exceed if no budget binds."""
SHOWN = 16
"""Most ranks that `RankedPlan.explain` lists; it prefers the slowest."""


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
) -> "Plan | RankedPlan": ...
def make_plan(
    rows: Sequence[Row] | TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    *,
    budget: Any = None,
    ranks: int = 1,
    free_bytes: int | None = None,
    aligned: bool = False,
) -> "Plan | RankedPlan":
    """Find a fast plan for a batch within a budget; `plan.explain()` describes it.

    Args:
        rows: the batch: K rows (trajectories, or lists or arrays of token ids), their tree, or a packed layout. For
            rows and trees, the plan covers the tokens that their trained predictions need.
        cost: a cost model, or a model's shape or its name ("qwen3-8b", see `ModelShape.named`) for a cost model by
            formula.
        budget: tokens whose graph may be alive at once (int), or bytes above model, gradients and optimiser state
            ("8GiB"; see `parse_budget`). None: parts of about PART_TOKENS if that needs no recomputation, bounded only
            by `free_bytes`.
        ranks: processes that share the batch. Above 1 the result is a `RankedPlan`, which assigns trajectories to ranks
            and has a plan per rank; a packed layout is not allowed then.
        free_bytes: free bytes of the device, used without a budget.
        aligned: make plans for ranks that run every pass together, as under FSDP (see `planning.collective_order`). A
            rank's rows may then be cut into runs that share nothing, if that is faster.

    Raises:
        ValueError: an invalid or too small budget, an invalid number of ranks, or an unknown shape name.
        DataError: invalid rows.
    """
    tree = rows if isinstance(rows, PackedLayout) else as_tree(rows)
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: give the number of processes, from 1")
    if ranks > 1:
        return over_ranks(tree, cost, int(ranks), budget=budget, free_bytes=free_bytes, aligned=aligned)
    given, prices = parse_budget(budget), _prices(cost)
    layout = _trained(tree) if isinstance(tree, TokenTree) else tree
    if isinstance(given, Bytes):
        plan, tokens = within_bytes(layout, prices, given)
    elif given is not None:
        plan, tokens = partition(layout, given, prices.seconds), given
    else:
        plan, tokens = partition(layout, None, prices.seconds, part_tokens=PART_TOKENS), None
        if free_bytes is not None and prices.peak_bytes(plan) > free_bytes:
            plan, tokens = within_bytes(layout, prices, Bytes(free_bytes))
    return replace(plan, made_for=Purpose(prices=prices, budget=given, tokens=tokens))


def over_ranks(
    tree: TokenTree | PackedLayout,
    cost: Prices | ModelShape | str,
    ranks: int,
    *,
    budget: Any = None,
    free_bytes: int | None = None,
    aligned: bool = False,
) -> "RankedPlan":
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
        offered = [candidates(own, plan, _trained, free_bytes=free_bytes) for own, plan in zip(trees, plans)]
        chosen = choose([offers_of(own) for own in offered])
        plans = [own[number].plan for own, number in zip(offered, chosen)]
    return RankedPlan(plans=plans, dispatch=found, prices=prices)


def _prices(cost: Prices | ModelShape | str) -> Prices:
    return CostModel.from_shape(ModelShape.of(cost)) if isinstance(cost, ModelShape | str) else cost


def _trained(tree: TokenTree) -> PackedLayout:
    """The layout of the tokens that training computes."""
    return pack(tree, tree.trained_edges()[0] > 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedPlan:
    """One plan per rank, for a tree of the rank's trajectories in the order of their numbers.

    With `aligned`, that tree may have its rows in runs that share nothing.
    """

    plans: list[Plan]
    """One per rank; without parts if the rank computes nothing."""
    dispatch: Dispatch
    prices: Prices

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.plans)

    @property
    def trajectories(self) -> list[Int64s]:
        """Per rank: the numbers of its trajectories, ascending."""
        return self.dispatch.trajectories

    @cached_property
    def seconds(self) -> Floats:
        """float64 [ranks]: predicted seconds of each rank's work."""
        return np.array([self.prices.seconds(plan) for plan in self.plans])

    @cached_property
    def peak_bytes(self) -> Floats:
        """float64 [ranks]: predicted peak of each rank above model, gradients and optimiser state."""
        return np.array([self.prices.peak_bytes(plan) for plan in self.plans])

    @property
    def imbalance(self) -> float:
        """Slowest rank's seconds over the mean: 1 is perfect."""
        return slowest_over_mean(self.seconds)

    @cached_property
    def tokens(self) -> Int64s:
        """int64 [ranks]: tokens that a rank computes, each copy in the runs of an aligned plan counted."""
        return np.array([plan.layout.num_tokens for plan in self.plans], np.int64)

    @property
    def duplicated(self) -> float:
        """Redundant copies of tokens, relative to the tokens that one process computes."""
        return float(self.tokens.sum()) / self.dispatch.unique - 1 if self.dispatch.unique else 0.0

    def explanation(self) -> dict[str, Any]:
        """Plain JSON data: the balance, and one entry per rank."""
        return {
            "ranks": self.ranks,
            "idle_ranks": self.dispatch.idle,
            "imbalance": self.imbalance,
            "unique_tokens": self.dispatch.unique,
            "duplicated": self.duplicated,
            "seconds": float(self.seconds.max()),
            "peak_bytes": float(self.peak_bytes.max()),
            "per_rank": [
                {
                    "rank": rank,
                    "trajectories": len(self.trajectories[rank]),
                    "tokens": plan.layout.num_tokens,
                    "trained_rows": int(self.dispatch.trained[rank]),
                    "parts": plan.num_parts,
                    "recomputed_tokens": plan.recomputed_tokens,
                    "peak_bytes": float(self.peak_bytes[rank]),
                    "seconds": float(self.seconds[rank]),
                }
                for rank, plan in enumerate(self.plans)
            ],
        }

    def explain(self) -> str:
        """The same as text; `plans[r].explain()` says more of one rank."""
        facts = self.explanation()
        again = int(self.tokens.sum()) - self.dispatch.unique
        idle = f"; {facts['idle_ranks']:,} idle: too few trajectories with anything to train" * (self.dispatch.idle > 0)
        lines = [
            f"ranks            {self.ranks:,}{idle}",
            f"balance          slowest over mean {facts['imbalance']:.3f} (predicted time)",
            f"tokens           {facts['unique_tokens']:,} unique; {again:,} more ({facts['duplicated']:.1%}) are "
            "computed more than once",
            f"time of a step   {facts['seconds']:.3g} s on the slowest rank (predicted; communication excluded)",
            f"peak memory      {Bytes(round(facts['peak_bytes']))} on the fullest rank (predicted), above model, "
            "gradients and optimiser state",
            "",
        ]
        rows = facts["per_rank"]
        if len(rows) > SHOWN:
            rows = sorted(rows, key=lambda row: -row["seconds"])[:SHOWN]
            lines.append(f"the {SHOWN} slowest ranks:")
        lines.append(f"{'rank':>5}{'rows':>9}{'tokens':>11}{'parts':>8}{'recomputed':>13}{'peak':>12}{'step':>11}")
        for row in rows:
            peak = str(Bytes(round(row["peak_bytes"])))
            counts = f"{row['rank']:>5}{row['trajectories']:>9,}{row['tokens']:>11,}{row['parts']:>8,}"
            lines.append(f"{counts}{row['recomputed_tokens']:>13,}{peak:>12}{row['seconds']:>9.3g} s")
        return "\n".join(lines)
