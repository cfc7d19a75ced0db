"""Explain a plan in words and numbers, and compare it with the plans of other budgets."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from treetrain.planning.budget import Bytes
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan, heights, least_recomputed
from treetrain.planning.price import CostModel

SCORED_FIRST = {
    "kept": "all parts run forward once; their graphs are kept until the loss is known",
    "recomputed": "all parts run forward without graph, and again with graph when the loss is known (4/3 of the work)",
}
"""Texts for plans whose loss is known only when everything has been scored."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """The cost model and the budget that a plan was made for."""

    cost: CostModel
    budget: int | Bytes | None
    """As given."""
    tokens: int | None
    """The resulting budget in tokens; None for no bound."""

    def explanation(self, plan: Plan) -> dict[str, Any]:
        """The plan's numbers as plain JSON data; "budgets" has one entry per budget of the table."""
        by = self.cost.seconds_by(plan)
        recomputed = plan.prefill >= 0
        longest = int(heights(plan.layout).max(initial=0))
        given = self.budget
        return {
            "budget": given.count if isinstance(given, Bytes) else given,
            "budget_unit": "bytes" if isinstance(given, Bytes) else "tokens",
            "budget_tokens": self.tokens,
            "tokens": plan.layout.num_tokens,
            "longest_path": longest,
            "parts": plan.num_parts,
            "leaf_parts": int((~plan.is_inner).sum()),
            "kept_parts": int(plan.kept.sum()),
            "recomputed_parts": int(recomputed.sum()),
            "largest_part": int(plan.sizes.max(initial=0)),
            "median_part": float(np.median(plan.sizes)) if plan.num_parts else 0.0,
            "kept_tokens": int(plan.sizes[plan.kept].sum()),
            "recomputed_tokens": plan.recomputed_tokens,
            "least_recomputed_tokens": least_recomputed(plan.layout, longest if self.tokens is None else self.tokens),
            "passes_without_graph": plan.num_prefills + plan.num_parts * (plan.scores_first == "recomputed"),
            "scores_first": plan.scores_first,
            "peak_tokens": plan.peak_tokens,
            "peak_bytes": self.cost.peak_bytes(plan),
            "peak_bytes_by": self.cost.bytes_by(plan),
            "seconds": self.cost.seconds(plan),
            "seconds_by": by,
            "seconds_recomputation": by["recomputation"],
            "seconds_fixed": by["passes"],
            "speeds": self.cost.speeds.source,
            "budgets": self._other_budgets(plan, longest),
        }

    def explain(self, plan: Plan) -> str:
        """The same as text of at most 100 columns."""
        facts = self.explanation(plan)
        f = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
        given = "none given: " if self.budget is None else f"{self.budget}: " * isinstance(self.budget, Bytes)
        alive = "no bound" if self.tokens is None else f"{f['budget_tokens']} tokens alive at once"
        kinds = f"{f['leaf_parts']} leaves, {f['kept_parts']} kept, {f['recomputed_parts']} recomputed"
        seconds = [f"{facts[name]:.3g} s" for name in ("seconds", "seconds_recomputation", "seconds_fixed")]
        sentences = {
            "budget": given + alive,
            "parts": f"{f['parts']}: {kinds}; largest {f['largest_part']} tokens, median {f['median_part']:,.0f}",
            "tokens": f"{f['tokens']} computed, {f['kept_tokens']} in kept parts; longest path {f['longest_path']}",
            "recomputed": f"{f['recomputed_tokens']} tokens forward; {f['least_recomputed_tokens']} is the least "
            "possible at this budget",
            "passes": f"{f['parts']} with graph, {f['passes_without_graph']} without",
            "scored first": SCORED_FIRST.get(facts["scores_first"], ""),
            "alive at once": f"{f['peak_tokens']} tokens",
            "peak memory": f"{Bytes(round(facts['peak_bytes']))} above model, gradients and optimiser state "
            "(predicted)",
            "time of a step": f"{seconds[0]} (predicted): {seconds[1]} recomputation, {seconds[2]} passes' fixed cost",
            "speeds": facts["speeds"],
        }
        lines = [f"{name:<17}{text}" for name, text in sentences.items() if text]
        lines += ["", f"{'budget, tokens':>15}{'parts':>9}{'recomputed':>13}{'peak':>12}{'step':>11}{'speed':>8}"]
        for row in facts["budgets"]:
            words = ", ".join(filter(None, ["this plan" if row["this_plan"] else "", row["name"]]))
            budget = "none" if row["budget_tokens"] is None else f"{row['budget_tokens']:,}"
            peak = str(Bytes(round(row["peak_bytes"])))
            line = f"{budget:>15}{row['parts']:>9,}{row['recomputed_tokens']:>13,}{peak:>12}"
            lines.append(f"{line}{row['seconds']:>9.3g} s{row['relative_speed']:>7.2f}x  {words}".rstrip())
        return "\n".join(lines)

    def _other_budgets(self, plan: Plan, longest: int) -> list[dict[str, Any]]:
        """This plan and plans of smaller and larger budgets, which are made here."""
        tokens = plan.layout.num_tokens
        quarter, own = -(-tokens // 4), tokens if self.tokens is None else self.tokens
        wanted = {-(-own // 4), own // 2, 2 * own, 4 * own, longest, quarter, tokens}
        budgets = {min(max(budget, 1), tokens) for budget in wanted if tokens} - {self.tokens}
        plans: list[tuple[int | None, Plan]] = [(b, partition(plan.layout, b, self.cost.seconds)) for b in budgets]
        plans.append((self.tokens, plan))
        plans.sort(key=lambda entry: (entry[0] is None, entry[0] or 0))
        names = {longest: "longest path", quarter: "quarter of the tree", tokens: "whole tree"}
        rows, own_seconds = [], self.cost.seconds(plan)
        for budget, other in plans:
            seconds = self.cost.seconds(other)
            rows.append(
                {
                    "budget_tokens": budget,
                    "this_plan": other is plan,
                    "name": names.get(budget, "") if budget else "",
                    "parts": other.num_parts,
                    "recomputed_tokens": other.recomputed_tokens,
                    "peak_bytes": self.cost.peak_bytes(other),
                    "seconds": seconds,
                    "relative_speed": own_seconds / seconds if seconds else 1.0,
                }
            )
        return rows
