"""A plan in words and numbers, beside plans of smaller and larger budgets."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Bytes, Plan, Purpose, segment_heights


def _kept_graphs(plan: Plan) -> str:
    """Say what happens to the graphs of a plan whose loss is known only after everything has been scored."""
    if plan.scores_first == "recomputed":
        return "all parts run forward without graph, and again with graph when the loss is known (4/3 of the work)"
    if plan.scores_first == "no":
        return ""
    if plan.kept.all():
        return "all parts run forward once; their graphs are kept until the loss is known"
    again = plan.sizes[~plan.kept].sum()
    return (
        f"{plan.kept.sum():,} of {plan.num_parts:,} parts keep their graphs until the loss is known; the others "
        f"({again:,} tokens) run forward again, last first: {_ranges(np.flatnonzero(~plan.kept)[::-1])}"
    )


def _ranges(parts: NDArray[np.integer], most: int = 8) -> str:
    """Numbers of parts, neighbours as ranges, and at most so many of these."""
    runs = np.split(parts, np.flatnonzero(np.abs(np.diff(parts)) > 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:most]) + (" ..." if len(texts) > most else "")


@dataclass(frozen=True, kw_only=True)
class Explained(Purpose):
    """The costs and the budget of a plan, and the plan in words and numbers."""

    cost: CostModel

    def explanation(self, plan: Plan) -> dict[str, Any]:
        """The plan's numbers as plain JSON data; "budgets" has one entry per budget of the table."""
        by = self.cost.seconds_by(plan)
        longest = int(segment_heights(plan.layout).max(initial=0))
        return {
            "budget_tokens": self.tokens,
            "tokens": plan.layout.num_tokens,
            "longest_path": longest,
            "parts": plan.num_parts,
            "largest_part": int(plan.sizes.max(initial=0)),
            "kept_parts": int(plan.kept.sum()),
            "recomputed_parts": int((plan.prefill >= 0).sum()),
            "recomputed_tokens": plan.recomputed_tokens,
            "scores_first": plan.scores_first,
            "peak_tokens": plan.peak_tokens,
            "peak_bytes": self.cost.peak_bytes(plan),
            "seconds": sum(by.values()),
            "seconds_recomputation": by["recomputation"],
            "seconds_fixed": by["passes"],
            "speeds": self.cost.speeds.source,
            "budgets": self._budgets(plan, longest),
        }

    def explain(self, plan: Plan) -> str:
        """The explanation as text."""
        facts = self.explanation(plan)
        f = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
        given = "none given: " if self.budget is None else f"{self.budget}: " * isinstance(self.budget, Bytes)
        leaves = facts["parts"] - int(plan.is_inner.sum())
        seconds = [f"{facts[name]:.3g} s" for name in ("seconds", "seconds_recomputation", "seconds_fixed")]
        sentences = {
            "budget": given + ("no bound" if self.tokens is None else f"{f['budget_tokens']} tokens alive at once"),
            "parts": f"{f['parts']}: {leaves:,} leaves, {f['kept_parts']} kept, {f['recomputed_parts']} recomputed; "
            f"largest {f['largest_part']} tokens",
            "tokens": f"{f['tokens']} computed; longest path {f['longest_path']}",
            "recomputed": f"{f['recomputed_tokens']} tokens forward",
            "scored first": _kept_graphs(plan),
            "alive at once": f"{f['peak_tokens']} tokens",
            "peak memory": f"{Bytes(round(facts['peak_bytes']))} predicted, above model, gradients, optimiser state",
            "time of a step": f"{seconds[0]} predicted: {seconds[1]} run twice, {seconds[2]} passes' fixed cost",
            "speeds": facts["speeds"],
        }
        lines = [f"{name:<17}{text}" for name, text in sentences.items() if text]
        lines += ["", f"{'budget, tokens':>15}{'parts':>9}{'recomputed':>13}{'peak':>12}{'step':>11}"]
        for row in facts["budgets"]:
            budget = "none" if row["budget_tokens"] is None else f"{row['budget_tokens']:,}"
            peak = str(Bytes(round(row["peak_bytes"])))
            line = f"{budget:>15}{row['parts']:>9,}{row['recomputed_tokens']:>13,}{peak:>12}{row['seconds']:>9.3g} s"
            lines.append(f"{line}  {row['name']}".rstrip())
        return "\n".join(lines)

    def _budgets(self, plan: Plan, longest: int) -> list[dict[str, Any]]:
        """Compare this plan with new plans of smaller and larger budgets."""
        tokens = plan.layout.num_tokens
        own = tokens if self.tokens is None else self.tokens
        wanted = {-(-own // 4), own // 2, 2 * own, 4 * own, longest, tokens}
        budgets = sorted({min(max(budget, 1), tokens) for budget in wanted if tokens} - {self.tokens})
        names = {longest: "longest path", tokens: "whole tree"}
        plans: list[tuple[int | None, str, Plan]] = [(self.tokens, "this plan", plan)]
        plans += [(b, names.get(b, ""), partition(plan.layout, b, self.cost.seconds)) for b in budgets]
        plans.sort(key=lambda entry: (entry[0] is None, entry[0] or 0))
        return [
            {
                "budget_tokens": budget,
                "name": name,
                "parts": other.num_parts,
                "recomputed_tokens": other.recomputed_tokens,
                "peak_bytes": self.cost.peak_bytes(other),
                "seconds": self.cost.seconds(other),
            }
            for budget, name, other in plans
        ]
