"""Seconds that a step waits for its checkpoint, with and without `async_save`.

Run: python benchmarks/checkpoint_waits.py [form ...] [--repeats 5] [--dry-run]. Two minutes on two cores.

Timed is the call that writes a checkpoint of the 30M-parameter model in float32 with AdamW, and how long it takes until
the checkpoint has its name. Both ways take turns in one process, or in two whose model FSDP2 shards (gloo, the slower
one counts). Steps of some tokens lie between two checkpoints, and the disk is that of the temporary folder. Rows are
appended to results/checkpoint_waits.csv.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rows as result_rows

FORMS = {"one process": 1, "two, sharded": 2}


def write_in_turns(rank: int, size: int, folder: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each way: what a step waits, and until the checkpoint is complete."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import treetrain as tt
    from workloads import model_30m

    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    output = Path(folder)
    args = tt.TreeArguments(
        output_dir=str(output),
        max_steps=2 * (repeats + 1),
        save_steps=1,
        save_total_limit=1,
        use_cpu=True,
        report_to=[],
    )
    model = model_30m()
    if size > 1:
        assert args.device.type == "cpu"
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        model._is_accelerate_prepared = True
    seconds: dict[str, list[tuple[float, float]]] = {"async_save": [], "sync": []}

    class Timed(tt.TreeTrainer):
        def _save_checkpoint(self, *given: Any) -> None:
            self.async_save = self.state.global_step % 2 == 0
            begin = time.perf_counter()
            super()._save_checkpoint(*given)
            waited = time.perf_counter() - begin
            self.finish_save()
            found = torch.tensor([waited, time.perf_counter() - begin], dtype=torch.float64)
            if size > 1:
                torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
            seconds["async_save" if self.async_save else "sync"].append((float(found[0]), float(found[1])))

    ids = [[token, *range(10, 40)] for token in range(8)]
    trainer = Timed(model, args, [tt.Trajectory(row) for row in ids])
    trainer.train()
    return {name: found[1:] for name, found in seconds.items()}  # the first ones allocate


def measure(form: str, repeats: int, dry_run: bool) -> None:
    """Time a form and append its row."""
    size = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "out"))
        if size == 1:
            found = write_in_turns(0, 1, output, repeats)
        else:
            found = result_rows.on_ranks(write_in_turns, size, output, repeats)[0]
        size_mb = sum(path.stat().st_size for path in Path(output).rglob("*") if path.is_file()) / 1e6
    row: dict[str, Any] = {"form": form, "megabytes": f"{size_mb:.0f}", "rounds": repeats}
    for name, column in (("sync", "sync"), ("async_save", "async")):
        waits, wholes = zip(*found[name])
        row[f"{column}_wait"] = f"{statistics.median(waits):.3f}"
        row[f"{column}_wait_min"], row[f"{column}_wait_max"] = f"{min(waits):.3f}", f"{max(waits):.3f}"
        row[f"{column}_complete"] = f"{statistics.median(wholes):.3f}"
    result_rows.report("checkpoint_waits", row, dry_run=dry_run)


if __name__ == "__main__":
    result_rows.run_each(FORMS, measure, __doc__, repeats=result_rows.count(5), dry_run=result_rows.DRY_RUN)
