"""Share of a training step outside forward, backward and optimiser: reading rows, trees, plans, logs.

Run: python benchmarks/overhead.py [work ...] [--steps 6]

Whole runs of TreeTrainer on the preset "tiny". The time of the executor (all model calls, forward and backward)
and of the optimiser is subtracted from the time between the ends of two steps; the rest is the reported share, the
median over all steps but the first. Rows are appended to results/overhead.csv.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import rows
from workloads import DATA

ROOT = Path(__file__).parents[1]
WORKS = {
    "demo": (str(ROOT / "examples/countdown/train.jsonl.gz"), {"tokens_per_step": 12_000}),
    "tau_airline": (str(DATA / "tau_airline" / "trajectories.jsonl"), {"chat_template": "chatml"}),
    "tau_airline_calls": (
        str(DATA / "tau_airline" / "trajectories.jsonl"),
        {"chat_template": "chatml", "view": "calls"},
    ),
}


def measure(name: str, steps: int) -> None:
    """Train in this process and append a row."""
    import torch
    from transformers import TrainerCallback

    import treetrain as tt
    from treetrain.core.engine.executor import Executor
    from treetrain.models.loading import load_model, load_tokenizer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    walking = [0.0]
    original = Executor.train

    def train(self, gradients):
        start = time.perf_counter()
        try:
            return original(self, gradients)
        finally:
            walking[0] += time.perf_counter() - start

    Executor.train = train
    starts: list[tuple[float, float]] = []
    updates: list[float] = []

    class Watch(TrainerCallback):
        """Records the end of each step, the executor's total time by then, and the time of the optimiser's step."""

        def on_pre_optimizer_step(self, *_, **__):
            updates.append(-time.perf_counter())

        def on_optimizer_step(self, *_, **__):
            updates[-1] += time.perf_counter()

        def on_step_end(self, *_, **__):
            starts.append((time.perf_counter(), walking[0]))

    file, settings = WORKS[name]
    settings = dict(settings)
    tokens_per_step = settings.pop("tokens_per_step", 32_768)
    with tempfile.TemporaryDirectory() as folder:
        arguments = tt.TreeArguments(
            folder,
            max_steps=steps,
            tokens_per_step=tokens_per_step,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        loaded = tt.load(file, tokenizer=load_tokenizer("tiny"), **settings)
        trainer = tt.TreeTrainer(load_model("tiny"), arguments, loaded.trajectories, callbacks=[Watch()])
        trainer.train()
    tokens = [line["tree/flat_tokens"] for line in trainer.state.log_history if "tree/flat_tokens" in line]
    shares, whole = [], []
    for number in range(1, len(starts)):
        between = starts[number][0] - starts[number - 1][0]
        walked = starts[number][1] - starts[number - 1][1]
        shares.append((between - walked - updates[number]) / between)
        whole.append(between)
    row = {
        "work": name,
        "steps": len(starts),
        "flat_tokens_per_step": int(statistics.median(tokens)),
        "step_seconds": f"{statistics.median(whole):.3f}",
        "outside_share": f"{statistics.median(shares):.4f}",
        "outside_share_max": f"{max(shares):.4f}",
    }
    rows.append("overhead", row)
    print(row, flush=True)


if __name__ == "__main__":
    rows.run_each(WORKS, measure, __doc__, steps=rows.count(6))
