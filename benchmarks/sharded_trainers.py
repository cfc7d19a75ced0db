"""Time of an optimizer step under FSDP2, ZeRO-2 and ZeRO-3 with and without share_prefixes, on two processes.

Run: python benchmarks/sharded_trainers.py [way ...] [--rows 3] [--steps 5] [--dry-run]

A plain `transformers.Trainer` with SGD takes the shortest tool-agent calls of one task as micro-batches of one row,
which pads nothing; each process has half of them in a step. Their template drops earlier think blocks, so no call
extends another and nothing could be merged without a tree. The model is that of workloads.py (30M parameters,
float32), with one thread in each of two gloo processes. accelerate shards it, with its own defaults. The two trainings
follow each other, each with one step to warm up; the slower process counts, and the median over the timed steps. A step
is everything between the trainer's `on_step_begin` and `on_step_end`, the optimizer's step included. The ideal is the
ratio of FLOPs. Two minutes for each way on two idle cores. ZeRO needs deepspeed (`make test-deepspeed` makes an
environment). Rows are appended to results/sharded_trainers.csv; a way that has its row at this commit is left out.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rows
from workloads import model_30m, shaped

IGNORED = -100
SIZE = 2
BATCHES = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
"""Arguments of the trainer for each way to divide weights."""


def calls(count: int) -> list:
    """The shortest calls of one task of tau_airline, so that each process has `count`."""
    return sorted(shaped("tau_airline_think_48"), key=len)[: SIZE * count]


def prepare(rank: int) -> None:
    """Let accelerate and DeepSpeed find these processes."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.fsdp_on_cpus import let_accelerate_shard

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "DS_ACCELERATOR": "cpu"}
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    let_accelerate_shard()


def train(rank: int, size: int, way: str, drawn: list, steps: int) -> dict[bool, tuple[list[float], list[float]]]:
    """Seconds and processor seconds of each timed step, with shared prefixes (True) and without, on one process."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    import treetrain as tt

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.processor: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin[0])
            self.processor.append(time.process_time() - self.begin[1])

    rows.keep_memory()
    own = drawn[: len(drawn) // size], drawn[len(drawn) // size :]
    by_turns = [row for pair in zip(*own) for row in pair]  # a process takes every second one
    data = [
        {
            "input_ids": row.ids.tolist(),
            "labels": [i if weight else IGNORED for i, weight in zip(row.ids.tolist(), row.weights)],
        }
        for row in by_turns * (steps + 1)
    ]
    found = {}
    for shared in (True, False):
        prepare(rank)
        given = {name: dict(value) if isinstance(value, dict) else value for name, value in WAYS[way].items()}
        if "deepspeed" in given:
            given["deepspeed"] |= dict.fromkeys(BATCHES, "auto") | {"zero_allow_untested_optimizer": True}
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps + 1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(drawn) // size,
            train_sampling_strategy="sequential",
            optim="sgd",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
            dataloader_pin_memory=False,
            **given,
        )
        trainer = Trainer(
            model_30m(),
            arguments,
            train_dataset=Dataset.from_list(data),
            data_collator=DataCollatorForSeq2Seq(tt.load_tokenizer("tiny")),
            callbacks=[clock := Clock()],
        )
        if shared:
            tt.share_prefixes(trainer, check=False)
        trainer.train()
        found[shared] = clock.seconds[1:], clock.processor[1:]
    return found


def measure(way: str, steps: int, dry_run: bool, **options: int) -> None:
    """Time one way and append a row."""
    import treetrain as tt
    from treetrain.models.costs import count
    from treetrain.models.work import cheapest_rows, linear_work, tree_work

    if "deepspeed" in WAYS[way] and importlib.util.find_spec("deepspeed") is None:
        print(f"left out: {way}, since deepspeed is not installed")
        return
    if not dry_run and rows.has("sharded_trainers", way=way):
        return print(f"{way}: has its row at this commit")
    drawn, shape = calls(options["rows"]), count(model_30m())
    assert len(cheapest_rows(tt.build_tree(drawn))) == len(drawn), "rows that extend others need no tree"
    trees = [tt.build_tree(own) for own in (drawn[: len(drawn) // SIZE], drawn[len(drawn) // SIZE :])]
    linear, ours = (
        max(shape.flops(*work(tree, shape.attention_ranges)) for tree in trees) for work in (linear_work, tree_work)
    )
    ranks = rows.on_ranks(train, SIZE, way, drawn, steps, timeout=1800)
    # The slower process of each step counts.
    seconds, processor = (
        {shared: [max(each) for each in zip(*(rank[shared][kind] for rank in ranks))] for shared in (True, False)}
        for kind in (0, 1)
    )
    ratios = [plain / fast for plain, fast in zip(seconds[False], seconds[True])]
    ideal = linear / ours
    row = {
        "way": way,
        "processes": SIZE,
        "rows": len(drawn),
        "flat_tokens": sum(tree.num_flat_tokens for tree in trees),
        "unique_tokens": sum(tree.num_tokens for tree in trees),
        "rounds": steps,
        "plain_seconds": f"{statistics.median(seconds[False]):.3f}",
        "seconds": f"{statistics.median(seconds[True]):.3f}",
        "speedup": f"{statistics.median(ratios):.3f}",
        "speedup_min": f"{min(ratios):.3f}",
        "speedup_max": f"{max(ratios):.3f}",
        "ideal": f"{ideal:.3f}",
        "efficiency": f"{statistics.median(ratios) / ideal:.3f}",
        "plain_cpu_seconds": f"{statistics.median(processor[False]):.3f}",
        "cpu_seconds": f"{statistics.median(processor[True]):.3f}",
        "accelerate": version("accelerate"),
        "deepspeed": version("deepspeed") if "deepspeed" in WAYS[way] else "",
    }
    rows.report("sharded_trainers", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(WAYS, measure, __doc__, rows=rows.count(3), steps=rows.count(5), dry_run=rows.DRY_RUN)
