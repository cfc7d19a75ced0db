"""A training step of TRL's GRPOTrainer with and without `tt.share_prefixes`, on completions that are there already.

Run by `quarter_hour.py`. The model has the shape of Qwen3-0.6B and random weights; prompts and completions have the
lengths of a tool agent's calls (benchmarks/shapes). Generation is left out: it costs both sides the same.

TRL trains a micro-batch as one padded batch. It is timed with one row for each micro-batch, which pads nothing, and
with eight rows of about the same length; the faster way is the baseline. Steps of all take turns. Shared prefixes are
also timed without compiled layers, which are the default on a GPU and which TRL's own steps do not have.
"""

import contextlib
import copy
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpu_cases as gpu
import treetrain as tt
from treetrain.models.costs import count
from treetrain.models.work import ideal_speedup
from treetrain.trainers import share_prefixes

ROWS = "tau_airline 48"


def padded(rows: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows as one batch, and its mask."""
    side = "left" if left else "right"
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids.to(gpu.DEVICE), mask.to(gpu.DEVICE)


class Step:
    """One optimizer step of a trainer without the optimizer: its micro-batches, and how to run them."""

    def __init__(self, rows: list[tt.Trajectory], advantages: Tensor, size: int, *, shared: bool, smoke: bool):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        settings = GRPOConfig(
            tempfile.mkdtemp(),
            report_to=[],
            use_cpu=not gpu.CUDA,
            bf16=False,  # the weights are
            gradient_checkpointing=False,
            disable_tqdm=True,
            num_generations=2,
            per_device_train_batch_size=2,
        )
        self.trainer: Any = GRPOTrainer(
            gpu.weights_of("0.6b", smoke),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["none"] * 2}),
            processing_class=tt.load_tokenizer("tiny"),  # pads; the rows are ids already
        )
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        ids = [torch.from_numpy(row.ids).long() for row in rows]
        starts = [int((row.weights > 0).argmax()) for row in rows]
        completed = sum(len(row) - start for row, start in zip(ids, starts))
        self.batches = []
        for first in range(0, len(rows), size):
            taken = order[first : first + size]
            prompts = padded([ids[number][: starts[number]] for number in taken], left=True)
            completions = padded([ids[number][starts[number] :] for number in taken], left=False)
            named = zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), (*prompts, *completions))
            total = torch.tensor(completed, device=gpu.DEVICE)
            self.batches.append(
                dict(named) | {"advantages": advantages[taken].to(gpu.DEVICE), "num_items_in_batch": total}
            )
        # These are its generation's micro-batches, all used in one optimizer step.
        self.trainer.args.steps_per_generation, self.trainer.num_iterations = len(self.batches), 1
        self.trainer._buffered_inputs = self.batches
        if shared:
            if not gpu.CUDA:  # a rehearsal compiles layers as a GPU does by default
                share_prefixes.TreeEngine = functools.partial(tt.TreeEngine, compile_layers=True)  # type: ignore
            tt.share_prefixes(self.trainer, check=False)
        self.trainer._prepare_inputs = lambda inputs: inputs  # batches are given, not generated

    def run(self, *, eager: bool = False) -> float:
        """Seconds of forward and backward of all micro-batches, if so without compiled layers; gradients are left."""
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            return self._run()

    def _run(self) -> float:
        trainer, count = self.trainer, len(self.batches)
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = count
        gpu.wait()
        start = time.perf_counter()
        given = iter([copy.copy(batch) for batch in self.batches])
        batches, items = trainer.get_batch_samples(given, count, trainer.args.device)
        for number, batch in enumerate(batches):
            trainer.accelerator.gradient_state._set_sync_gradients(number == count - 1)
            trainer.training_step(trainer.model, batch, items)
        gpu.wait()
        return time.perf_counter() - start


def grpo(out: gpu.Out, scratch: Path, repeats: int = 3) -> None:
    """One row: seconds of a step with and without shared prefixes, and how far their gradients are apart."""
    with out.case("trl", trainer="GRPOTrainer", model="0.6b", rows=ROWS) as row:
        out.need(20.0)
        import trl

        row["trl"] = trl.__version__
        rows = gpu.batch(ROWS, out.smoke)
        advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
        options = {"smoke": out.smoke}
        steps = {f"{size} a micro-batch": Step(rows, advantages, size, shared=False, **options) for size in (1, 8)}
        steps["shared"] = Step(rows, advantages, 1, shared=True, **options)
        tree = tt.build_tree(rows)
        row |= {"row_count": len(rows), "flat_tokens": tree.num_flat_tokens, "unique_tokens": tree.num_tokens}
        row["ideal"] = ideal_speedup(tree, count(steps["shared"].trainer.model))
        kept = scratch / "trl.npy"
        for name, step in steps.items():
            graphs, start = gpu.compilations()[0], time.perf_counter()
            step.run()
            row |= {"first_seconds": time.perf_counter() - start, "graphs": gpu.compilations()[0] - graphs}
            if name == "8 a micro-batch":
                continue  # padding changes its rounding and nothing else
            error = gpu.gradient_error(step.trainer.model, kept)
            if error is not None:
                row |= {"gradient_error": error, "right": error <= gpu.GRADIENT_LIMIT}
        runs = {name: step.run for name, step in steps.items()}
        runs["shared, eager"] = functools.partial(steps["shared"].run, eager=True)
        runs["shared, eager"]()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _, (name, run) in itertools.product(range(repeats), runs.items()):
            if out.smoke or out.left > 3 or not seconds[name]:
                seconds[name].append(run())
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        baseline = min((name for name in medians if "shared" not in name), key=lambda name: medians[name])
        row |= {"baseline": baseline, "seconds_without": medians[baseline], "seconds_with": medians["shared"]}
        row |= {"seconds_with_eager": medians["shared, eager"], "all_seconds": medians}
        row |= {"speedup": medians[baseline] / medians["shared"], "repeats": len(seconds["shared"])}
