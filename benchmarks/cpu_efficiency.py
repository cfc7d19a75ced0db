"""Measured speed-up of a tree over the best linear baseline, against the FLOP-ideal, on real trajectories on a CPU.

Run: python benchmarks/cpu_efficiency.py [workload ...] [--repeats 5] [--no-memory]

Forward and backward of SFT, float32, a Qwen3-shaped model of 30M parameters (benchmarks/workloads.py), all engines
alternating in one process; a fresh process per workload. Rows are appended to results/cpu_efficiency.csv.
"""

import argparse
import os
import subprocess
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--here", action="store_true", help="in this process (one workload)")
    options = parser.parse_args()
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown workload {sorted(unknown)[0]!r}; there are {', '.join(WORKLOADS)}")
    if options.here:
        return measure(options.workloads[0], options.repeats, options.memory)
    for name in options.workloads:
        command = [sys.executable, __file__, name, "--here", "--repeats", str(options.repeats)]
        subprocess.run(command + ([] if options.memory else ["--no-memory"]), check=True)


if __name__ == "__main__":
    main()
