"""Time of an optimizer step of TRL's and transformers' trainers with and without share_prefixes, on a CPU.

Run: python benchmarks/trainers.py [work ...] [--repeats 5] [--dry-run]. Seven minutes on two cores.

The model is that of workloads.py (30M parameters, float32). Both trainers have the same
settings and take the same rows, one for each micro-batch, which pads nothing; share_prefixes scores them as one tree.
No row repeats or extends another, so nothing could be merged without a tree. The trainer without sharing also runs with
all rows in one padded batch, where that is not too large, and the faster way of the round that warms up counts. Steps
alternate in one process, a fresh one for each work; generation is not timed. Processor time is recorded too, which is
more reliable on a busy machine (for one thread: taskset -c 0). The ideal is the ratio of FLOPs; under a budget (a
quarter of the tree's tokens, or the longest row) it counts the recomputation that no plan avoids. TRL's
DistillationTrainer shares within a micro-batch, so with sharing it takes all rows in one; its heads run over every
row's states, so the ideal shares the layers alone, of student and teacher. Rows are appended to results/trainers.csv;
a work that has its rows at this commit is left out.
"""

import copy
import os
import statistics
import tempfile
import time

import rows
from workloads import model_30m, shaped

IGNORED = -100
CALLS = 5
"""The shortest calls of a tool agent's task, by a template that drops earlier think blocks."""
MOST_PADDED = 8192
"""Tokens of a padded batch that the trainer without sharing is timed with."""


def samples(count: int) -> list:
    """Samples of one prompt of codet_humaneval100, none of them twice."""
    import treetrain as tt
    from treetrain.models.work import cheapest_rows

    return cheapest_rows(tt.build_tree(shaped("codet_humaneval", 2 * count)))[:count]


def calls() -> list:
    """Calls of one task of tau_airline, of all its trials."""
    return sorted(shaped("tau_airline_think_48"), key=len)[:CALLS]


class Work:
    """One optimizer step of a trainer: its micro-batches, and how to run them."""

    def __init__(self, kind: str, drawn: list, budget: int | None = None, shared: bool = True, size: int = 1) -> None:
        import treetrain as tt

        self.count, self.size = len(drawn), size
        self.trainer, batches = MAKE[kind](drawn, size)
        self.batches = [dict(batch) for batch in batches]
        if shared:
            tt.share_prefixes(self.trainer, budget, check=False)
        # Batches are given, not generated.
        self.trainer._prepare_inputs = lambda inputs: inputs

    def step(self) -> tuple[float, float]:
        """Seconds of forward and backward of all micro-batches: by the clock, and of the processor."""
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(self.batches)
        batches = [copy.copy(batch) for batch in self.batches]
        begin = time.perf_counter(), time.process_time()
        batches, items = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            trainer.training_step(trainer.model, batch, items)
        seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
        trainer.model.zero_grad()
        return seconds


def _settings(**more) -> dict:
    return {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **more,
    }


def _tokenizer():
    """Pads; the rows are ids already."""
    import treetrain as tt

    return tt.load_tokenizer("tiny")


def _of(drawn: list, size: int) -> list[list]:
    return [drawn[first : first + size] for first in range(0, len(drawn), size)]


def _labels(row) -> list[int]:
    return [id if weight else IGNORED for id, weight in zip(row.ids.tolist(), row.weights)]


def _plain(drawn: list, size: int):
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    data = [{"input_ids": row.ids.tolist(), "labels": _labels(row)} for row in drawn]
    collate = DataCollatorForSeq2Seq(_tokenizer())
    args = TrainingArguments(**{k: v for k, v in _settings().items() if k not in ("bf16", "gradient_checkpointing")})
    trainer = Trainer(model_30m(), args, train_dataset=Dataset.from_list(data), data_collator=collate)
    return trainer, [collate(batch) for batch in _of(data, size)]


def _sft(drawn: list, size: int):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = [{"input_ids": row.ids.tolist(), "labels": _labels(row)} for row in drawn]
    trainer = SFTTrainer(
        model_30m(),
        SFTConfig(**_settings(max_length=None)),
        train_dataset=Dataset.from_list(data),
        processing_class=_tokenizer(),
    )
    return trainer, [trainer.data_collator(batch) for batch in _of(data, size)]


def _dpo(drawn: list, size: int):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = []
    for chosen, rejected in zip(drawn[0::2], drawn[1::2]):
        start = int((chosen.weights > 0).argmax())
        prompt, both = chosen.ids[:start].tolist(), [row.ids[start:].tolist() for row in (chosen, rejected)]
        data.append({"prompt_ids": prompt, "chosen_ids": both[0], "rejected_ids": both[1]})
    trainer = DPOTrainer(
        model_30m(),
        ref_model=model_30m(1),
        args=DPOConfig(**_settings(max_length=None)),
        train_dataset=Dataset.from_dict({"prompt": ["none"], "chosen": ["none"], "rejected": ["none"]}),
        processing_class=_tokenizer(),
    )
    return trainer, [trainer.data_collator(batch) for batch in _of(data, size)]


