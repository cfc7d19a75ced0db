"""Speed of planning, and quality of the plans of real trees. Run: python benchmarks/planning.py

1. Batches of four million flat tokens in 65,536 rows, with much and little sharing, without a budget and with one of
   8,192 tokens: tree, trained predictions, layout and plan on one core (use the processor time
   on a busy machine), medians over the repeats. Rows go to results/planning.csv.
2. The trained work of the works of workloads.py at two budgets: the larger of a quarter of the tree and its longest
   path, and half the longest path. Predicted, not measured: parts, recomputed tokens and the least possible, seconds
   and those of the same work without extra passes. Rows go to results/plans.csv.
"""

import argparse
import time

import numpy as np

import rows as result_rows
from tree_build import rollouts
from treetrain.check.bench import heights
from treetrain.core.planning.cost import CostModel
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.shapes import ModelShape, make_plan
from workloads import VOCAB, WORKLOADS, load_workload

REPEATS = 5
ROWS, LENGTH = 65_536, 64
BUDGETS = (None, 8_192)
PRICES = CostModel.from_shape(
    ModelShape(layers=14, hidden=384, intermediate=1152, heads=6, kv_heads=2, head_dim=64, vocab=VOCAB, tied=True)
)
"""The model of the CPU benchmarks, by formula."""


def batches() -> dict[str, list[np.ndarray]]:
    """Rows in groups of 16 that share half and more, all of them behind one prompt of 10 tokens, and random ones."""
    grouped = rollouts(ROWS, LENGTH, shared=True)
    prompted = [row.copy() for row in grouped]
    for row in prompted:
        row[:10] = np.arange(10)
    return {"groups of 16": grouped, "one prompt": prompted, "nothing shared": rollouts(ROWS, LENGTH, shared=False)}


def timed(rows: list[np.ndarray], budget: int | None, repeats: int) -> dict:
    """Median seconds of each step by the processor's clock, of all by the wall's, and what the plan is."""
    clocks, walls = np.zeros((repeats, 5)), np.zeros(repeats)
    for repeat in range(repeats):
        wall = time.perf_counter()
        clocks[repeat, 0] = time.process_time()
        tree = build_tree(rows)
        clocks[repeat, 1] = time.process_time()
        trained = tree.trained_edges()[0] > 0
        clocks[repeat, 2] = time.process_time()
        layout = pack(tree, trained)
        clocks[repeat, 3] = time.process_time()
        plan = make_plan(layout, PRICES, budget=budget)
        clocks[repeat, 4] = time.process_time()
        walls[repeat] = time.perf_counter() - wall
    steps = np.median(np.diff(clocks), axis=0)
    total = clocks[:, 4] - clocks[:, 0]
    return {
        "flat_tokens": tree.num_flat_tokens,
        "tokens": layout.num_tokens,
        "segments": len(layout.segment_parent),
        "parts": plan.num_parts,
        "recomputed": plan.recomputed_tokens,
        "rounds": repeats,
        **{f"cpu_s_{name}": round(float(s), 3) for name, s in zip(("build", "trained", "pack", "plan"), steps)},
        "cpu_s_median": round(float(np.median(total)), 3),
        "cpu_s_min": round(float(total.min()), 3),
        "cpu_s_max": round(float(total.max()), 3),
        "wall_s_median": round(float(np.median(walls)), 3),
    }


def planned(name: str) -> list[dict]:
    """A work's plans at these two budgets."""
    tree = build_tree(load_workload(name))
    layout = pack(tree, tree.trained_edges()[0] > 0)
    longest = int(heights(layout).max())
    whole = PRICES.seconds(make_plan(layout, PRICES, budget=layout.num_tokens))
    found = []
    for words, budget in (("quarter", max(layout.num_tokens // 4, longest)), ("half path", max(longest // 2, 1))):
        plan = make_plan(layout, PRICES, budget=budget)
        least = int((heights(layout) > budget).sum())
        by = PRICES.seconds_by(plan)
        forward = by["recomputation"] / plan.recomputed_tokens if plan.recomputed_tokens else 0.0
        ideal = whole + forward * least
        found.append(
            {
                "work": name,
                "tokens": layout.num_tokens,
                "longest": longest,
                "bar": words,
                "budget": budget,
                "parts": plan.num_parts,
                "kept": int(plan.kept.sum()),
                "recomputed": plan.recomputed_tokens,
                "least": least,
                "passes_without_graph": plan.num_prefills,
                "peak_tokens": plan.peak_tokens,
                "seconds": round(sum(by.values()), 3),
                "ideal_seconds": round(ideal, 3),
                "efficiency": round(ideal / sum(by.values()), 3),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed plans per batch")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    for name, rows in batches().items():
        for budget in BUDGETS:
            if not arguments.dry_run and result_rows.has("planning", rows=name, budget=str(budget or "none")):
                continue
            row = {"rows": name, "budget": budget or "none"} | timed(rows, budget, arguments.repeats)
            result_rows.report("planning", row, dry_run=arguments.dry_run)
    for name in WORKLOADS:
        if not arguments.dry_run and result_rows.has("plans", work=name):
            continue
        for row in planned(name):
            result_rows.report("plans", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
