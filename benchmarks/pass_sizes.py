"""Cost of small passes: the same rows without sharing, in passes of few tokens and of 4,096.

Run: python benchmarks/pass_sizes.py [--repeats 3]

With a budget of n tokens a model runs n tokens at a time under any plan: every pass, whatever its size, reads the
weights and adds to their gradients. Rows of n random tokens are trained by the linear baseline, each in
a pass of its own and packed into passes of 4,096, alternately in one process; attention is the same in both. The ratio
bounds what any plan under a budget of n tokens can reach on this model and machine. Rows are appended to
results/pass_sizes.csv.
"""

import argparse
import os
import statistics
import time

import rows
from workloads import VOCAB, model_30m

SIZES = (56, 162, 512, 1157, 2315)
TOTAL = 4_630


def main() -> None:
    import numpy as np
    import torch

    import treetrain as tt
    from treetrain.check.linear_engine import LinearEngine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows.keep_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = model_30m()
    packed = LinearEngine(model, pack_tokens=4096)
    rng = np.random.default_rng(0)
    for size in SIZES:
        batch = [tt.Trajectory(rng.integers(0, VOCAB, size)) for _ in range(TOTAL // size)]
        alone = LinearEngine(model, pack_tokens=size)
        seconds = {"alone": [], "packed": []}
        for number in range(options.repeats + 1):
            for name, engine in (("alone", alone), ("packed", packed)):
                model.zero_grad(set_to_none=False)
                start = time.perf_counter()
                engine.forward_backward(batch, tt.losses.sft())
                if number:
                    seconds[name].append(time.perf_counter() - start)
        ratios = [whole / small for whole, small in zip(seconds["packed"], seconds["alone"])]
        small, whole = (statistics.median(seconds[name]) for name in ("alone", "packed"))
        row = {
            "pass_tokens": size,
            "passes": len(batch),
            "seconds": f"{small:.3f}",
            "seconds_4096": f"{whole:.3f}",
            "ms_per_pass": f"{1e3 * small / len(batch):.1f}",
            "efficiency": f"{statistics.median(ratios):.3f}",
            "efficiency_min": f"{min(ratios):.3f}",
            "efficiency_max": f"{max(ratios):.3f}",
            "repeats": options.repeats,
        }
        rows.append("pass_sizes", row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
