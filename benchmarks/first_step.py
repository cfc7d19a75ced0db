"""Peak memory of the first step of share_prefixes with its check and without, on a CPU.

Run: python benchmarks/first_step.py [case ...] [--repeats 5] [--dry-run]

Each case is one optimizer step of a trainer in a fresh process, with plain SGD, which holds no state. It has many
tokens on the 30M model of workloads.py ("long rows", without a budget and under one), or few on a model of 162M,
so that gradients are most of its memory. Peaks are of the process's resident memory above what it held before the step,
so without the weights. The C library returns freed blocks at once here, so that this is the memory in use, which
another load of the machine does not change. Medians over fresh processes. Rows are appended to results/first_step.csv;
a case that has its row at this commit is left out.
"""

import ctypes
import gc
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import rows
from memory import _status_bytes
from trainers import _settings, _tokenizer
from workloads import model_30m

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, BLOCK = -1, -3, 65_536  # of glibc's malloc.h; bytes
SHORT: dict[str, Any] = {"lengths": (24, 8), "rows": 4, "large": True}
LONG: dict[str, Any] = {"lengths": (400, 100), "rows": 6}
CASES: dict[str, dict[str, Any]] = {
    "plain Trainer, short rows": SHORT,
    "plain Trainer, short rows, bfloat16": SHORT | {"dtype": "bfloat16"},
    "plain Trainer, long rows": LONG,
    "plain Trainer, long rows, budget": LONG | {"budget": 200},
    "plain Trainer, long rows, LoRA": LONG | {"lora": True},
    "plain Trainer, long rows, LoRA, budget": LONG | {"lora": True, "budget": 200},
    "plain Trainer, long rows, checkpointing": LONG | {"gradient_checkpointing": True},
    "SFTTrainer, short rows": SHORT | {"trl": True},
    "SFTTrainer, short rows, bfloat16": SHORT | {"dtype": "bfloat16", "trl": True},
    "SFTTrainer, long rows": LONG | {"trl": True},
    "SFTTrainer, long rows, budget": LONG | {"trl": True, "budget": 200},
}


def model_160m():
    """A Qwen3-shaped model of 162M parameters, float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    config = model_30m().config
    config.update({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16})
    config.update({"num_key_value_heads": 4, "layer_types": config.layer_types[:12]})
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def make_trainer(
    lengths: tuple[int, int],
    rows: int,
    dtype: str = "float32",
    large: bool = False,
    lora: bool = False,
    trl: bool = False,
    gradient_checkpointing: bool = False,
):
    """A trainer of one step on `rows` rows that share a prefix; `lengths` are of the prefix and of what follows it."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    draw = np.random.default_rng(0)
    model = (model_160m() if large else model_30m()).to(getattr(torch, dtype))
    vocabulary = model.config.vocab_size
    prefix, data = draw.integers(5, vocabulary, lengths[0]).tolist(), []
    for _ in range(rows):
        own = draw.integers(5, vocabulary, lengths[1]).tolist()
        data.append({"input_ids": prefix + own, "labels": [-100] * len(prefix) + own})
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.0, target_modules="all-linear"))
    settings = _settings(max_steps=1, per_device_train_batch_size=rows, save_strategy="no", logging_strategy="no")
    settings |= {"gradient_checkpointing": gradient_checkpointing, "optim": "sgd"}
    if trl:
        args: Any = SFTConfig(max_length=None, **settings)
        return SFTTrainer(model, args, train_dataset=Dataset.from_list(data), processing_class=_tokenizer())
    collate = DataCollatorForSeq2Seq(_tokenizer())
    return Trainer(model, TrainingArguments(**settings), train_dataset=Dataset.from_list(data), data_collator=collate)


def peak(name: str, check: bool) -> dict[str, float]:
    """Bytes of the model, and peak bytes of the first step above it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, name, check))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _measure(sender: Any, name: str, check: bool) -> None:
    import torch

    import treetrain as tt

    torch.set_num_threads(1)
    for which in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(which, BLOCK)
    settings = dict(CASES[name])
    budget = settings.pop("budget", None)
    # Libraries map their code when it first runs; that is not memory of a step.
    small = settings | {"lengths": (8, 4), "rows": 2}
    tt.share_prefixes(make_trainer(**small), check=check).train()
    trainer = tt.share_prefixes(make_trainer(**settings), budget, check=check)
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    trainer.train()
    sender.send({"weights": weights, "peak": max(_status_bytes("VmHWM") - before, 0)})
    sender.close()


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Append one row."""
    if not dry_run and rows.has("first_step", case=name):
        return print(f"{name}: has its row at this commit")
    drawn = [(peak(name, False), peak(name, True)) for _ in range(repeats)]
    weights = drawn[0][0]["weights"]
    without, checked = (statistics.median(pair[at]["peak"] for pair in drawn) for at in (0, 1))
    ratios = [with_check["peak"] / plain["peak"] for plain, with_check in drawn]
    row = {
        "case": name,
        "rows": CASES[name]["rows"],
        "row_tokens": sum(CASES[name]["lengths"]),
        "budget": CASES[name].get("budget", ""),
        "weights_mb": f"{weights / 1e6:.1f}",
        "rounds": repeats,
        "step_mb": f"{without / 1e6:.1f}",
        "checked_step_mb": f"{checked / 1e6:.1f}",
        "step_over_weights": f"{without / weights:.2f}",
        "checked_over_weights": f"{checked / weights:.2f}",
        "checked_over_step": f"{statistics.median(ratios):.3f}",
        "checked_over_step_min": f"{min(ratios):.3f}",
        "checked_over_step_max": f"{max(ratios):.3f}",
    }
    rows.report("first_step", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(CASES, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
