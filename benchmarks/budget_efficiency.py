"""Speed under a budget on real trajectories on a CPU, against the FLOP-ideal of that budget.

Run: python benchmarks/budget_efficiency.py [work ...] [--repeats 5] [--dry-run]. Eight minutes on two cores.

SFT on a Qwen3-shaped model of 30M parameters, float32; baseline and rounds are those of headline.py, in a fresh process
per work. Budgets, in tokens: a quarter of the tree or the longest path, whichever is larger; half of the longest path,
if that is at least 512 tokens: smaller passes are slow with or without a tree (pass_sizes.py). The ideal counts,
besides the tree's own FLOPs, one forward of the fewest tokens that any plan within the budget must run twice. Rows are
appended to results/budget_efficiency.csv; a work that has its rows at this commit is left out.
"""

import os
from typing import Any

import rows
from workloads import WORKLOADS, model_30m, shaped

WORKS = {
    "tool agent, think blocks dropped": WORKLOADS["tool agent, think blocks dropped"],
    "sampled answers": ("codet_humaneval", 100),
    "search trees": ("tot_game24", 200),
}
"""Larger than those of workloads.py where a quarter of the tree would be a pass of a few hundred tokens."""
LEAST = 512


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Time one work in this process and append a row per budget."""
    if not dry_run and rows.has("budget_efficiency", work=name):
        return print(f"{name}: has its rows at this commit")
    import torch

    import rivals
    import treetrain as tt
    from treetrain.check.bench import budget_share, heights

    class Bounded(rivals.Ours):
        """The tree under a budget."""

        def __init__(self, tokens: int) -> None:
            self.options = {"budget": tokens}
            super().__init__(model, batch)

    rows.keep_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, batch = model_30m(), shaped(*WORKS[name])
    tree = tt.build_tree(batch)
    layout = tt.TreeEngine(model).plan(tree).layout
    longest = int(layout.positions.max()) + 1
    budgets = {"quarter": max(layout.num_tokens // 4, longest)}
    if longest // 2 >= LEAST:
        budgets["half path"] = longest // 2
    ways = {key: Bounded(tokens) for key, tokens in budgets.items()}
    found: dict[str, dict[str, Any]] = rivals.compare(model, batch, ways, repeats)
    for key, tokens in budgets.items():
        engine = ways[key].engine
        plan = engine.plan(tree)
        ideal = float(found[key]["ideal"]) * budget_share(plan, engine.cost.counts, tokens)
        row = {
            "work": name,
            "budget": key,
            "budget_tokens": tokens,
            "longest_path": longest,
            "parts": plan.num_parts,
            "passes_without_graph": plan.num_prefills,
            "recomputed": plan.recomputed_tokens,
            "least_recomputed": int((heights(layout) > tokens).sum()),
            **found[key],
            "ideal": f"{ideal:.3f}",
            "efficiency": f"{float(found[key]['speedup']) / ideal:.3f}",
        }
        rows.report("budget_efficiency", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(WORKS, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
