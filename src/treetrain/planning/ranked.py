"""The plans of a batch over several ranks: which trajectories each runs, and how."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from treetrain.planning.balance import Dispatch
from treetrain.planning.budget import Bytes
from treetrain.planning.explain import Prices
from treetrain.planning.plan import Plan
from treetrain.planning.price import Floats
from treetrain.tree.assemble import Int64s

SHOWN = 16
"""Ranks that `explain` lists; of more, the slowest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedPlan:
    """One plan per rank. A rank's plan is for a tree of its own trajectories, in the order of their numbers.

    Aligned plans may be for several trees of them, which share nothing.
    """

    plans: list[Plan]
    """Per rank; one without parts where the rank computes nothing."""
    dispatch: Dispatch
    prices: Prices

    @property
    def ranks(self) -> int:
        """How many there are."""
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

    @cached_property
    def imbalance(self) -> float:
        """Slowest rank's seconds over the mean's: 1 is perfect."""
        mean = float(self.seconds.mean())
        return float(self.seconds.max()) / mean if mean else 1.0

    @cached_property
    def tokens(self) -> Int64s:
        """int64 [ranks]: tokens that a rank computes, those of aligned plans that it computes again included."""
        return np.array([plan.layout.num_tokens for plan in self.plans], np.int64)

    @cached_property
    def duplicated(self) -> float:
        """Tokens computed more than once, each copy but the first, over the tokens of one process."""
        return float(self.tokens.sum()) / self.dispatch.unique - 1 if self.dispatch.unique else 0.0

    def explanation(self) -> dict[str, Any]:
        """Plain JSON data: the balance, and one entry per rank."""
        rows = [
            {
                "rank": rank,
                "trajectories": len(numbers),
                "tokens": plan.layout.num_tokens,
                "trained_rows": int(trained),
                "parts": plan.num_parts,
                "recomputed_tokens": plan.recomputed_tokens,
                "peak_bytes": float(peak),
                "seconds": float(seconds),
            }
            for rank, (numbers, plan, trained, peak, seconds) in enumerate(
                zip(self.trajectories, self.plans, self.dispatch.trained, self.peak_bytes, self.seconds)
            )
        ]
        return {
            "ranks": self.ranks,
            "idle_ranks": self.dispatch.idle,
            "imbalance": self.imbalance,
            "unique_tokens": self.dispatch.unique,
            "duplicated": self.duplicated,
            "seconds": float(self.seconds.max()),
            "peak_bytes": float(self.peak_bytes.max()),
            "per_rank": rows,
        }

    def explain(self) -> str:
        """The same as text; `plans[r].explain()` says more of one rank."""
        facts = self.explanation()
        rows = facts["per_rank"]
        again = round(facts["duplicated"] * facts["unique_tokens"])
        idle = f"; {facts['idle_ranks']:,} idle: too few trajectories with anything to train" * bool(
            facts["idle_ranks"]
        )
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
        if len(rows) > SHOWN:
            rows = sorted(rows, key=lambda row: -row["seconds"])[:SHOWN]
            lines.append(f"the {SHOWN} slowest ranks:")
        lines.append(f"{'rank':>5}{'rows':>9}{'tokens':>11}{'parts':>8}{'recomputed':>13}{'peak':>12}{'step':>11}")
        for row in rows:
            peak = str(Bytes(round(row["peak_bytes"])))
            counts = f"{row['rank']:>5}{row['trajectories']:>9,}{row['tokens']:>11,}{row['parts']:>8,}"
            lines.append(f"{counts}{row['recomputed_tokens']:>13,}{peak:>12}{row['seconds']:>9.3g} s")
        return "\n".join(lines)
