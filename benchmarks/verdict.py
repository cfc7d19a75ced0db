"""The verdict of `treetrain inspect` against measured times, in one batch and in batches of eight rows.

Run: python benchmarks/verdict.py [work ...] [--repeats 5] [--dry-run]. Six minutes.

Forward and backward of SFT, float32, a Qwen3-shaped model of 4 layers and 7M parameters, the works of workloads.py; a
fresh process for each, one thread. Measured is the processor time of the rows that no other row extends (the fastest of
`bench`'s baselines), over that of the trees of all batches, in turns; both sides in as many batches. Rows are appended
to results/verdict.csv; a work that has its rows at this commit is left out.
"""

import re
import statistics
import time

import numpy as np

import rows
from workloads import VOCAB, WORKLOADS, load_workload

BATCH = 8


def small_model():
    """A Qwen3-shaped model with its usual shares of layers, attention and head in the FLOPs."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": VOCAB, "num_hidden_layers": 4, "head_dim": 64, "max_position_embeddings": 32_768}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **more, tie_word_embeddings=True))


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Compare on one work in this process and append two rows."""
    if not dry_run and rows.has("verdict", work=name):
        return print(f"{name}: has its rows at this commit")
    import torch

    import treetrain as tt
    from treetrain.check.bench import LinearEngine, PaddedEngine, bench
    from treetrain.logs.inspection.report import Shape, inspect_rows
    from treetrain.models.costs import cost_of
    from treetrain.models.work import cheapest_rows

    torch.set_num_threads(1)
    rows.keep_memory()
    model, trajectories = small_model(), load_workload(name)
    shape = Shape(counts=cost_of(model).counts, name="7M", assumed=False)
    tree = tt.build_tree(trajectories)
    linear_rows = cheapest_rows(tree)
    kind, tokens = bench(model, trajectories, repeats=1).baseline.split()
    linear = {"packed": LinearEngine, "padded": PaddedEngine}[kind](model, pack_tokens=int(tokens))
    engine, loss = tt.TreeEngine(model), tt.losses.sft()
    order = np.argsort(tree.trajectory_last, kind="stable")

    def seconds(engine, batches) -> float:
        start = time.process_time()
        for batch in batches:
            engine.forward_backward(batch, loss)
        return time.process_time() - start

    for size in (len(trajectories), BATCH):
        batches = [[trajectories[k] for k in part] for part in np.split(order, range(size, len(order), size))]
        apart = [linear_rows[at :: len(batches)] for at in range(len(batches))]
        seconds(engine, batches), seconds(linear, apart)
        ratios = [seconds(linear, apart) / seconds(engine, batches) for _ in range(repeats)]
        verdict = inspect_rows(trajectories, shape, batch_size=size).verdict()
        predicted, measured = float(re.search(r"([\d.]+)x", verdict)[1]), statistics.median(ratios)
        row = {
            "work": name,
            "batch": size,
            "rows": len(trajectories),
            "linear_rows": len(linear_rows),
            "said": verdict.split(",")[0].removeprefix("Train as a tree: "),
            "verdict": f"{predicted:.2f}",
            "rounds": repeats,
            "speedup": f"{measured:.3f}",
            "speedup_min": f"{min(ratios):.3f}",
            "speedup_max": f"{max(ratios):.3f}",
            "efficiency": f"{measured / predicted:.3f}",
        }
        rows.report("verdict", row, dry_run=dry_run)


if __name__ == "__main__":
    works = [name for name in WORKLOADS if not name.endswith("(control)")]
    rows.run_each(works, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
