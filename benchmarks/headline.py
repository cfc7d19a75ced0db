"""The table of the README: how much faster a training step is as a tree, on trees whose rows are real branches.

Run: python benchmarks/headline.py [work ...] [--repeats 5] [--layers 14] [--dry-run]. Ten minutes on two cores. It
needs nothing beside this repository: trees have the shapes of real trajectories (benchmarks/shapes), and the model, a
Qwen3-shaped one of 30M parameters in float32, has random weights.

Timed are forward and backward of SFT. The baseline is the fastest run without a tree: rows that another row extends are
merged into it, the others packed, or padded if that was faster in the round that warms up. Beside it stands the same
with every row by itself, packed. All take turns in one process; medians over the rounds, and the least and the greatest
speed-up of a round. Rows are appended to results/headline.csv; a work that has its row at this commit is left out.
"""

import os
import sys

import page
import rows as result_rows
from workloads import WORKLOADS


def measure(work: str, repeats: int, layers: int, dry_run: bool) -> None:
    """Time one work in this process, append its row and print it as a line of the table."""
    if not dry_run and result_rows.has("headline", work=work):
        return print(f"{work}: has its row at this commit")
    import torch

    import rivals

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result_rows.keep_memory()
    model, trajectories = rivals.make(work, layers)
    found = rivals.compare(model, trajectories, {"tree": rivals.Ours(model, trajectories)}, repeats)
    result_rows.report("headline", {"work": work, **found["tree"]}, dry_run=dry_run)


if __name__ == "__main__":
    options = {"repeats": result_rows.count(5), "layers": result_rows.count(14)}
    result_rows.run_each(WORKLOADS, measure, __doc__, **options, dry_run=result_rows.DRY_RUN)
    if "--here" not in sys.argv:
        print(page.headline(result_rows.RESULTS))
