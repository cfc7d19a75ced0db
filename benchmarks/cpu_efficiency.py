"""Measured speed-up of a tree over the best linear baseline, against the FLOP-ideal, on real trajectories on a CPU.

Run: python benchmarks/cpu_efficiency.py [workload ...] [--repeats 5] [--no-memory]

Forward and backward of SFT, float32, a Qwen3-shaped model of 30M parameters (benchmarks/workloads.py), all engines
alternating in one process; a fresh process per workload. Rows are appended to results/cpu_efficiency.csv.
"""

import os

import rows
from workloads import WORKLOADS, load_workload, model_30m


def measure(name: str, repeats: int, memory: bool) -> None:
    """Benchmark one workload in this process and append its row."""
    import torch

    import treetrain as tt
    from memory import peak_step_bytes
    from treetrain.check.bench import PaddedEngine, bench
    from treetrain.check.linear_engine import LinearEngine
    from treetrain.engine import TreeEngine
    from treetrain.models.work import distinct_rows

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows.keep_memory()
    model, trajectories = model_30m(), load_workload(name)
    loss = tt.losses.sft()  # given, so that the baselines train every row by itself
    report = bench(model, trajectories, loss=loss, repeats=repeats)
    distinct = [trajectories[k] for k in distinct_rows(tt.build_tree(trajectories)).nonzero()[0]]
    apart = None  # without exact repeats, if there are any
    if len(distinct) < len(trajectories):
        apart = bench(model, distinct, loss=loss, repeats=repeats, baselines=[report.baseline])
    peaks: list[int | None] = [None, None]
    if memory:
        kind, tokens = report.baseline.split()
        linear = PaddedEngine if kind == "padded" else LinearEngine
        engines = (TreeEngine, {}), (linear, {"pack_tokens": int(tokens)})
        peaks = [peak_step_bytes(*engine, model, trajectories, tt.losses.sft()) for engine in engines]
    row = {
        "workload": name,
        **rows.of_bench(report),
        "distinct_rows": len(distinct),
        "distinct_ideal": "" if apart is None else f"{apart.ideal:.3f}",
        "distinct_speedup": "" if apart is None else f"{apart.speedup:.3f}",
        "tree_peak_mb": "" if peaks[0] is None else peaks[0] >> 20,
        "linear_peak_mb": "" if peaks[1] is None else peaks[1] >> 20,
    }
    rows.append("cpu_efficiency", row)
    print(row, flush=True)


if __name__ == "__main__":
    no_memory = {"dest": "memory", "action": "store_false"}
    rows.run_each(WORKLOADS, measure, __doc__, repeats=rows.count(5), no_memory=no_memory)