def _grpo(drawn: list, size: int):
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    trainer = GRPOTrainer(
        model_30m(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**_settings(num_generations=2, per_device_train_batch_size=2)),
        train_dataset=Dataset.from_dict({"prompt": ["none"] * 2}),
        processing_class=_tokenizer(),
    )
    start = int((drawn[0].weights > 0).argmax())
    draws, tokens = torch.Generator().manual_seed(0), sum(len(row) - start for row in drawn)
    batches = []
    for batch in _of(drawn, size):
        completions = [torch.from_numpy(row.ids[start:]).long() for row in batch]
        prompts = torch.from_numpy(batch[0].ids[:start]).long().expand(len(batch), -1)
        batches.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": pad(completions, padding_value=0),
                "completion_mask": pad([torch.ones_like(row) for row in completions], padding_value=0),
                "advantages": torch.randn(len(batch), generator=draws),
                "num_items_in_batch": torch.tensor(tokens),
            }
        )
    # These are its generation's micro-batches, all used in one optimizer step.
    trainer.args.steps_per_generation, trainer.num_iterations = len(batches), 1
    trainer._buffered_inputs = batches
    return trainer, batches


def _distillation(drawn: list, size: int):
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    trainer = DistillationTrainer(
        model_30m(),
        teacher_model=model_30m(1),
        args=DistillationConfig(**_settings(per_device_train_batch_size=size)),
        train_dataset=Dataset.from_dict({"prompt": ["none"] * size}),
        processing_class=_tokenizer(),
    )
    _, batches = _grpo(drawn, size)
    return trainer, [{name: x for name, x in batch.items() if name != "advantages"} for batch in batches]


MAKE = {"plain": _plain, "sft": _sft, "dpo": _dpo, "grpo": _grpo, "distillation": _distillation}
WORKS = {
    "grpo 8 completions": ("grpo", lambda: samples(8)),
    "grpo 16 completions": ("grpo", lambda: samples(16)),
    "distillation 8 completions": ("distillation", lambda: samples(8)),
    "dpo 8 pairs of a prompt": ("dpo", lambda: samples(16)),
    "sft tool-agent calls": ("sft", calls),
    "plain tool-agent calls": ("plain", calls),
}


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Time one work in this process and append a row with all memory, and one under a budget."""
    if not dry_run and rows.has("trainers", work=name):
        return print(f"{name}: has its rows at this commit")
    import torch

    import treetrain as tt
    from treetrain.check.bench import budget_share
    from treetrain.models.costs import count
    from treetrain.models.work import cheapest_rows, ideal_speedup, linear_work, tree_work

    rows.keep_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind, load = WORKS[name]
    drawn = load()
    tree, shape = tt.build_tree(drawn), count(model_30m())
    assert len(cheapest_rows(tree)) == len(drawn), "rows that repeat or extend others need no tree"
    budget = max(tree.num_tokens // 4, max(map(len, drawn)))
    one_batch = len(drawn) // (2 if kind == "dpo" else 1)
    padded = len(drawn) * max(map(len, drawn))
    sizes = (1, one_batch) if padded <= MOST_PADDED else (1,)
    linear = {f"{size} a micro-batch": Work(kind, drawn, shared=False, size=size) for size in sizes}
    size = len(drawn) if kind == "distillation" else 1
    shared = {key: Work(kind, drawn, bound, size=size) for key, bound in (("", None), (f"{budget} tokens", budget))}
    warm = {key: work.step() for key, work in (linear | shared).items()}
    best = min(linear, key=lambda key: warm[key][1])
    works = {best: linear[best]} | shared
    seconds: dict[str, list[float]] = {key: [] for key in works}
    processor: dict[str, list[float]] = {key: [] for key in works}
    for _ in range(repeats):
        for key, work in works.items():
            by_clock, of_processor = work.step()
            seconds[key].append(by_clock)
            processor[key].append(of_processor)
    ideal = ideal_speedup(tree, shape)
    if kind == "distillation":
        alone, together = (work(tree, shape.attention_ranges) for work in (linear_work, tree_work))
        ideal = shape.flops(*alone) / shape.flops(*together._replace(head_rows=alone.head_rows))
    for key in shared:
        plan = tt.TreeEngine(model_30m(), budget=budget if key else None).plan(tree)
        share = budget_share(plan, shape, budget) if key else 1.0
        ratios = [slow / fast for slow, fast in zip(seconds[best], seconds[key])]
        cpu_ratios = [slow / fast for slow, fast in zip(processor[best], processor[key])]
        row = {
            "work": name,
            "budget": key,
            "rows": len(drawn),
            "flat_tokens": tree.num_flat_tokens,
            "unique_tokens": tree.num_tokens,
            "baseline": best,
            "linear_seconds": f"{statistics.median(seconds[best]):.3f}",
            "seconds": f"{statistics.median(seconds[key]):.3f}",
            "rounds": repeats,
            "speedup": f"{statistics.median(ratios):.3f}",
            "speedup_min": f"{min(ratios):.3f}",
            "speedup_max": f"{max(ratios):.3f}",
            "ideal": f"{ideal * share:.3f}",
            "efficiency": f"{statistics.median(ratios) / (ideal * share):.3f}",
            "linear_cpu_seconds": f"{statistics.median(processor[best]):.3f}",
            "cpu_seconds": f"{statistics.median(processor[key]):.3f}",
            "cpu_speedup": f"{statistics.median(cpu_ratios):.3f}",
            "cpu_speedup_min": f"{min(cpu_ratios):.3f}",
            "cpu_speedup_max": f"{max(cpu_ratios):.3f}",
            "cpu_efficiency": f"{statistics.median(cpu_ratios) / (ideal * share):.3f}",
            "trl": _version(),
        }
        rows.report("trainers", row, dry_run=dry_run)


def _version() -> str:
    import trl

    return trl.__version__


if __name__ == "__main__":
    rows.run_each(WORKS, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
