"""The demo: inspect, verify, then train the built-in model twice on branching data, as a tree and linearly.

    make demo                              # or: python -m examples.demo.demo

Every part goes through the command line in a process of its own, as a user's would. Both trainings have the same
seed, weights, data and steps, so their loss curves must lie on each other; the demo fails where they do not.
Everything lands in runs/demo, the page of the comparison too. No network is used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from treetrain.report.compare import SETTLING, Comparison
from treetrain.report.page import comparison_page, write_page
from treetrain.report.records import Run, read_run
from treetrain.report.summary import versions_line
from treetrain.report.words import byte_count

ROOT = Path(__file__).parents[2]
TRAIN, HELD_OUT = "examples/countdown/train.jsonl.gz", "examples/countdown/heldout.jsonl.gz"
MODEL = "tiny"
EXECUTIONS = ("tree", "linear")
STEPS = 24
SCHEDULE = ("--lr", "2e-3", "--beta2", "0.98", "--warmup-fraction", "0.2")
RECIPE = ("--eval-data", HELD_OUT, "--tokens-per-step", "12000", *SCHEDULE, "--device", "cpu")
TITLE = "The same training, every shared prefix computed once"
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
    """Run the demo; 0 if both trainings agree."""
    parser = argparse.ArgumentParser(description="Train as a tree and linearly, and compare.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps of each training")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder of all results")
    options = parser.parse_args()
    os.chdir(ROOT)
    output: Path = options.output
    treetrain("What the rows share", "inspect", HELD_OUT, "--model", MODEL, "--groups", "3")
    treetrain("Is it exact?", "verify", HELD_OUT, "--model", MODEL, "--sample", "16", "--worst", "3")
    for execution in EXECUTIONS:
        treetrain(
            f"Training, --execution {execution}",
            *("train", TRAIN, "--model", MODEL, *RECIPE, "--steps", str(options.steps)),
            *("--execution", execution, "--output", str(output / execution), "--overwrite"),
        )
    result = Comparison(read_run(output / "tree"), read_run(output / "linear"))
    (output / "summary.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    page = write_page(comparison_page(result, title=TITLE, note=describe(result.run)), output / "demo.html")
    return report(result, page)


def treetrain(title: str, *arguments: str) -> None:
    """Run one command of the command line and show what it prints; the demo ends where it fails."""
    console.rule(f"[bold]{title}", align="left")
    console.print(f"$ treetrain {' '.join(arguments)}", style="cyan", soft_wrap=True, markup=False)
    sys.stdout.flush()
    environment = {**KEEP_FREED_MEMORY, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run([sys.executable, "-m", "treetrain", *arguments], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"demo: treetrain {arguments[0]} ended with exit code {done.returncode}")


def report(result: Comparison, page: Path) -> int:
    """The table, the verdict and where the page is; the exit code."""
    console.rule("[bold]Tree against linear", align="left")
    console.print(comparison_table(result))
    agree = result.same_work and result.largest_difference <= CURVE_TOLERANCE
    console.print(
        f"loss curves: largest difference {result.largest_difference:.1e} nats over {result.common_steps} steps, "
        f"allowed {CURVE_TOLERANCE:g}: {'they lie on each other' if agree else 'THEY DIFFER'}",
        style="green" if agree else "bold red",
        soft_wrap=True,
    )
    if result.speedup is not None and result.ideal is not None and result.efficiency is not None:
        console.print(
            f"speed-up {result.speedup:.2f}x (median over steps), FLOP-ideal {result.ideal:.2f}x, "
            f"efficiency {result.efficiency:.2f}"
        )
    console.print(describe(result.run), style="dim", soft_wrap=True)
    console.print(f"page: {page}", soft_wrap=True)
    return 0 if agree else 1


def describe(run: Run) -> str:
    """Versions, machine and commit in one line."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return versions_line(run) + (f", commit {git.stdout.strip()}" if git.returncode == 0 else "")


def comparison_table(result: Comparison) -> Table:
    """One line per measure, tree and linear side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in EXECUTIONS:
        table.add_column(name, justify="right")
    columns = [figures(run) for run in (result.run, result.reference)]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def figures(run: Run) -> dict[str, str]:
    """One column of the table; the first steps, in which memory and kernels are set up, are not timed."""
    loss, held_out = run.column("loss").values, run.evaluated("nll").values
    seconds = run.column("forward_backward_seconds").values[SETTLING:]
    return {
        "tokens computed": f"{run.column('computed_tokens').values.sum():,.0f}",
        "training loss, first step": f"{loss[0]:.4f}",
        "training loss, last step": f"{loss[-1]:.4f}",
        "held-out loss before": f"{held_out[0]:.4f}",
        "held-out loss after": f"{held_out[-1]:.4f}",
        "forward + backward, median step": f"{statistics.median(seconds):.2f} s",
        "forward + backward, all steps but the first": f"{seconds.sum():.1f} s",
        "peak memory of the process": byte_count(run.column("peak_memory_bytes").values.max()),
    }


if __name__ == "__main__":
    sys.exit(main())
