"""A step of two context-parallel processes against one process with as many threads.

Run: python benchmarks/context_parallel.py. A trunk of 3,072 tokens with four branches of 256, the 30M-parameter model
of the other benchmarks in float32, gloo. Each of the two processes has one thread and a budget of half of the tree. One
process has two threads, and once the whole tree as its budget, once half of it, so that it must recompute. The three
ways alternate; medians are compared. A row goes to results/context_parallel.csv.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

import rows as result_rows
import treetrain as tt
from workloads import VOCAB, model_30m

SIZE, WARMUP, TRUNK, BRANCHES, LENGTH = 2, 1, 3072, 4, 256


def measure(rank: int, size: int, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Measure the three ways alternately; rank 0 also runs those of one process, while rank 1 waits."""
    result_rows.keep_memory()
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCAB, TRUNK).tolist()
    rows = [tt.Trajectory([*trunk, *rng.integers(0, VOCAB, LENGTH).tolist()]) for _ in range(BRANCHES)]
    tokens = tt.build_tree(rows).num_tokens
    model = model_30m()
    engines = {
        "context": tt.TreeEngine(model, budget=-(-tokens // SIZE), context=dist.group.WORLD),
        "whole": tt.TreeEngine(model, budget=tokens),
        "half": tt.TreeEngine(model, budget=-(-tokens // SIZE)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(WARMUP + repeats):
        for name, engine in engines.items():
            torch.set_num_threads(1 if name == "context" else SIZE)
            model.zero_grad(set_to_none=True)
            dist.barrier()
            started = time.perf_counter()
            if name == "context" or rank == 0:
                engine.forward_backward(rows, tt.losses.sft())
            dist.barrier()
            if number >= WARMUP:
                seconds[name].append(time.perf_counter() - started)
    return seconds, tokens


def main() -> None:
    """Measure, print and append a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", **result_rows.DRY_RUN)
    options = parser.parse_args()
    seconds, tokens = result_rows.on_ranks(measure, SIZE, options.repeats)[0]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {
        name: statistics.median(one / both for one, both in zip(seconds[name], seconds["context"]))
        for name in ("whole", "half")
    }
    row = {
        "model": "model_30m",
        "processes": SIZE,
        "unique_tokens": tokens,
        "context_seconds": f"{medians['context']:.3f}",
        "one_process_seconds": f"{medians['whole']:.3f}",
        "one_process_half_budget_seconds": f"{medians['half']:.3f}",
        "speed_of_one_process": f"{ratios['whole']:.3f}",
        "speed_of_one_process_half_budget": f"{ratios['half']:.3f}",
        "repeats": options.repeats,
    }
    print(row)
    if not options.dry_run:
        result_rows.append("context_parallel", row)


if __name__ == "__main__":
    main()
