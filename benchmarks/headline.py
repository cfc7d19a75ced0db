"""The table of the README: how much faster a training step is as a tree, on trees whose rows are real branches.

Run: python benchmarks/headline.py [work ...] [--repeats 5] [--dry-run]. It needs nothing beside this repository: trees
have the shapes of real trajectories (benchmarks/shapes), and the model random weights. Ten minutes on two cores.

Forward and backward of SFT, float32, a Qwen3-shaped model of 30M parameters. The baseline is the fastest run without a
tree: rows that another row extends are merged into it, the others packed or padded, with the same fused head. Beside
it stands the same with every row by itself. All engines take turns in one process; medians over the rounds, and the
least and the greatest speed-up of a round. Rows are appended to results/headline.csv.
"""

import os

import rows as result_rows

WORKS = {
    "search trees": "tot_game24",
    "sampled answers to two prompts": "codet_humaneval",
    "tool agent, think blocks dropped": "tau_airline_think_48",
    "tool agent, calls extend calls": "tau_airline_calls_48",
}
"""The last: 15 of 19 calls are prefixes of others, which need no tree to be trained once."""


def measure(work: str, repeats: int, dry_run: bool) -> None:
    """Time one work in this process, and append its row."""
    import torch

    import treetrain as tt
    from tree_shapes import load, rows_of
    from treetrain.check.bench import bench
    from workloads import VOCAB, model_30m

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result_rows.keep_memory()
    model, trajectories = model_30m(), rows_of(load(WORKS[work]), VOCAB)
    merged = bench(model, trajectories, repeats=repeats)
    # A loss that is given may need every row, so the baselines train every row.
    alone = bench(model, trajectories, loss=tt.losses.sft(), repeats=repeats, baselines=[merged.baseline])
    row = {
        "work": work,
        **result_rows.of_bench(merged),
        "merged_rows": merged.linear_rows,
        "each_row_seconds": f"{alone.baselines[alone.baseline]:.3f}",
        "each_row_speedup": f"{alone.speedup:.3f}",
        "each_row_ideal": f"{alone.ideal:.3f}",
    }
    result_rows.report("headline", row, dry_run=dry_run)
    print(
        f"{work}: {merged.trajectories} rows, {merged.linear_rows} that no other extends; "
        f"{merged.tree_seconds:.2f} s as a tree, {merged.speedup:.2f} times as fast as without "
        f"({merged.speedup_spread[0]:.2f} to {merged.speedup_spread[1]:.2f}; FLOPs allow {merged.ideal:.2f}), "
        f"{alone.speedup:.2f} times as fast as every row by itself"
    )


if __name__ == "__main__":
    result_rows.run_each(WORKS, measure, __doc__, repeats=result_rows.count(5), dry_run=result_rows.DRY_RUN)
