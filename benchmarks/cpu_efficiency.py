"""Measured speed-up of a tree over the best linear baseline, against the FLOP-ideal, on real trajectories on a CPU.

Run: python benchmarks/cpu_efficiency.py [workload ...] [--repeats 5] [--no-memory]

Forward and backward of SFT, float32, a Qwen3-shaped model of 30M parameters (benchmarks/workloads.py), all engines
alternating in one process; a fresh process per workload. Rows are appended to results/cpu_efficiency.csv.
"""

import os
import sys

import rows
from workloads import WORKLOADS, load_workload, model_30m


def measure(name: str, repeats: int, memory: bool) -> None:
    """Benchmark one workload in this process and append its row."""
    import torch

    from treetrain.verification.bench import bench

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = bench(model_30m(), load_workload(name), repeats=repeats, memory=memory, progress=_say)
    row = {
        "workload": name,
        **rows.of_bench(report),
        "distinct_rows": report.distinct_rows,
        "distinct_ideal": "" if report.distinct_ideal is None else f"{report.distinct_ideal:.3f}",
        "distinct_speedup": "" if report.distinct_speedup is None else f"{report.distinct_speedup:.3f}",
        "tree_peak_mb": "" if report.tree_peak_bytes is None else report.tree_peak_bytes >> 20,
        "linear_peak_mb": "" if report.linear_peak_bytes is None else report.linear_peak_bytes >> 20,
    }
    rows.append("cpu_efficiency", row)
    print(row, flush=True)


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    no_memory = {"dest": "memory", "action": "store_false"}
    rows.run_each(WORKLOADS, measure, __doc__, repeats=rows.count(5), no_memory=no_memory)
