"""The demo: inspect, verify, then train the built-in model twice on branching data, as a tree and linearly.

    make demo                              # or: python -m examples.demo.demo

Every part runs a command line in its own process, as a user would. Both trainings have the same seed, weights, data
and steps, so their loss curves must coincide; otherwise the demo fails. All output, including the comparison page,
is in runs/demo. No network is used.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from treetrain.trainers.run_page import Run, compare_runs, finite, read_run, si, write_page

ROOT = Path(__file__).parents[2]
TRAIN, HELD_OUT = "examples/countdown/train.jsonl.gz", "examples/countdown/heldout.jsonl.gz"
MODEL = "tiny"
EXECUTIONS = ("tree", "linear")
STEPS = 24
SCHEDULE = ("--learning_rate", "2e-3", "--adam_beta2", "0.98", "--warmup_steps", "5", "--lr_scheduler_type", "cosine")
LOGS = ("--logging_steps", "1", "--eval_on_start", "true", "--save_strategy", "no", "--report_to", "none")
RECIPE = ("--eval_data", HELD_OUT, "--tokens_per_step", "12000", *SCHEDULE, *LOGS, "--use_cpu", "true")
CURVE_TOLERANCE = 0.001
"""Largest difference of the two loss curves, in nats. They are equal but for float32 rounding, which training
amplifies, to some millionths in these steps; an error in the mathematics shows as tenths at once."""
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
    "MALLOC_TOP_PAD_": str(1 << 30),
}
"""glibc gives large freed blocks back to the system and has them zeroed again at the next step; that costs either
execution a tenth of its time or more, by chance of the sizes, and says nothing about them."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def main() -> int:
    """Run the demo; returns 0 if both trainings agree."""
    parser = argparse.ArgumentParser(description="Train as a tree and linearly, and compare.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps of each training")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder of all results")
    options = parser.parse_args()
    os.chdir(ROOT)
    output: Path = options.output
    treetrain("What the rows share", "inspect", HELD_OUT, "--model", MODEL)
    treetrain("Is it exact?", "verify", HELD_OUT, "--model", MODEL, "--sample", "16")
    for execution in EXECUTIONS:
        treetrain(
            f"Training, --execution {execution}",
            *("train", TRAIN, "--model", MODEL, *RECIPE, "--max_steps", str(options.steps)),
            *("--execution", execution, "--output_dir", str(output / execution), "--disable_tqdm", "true"),
            *("--overwrite_output_dir", "true"),  # of an earlier demo
        )
    runs = {execution: read_run(output / execution) for execution in EXECUTIONS}
    found = compare_runs(runs["tree"], runs["linear"])
    (output / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    page = write_page(output / "tree", output / "linear", output / "demo.html")
    return report(runs, found, page)


def treetrain(title: str, *arguments: str) -> None:
    """Run one command and show its output; the demo stops if it fails."""
    console.rule(f"[bold]{title}", align="left")
    console.print(f"$ treetrain {' '.join(arguments)}", style="cyan", soft_wrap=True, markup=False)
    sys.stdout.flush()
    environment = {**KEEP_FREED_MEMORY, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run([sys.executable, "-m", "treetrain", *arguments], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"demo: treetrain {arguments[0]} ended with exit code {done.returncode}")


def report(runs: dict[str, Run], found: dict, page: Path) -> int:
    """Print the figures, the verdict and the path of the page; returns the exit code."""
    console.rule("[bold]Tree against linear", align="left")
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in runs:
        table.add_column(name, justify="right")
    for row in zip(*map(figures, runs.values()), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)
    agree = found["same_work"] and found["largest_difference"] <= CURVE_TOLERANCE
    console.print(
        f"loss curves: largest difference {found['largest_difference']:.1e} nats over {found['common_steps']} steps, "
        f"allowed {CURVE_TOLERANCE:g}: {'they lie on each other' if agree else 'THEY DIFFER'}",
        style="green" if agree else "bold red",
        soft_wrap=True,
    )
    if found["efficiency"] is not None:
        console.print(
            f"speed-up {found['speedup']:.2f}x (median over steps), FLOP-ideal {found['ideal']:.2f}x, "
            f"efficiency {found['efficiency']:.2f}"
        )
    console.print(f"page: {page}", soft_wrap=True)
    return 0 if agree else 1


def figures(run: Run) -> list[tuple[str, str]]:
    """Pairs (name, value); the first step, which sets up memory and kernels, is not timed."""
    loss, held_out, seconds = finite(run["loss"]), finite(run["eval_loss"]), finite(run["seconds"])[1:]
    return [
        ("tokens computed", f"{finite(run['computed_tokens']).sum():,.0f}"),
        ("training loss, first step", f"{loss[0]:.4f}"),
        ("training loss, last step", f"{loss[-1]:.4f}"),
        ("held-out loss before", f"{held_out[0]:.4f}"),
        ("held-out loss after", f"{held_out[-1]:.4f}"),
        ("forward + backward, median step", f"{np.median(seconds):.2f} s"),
        ("forward + backward, all steps but the first", f"{seconds.sum():.1f} s"),
        ("peak memory of the process", si(finite(run["peak_memory_bytes"]).max(), "B")),
    ]


if __name__ == "__main__":
    sys.exit(main())
