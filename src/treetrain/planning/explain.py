"""A plan in words and numbers, beside the plans that other budgets would give."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from treetrain.planning.budget import Bytes
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan, heights, least_recomputed


class Prices(Protocol):
    """What planning asks of a cost model; `treetrain.planning.price.CostModel` is one."""

    def seconds(self, plan: Plan) -> float:
        """Predicted time of a training step."""
        ...

    def seconds_by(self, plan: Plan) -> dict[str, float]:
        """What that time goes to; "recomputation", "bytes" and "passes" are named."""
        ...

    def peak_bytes(self, plan: Plan) -> float:
        """Predicted peak memory above model, gradients and optimiser state."""
        ...

    def bytes_by(self, plan: Plan) -> dict[str, float]:
        """What is alive at that peak."""
        ...


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a plan was made for."""

    prices: Prices
    budget: int | Bytes | None
    """As given."""
    tokens: int | None
    """The budget in tokens that it came to; None for no bound."""

    def explanation(self, plan: Plan) -> dict[str, Any]:
        """Plain JSON data: the plan's numbers, and one entry of "budgets" for each budget of the table."""
        by = self.prices.seconds_by(plan)
        closed, late = ~plan.is_inner, plan.prefill >= 0
        longest = int(heights(plan.layout).max(initial=0))
        given = self.budget
        return {
            "budget": given.count if isinstance(given, Bytes) else given,
            "budget_unit": "bytes" if isinstance(given, Bytes) else "tokens",
            "budget_tokens": self.tokens,
            "tokens": plan.layout.num_tokens,
            "longest_path": longest,
            "parts": plan.num_parts,
            "closed_parts": int(closed.sum()),
            "kept_parts": int(plan.kept.sum()),
            "late_parts": int(late.sum()),
            "largest_part": int(plan.sizes.max(initial=0)),
            "median_part": float(np.median(plan.sizes)) if plan.num_parts else 0.0,
            "kept_tokens": int(plan.sizes[plan.kept].sum()),
            "recomputed_tokens": plan.recomputed_tokens,
            "least_recomputed_tokens": least_recomputed(plan.layout, longest if self.tokens is None else self.tokens),
            "passes_without_graph": _passes_without_graph(plan),
            "scores_first": plan.scores_first,
            "peak_tokens": plan.peak_tokens,
            "peak_bytes": self.prices.peak_bytes(plan),
            "peak_bytes_by": self.prices.bytes_by(plan),
            "seconds": self.prices.seconds(plan),
            "seconds_by": by,
            "seconds_recomputation": by["recomputation"],
            "seconds_fixed": by["bytes"] + by["passes"],
            "constants": str(getattr(getattr(self.prices, "constants", None), "source", "")),
            "budgets": self._table(plan, longest),
        }

    def explain(self, plan: Plan) -> str:
        """The same as text of at most 100 columns."""
        facts = self.explanation(plan)
        lines = [f"{name:<17}{text}" for name, text in _sentences(facts, self.budget)]
        return "\n".join([*lines, "", *_table_lines(facts["budgets"])])

    def _table(self, plan: Plan, longest: int) -> list[dict[str, Any]]:
        tokens = plan.layout.num_tokens
        quarter, own = -(-tokens // 4), tokens if self.tokens is None else self.tokens
        wanted = {-(-own // 4), own // 2, 2 * own, 4 * own, longest, quarter, tokens}
        budgets = sorted({min(max(budget, 1), tokens) for budget in wanted if tokens} - {self.tokens})
        found: list[tuple[int | None, Plan]] = [
            (budget, partition(plan.layout, budget, self.prices.seconds)) for budget in budgets
        ]
        place = len(found) if self.tokens is None else sum(budget < self.tokens for budget in budgets)
        found.insert(place, (self.tokens, plan))
        own_seconds = self.prices.seconds(plan)
        names = {longest: "longest path", quarter: "quarter of the tree", tokens: "whole tree"}
        rows = []
        for budget, other in found:
            seconds = self.prices.seconds(other)
            rows.append(
                {
                    "budget_tokens": budget,
                    "this_plan": other is plan,
                    "name": names.get(budget, "") if budget else "",
                    "parts": other.num_parts,
                    "recomputed_tokens": other.recomputed_tokens,
                    "peak_bytes": self.prices.peak_bytes(other),
                    "seconds": seconds,
                    "relative_speed": own_seconds / seconds if seconds else 1.0,
                }
            )
        return rows


SCORED_FIRST = {
    "kept": "all parts run forward once; their graphs are kept until the loss is known",
    "recomputed": "all parts run forward without graph, and again with graph when the loss is known (4/3 of the work)",
}
"""What a plan does where the loss is known only when everything has been scored."""


def _passes_without_graph(plan: Plan) -> int:
    scored = plan.num_parts if plan.scores_first == "recomputed" else 0
    return plan.num_prefills + scored


def _sentences(facts: dict[str, Any], budget: int | Bytes | None) -> list[tuple[str, str]]:
    bound = "no bound" if facts["budget_tokens"] is None else f"{facts['budget_tokens']:,} tokens alive at once"
    given = {"int": "", "NoneType": "none given: "}.get(type(budget).__name__, f"{budget}: ")
    kinds = f"{facts['closed_parts']:,} closed, {facts['kept_parts']:,} kept, {facts['late_parts']:,} late"
    sizes = f"largest {facts['largest_part']:,} tokens, median {facts['median_part']:,.0f}"
    again, least = facts["recomputed_tokens"], facts["least_recomputed_tokens"]
    passes = f"{facts['parts']:,} with graph, {facts['passes_without_graph']:,} without"
    computed = f"{facts['tokens']:,} computed, {facts['kept_tokens']:,} in kept parts"
    longest = f"longest path {facts['longest_path']:,}"
    twice, fixed = f"{facts['seconds_recomputation']:.3g} s", f"{facts['seconds_fixed']:.3g} s"
    return [
        ("budget", given + bound),
        ("parts", f"{facts['parts']:,}: {kinds}; {sizes}"),
        ("tokens", f"{computed}; {longest}"),
        ("recomputed", f"{again:,} tokens forward; {least:,} is the least possible at this budget"),
        ("passes", passes),
        *([] if facts["scores_first"] == "no" else [("scored first", SCORED_FIRST[facts["scores_first"]])]),
        ("alive at once", f"{facts['peak_tokens']:,} tokens"),
        ("peak memory", f"{Bytes(round(facts['peak_bytes']))} above model, gradients and optimiser state (predicted)"),
        (
            "time of a step",
            f"{facts['seconds']:.3g} s (predicted): {twice} recomputation, {fixed} passes' fixed cost",
        ),
        *([("constants", facts["constants"])] if facts["constants"] else []),
    ]


def _table_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'budget, tokens':>15}{'parts':>9}{'recomputed':>13}{'peak':>12}{'step':>11}{'speed':>8}"]
    for row in rows:
        words = ", ".join(filter(None, ["this plan" if row["this_plan"] else "", row["name"]]))
        peak = str(Bytes(round(row["peak_bytes"])))
        budget = "none" if row["budget_tokens"] is None else f"{row['budget_tokens']:,}"
        line = f"{budget:>15}{row['parts']:>9,}{row['recomputed_tokens']:>13,}{peak:>12}"
        lines.append(f"{line}{row['seconds']:>9.3g} s{row['relative_speed']:>7.2f}x  {words}".rstrip())
    return lines
