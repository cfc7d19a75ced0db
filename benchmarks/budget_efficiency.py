"""Speed under a budget on real trajectories on a CPU, against the FLOP-ideal of that budget.

Run: python benchmarks/budget_efficiency.py [workload ...] [--repeats 5] [--baselines "packed 4096" ...]

SFT on a Qwen3-shaped model of 30M parameters, float32. The baselines train the rows that no other row extends, with the
weights of all; all engines alternate in one process, a fresh process per workload. Budgets, in tokens: a quarter of the
tree or the longest path, whichever is larger; half of the longest path. The ideal counts, besides the tree's own FLOPs,
one forward of the fewest tokens that any plan within the budget must run twice. Rows are appended to
results/budget_efficiency.csv.
"""

import os
import statistics
import sys
import time

import rows
from workloads import load_workload, model_30m

NAMES = ("tau_airline_think", "tot_game24", "codet_humaneval")

BASELINES = ("packed 4096", "packed 8192", "padded 4096")


def measure(name: str, repeats: int, baselines: list[str]) -> None:
    """Benchmark one workload in this process and append a row per budget."""
    import torch

    import treetrain as tt
    from treetrain.check.bench import PaddedEngine
    from treetrain.check.linear_engine import LinearEngine
    from treetrain.core.planning.plan import heights
    from treetrain.models.work import cheapest_rows

    rows.keep_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, batch = model_30m(), load_workload(name)
    tree = tt.build_tree(batch)
    merged = cheapest_rows(tree)
    layout = tt.TreeEngine(model).plan(tree).layout
    longest = int(layout.positions.max()) + 1
    budgets = {"quarter": max(layout.num_tokens // 4, longest), "half path": longest // 2}
    engines: dict[str, tt.TreeEngine] = {key: tt.TreeEngine(model, budget=value) for key, value in budgets.items()}
    linear = {
        "packed 4096": LinearEngine(model, pack_tokens=4096),
        "packed 8192": LinearEngine(model, pack_tokens=8192),
        "padded 4096": PaddedEngine(model, pack_tokens=4096),
    }
    linear = {key: engine for key, engine in linear.items() if key in baselines}
    works = dict.fromkeys(linear, merged) | dict.fromkeys(engines, batch)
    warm = _rounds(linear | engines, works, 1)
    best = min(linear, key=lambda key: warm[key][0])
    seconds = _rounds({best: linear[best]} | engines, works, repeats)
    for key, budget in budgets.items():
        plan = engines[key].plan(tree)
        least = int((heights(layout) > budget).sum())
        ideal = _ideal(tt.build_tree(merged), tree, model, layout, budget)
        ratios = [slow / fast for slow, fast in zip(seconds[best], seconds[key])]
        row = {
            "workload": name,
            "budget": key,
            "budget_tokens": budget,
            "tokens": layout.num_tokens,
            "longest_path": longest,
            "parts": plan.num_parts,
            "passes_without_graph": plan.num_prefills,
            "recomputed": plan.recomputed_tokens,
            "least_recomputed": least,
            "predicted_seconds": f"{engines[key].cost.seconds(plan):.2f}",
            "ideal": f"{ideal:.3f}",
            "seconds": f"{statistics.median(seconds[key]):.3f}",
            "linear_seconds": f"{statistics.median(seconds[best]):.3f}",
            "baseline": best,
            "repeats": repeats,
            "speedup": f"{statistics.median(ratios):.3f}",
            "speedup_min": f"{min(ratios):.3f}",
            "speedup_max": f"{max(ratios):.3f}",
            "efficiency": f"{statistics.median(ratios) / ideal:.3f}",
        }
        rows.append("budget_efficiency", row)
        print(row, flush=True)


def _ideal(merged, tree, model, layout, budget: int) -> float:
    """FLOPs of the merged rows over those of the tree with the forward of the least recomputed tokens counted twice."""
    from treetrain.core.planning.plan import heights
    from treetrain.core.tree.layout import pairs_at
    from treetrain.models.costs import count
    from treetrain.models.work import linear_work, tree_work

    shape = count(model)
    twice = heights(layout) > budget
    # A forward is a third of a step; the LM head is not needed to run a token again.
    again = shape.flops(int(twice.sum()), pairs_at(layout.positions[twice]), 0) / 3
    return shape.flops(*linear_work(merged)) / (shape.flops(*tree_work(tree)) + again)


def _rounds(engines, works, count: int) -> dict[str, list[float]]:
    from treetrain.losses import sft

    seconds: dict[str, list[float]] = {key: [] for key in engines}
    for number in range(count):
        for key, engine in engines.items():
            print(f"  round {number + 1} of {count}: {key}", file=sys.stderr, flush=True)
            engine.model.zero_grad(set_to_none=False)
            start = time.perf_counter()
            engine.forward_backward(works[key], sft())
            seconds[key].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    rows.run_each(
        NAMES,
        measure,
        __doc__,
        repeats=rows.count(5),
        baselines={"nargs": "+", "default": list(BASELINES), "choices": BASELINES},
    )
