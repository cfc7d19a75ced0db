"""What two runs of `treetrain train` wrote down, read again and compared."""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import treetrain as tt
from treetrain.train.config import TrainConfig
from treetrain.train.prepare import prepare
from treetrain.train.rows import read_config
from treetrain.tree.stats import linear_work, tree_work

SETTLING = 1
"""First steps that are not timed: memory and kernels are set up in them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training, from its metrics.jsonl."""

    losses: list[float]
    """Of every step, in nats per trained token, before its update."""
    step_seconds: list[float]
    """Forward and backward of every step."""
    held_out_before: float
    """Nats per trained token of the held-out file before the first step."""
    held_out_after: float
    """The same after the last step."""
    computed_tokens: int
    """Tokens that went through the model in all steps."""
    peak_bytes: int
    """Most resident memory of the whole process."""

    @property
    def seconds(self) -> float:
        """Forward and backward of all steps but the settling ones."""
        return sum(self.step_seconds[SETTLING:])

    @property
    def median_seconds(self) -> float:
        """Of the same steps."""
        return statistics.median(self.step_seconds[SETTLING:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two trainings of the same steps."""

    tree: Run
    linear: Run
    ideal: float
    """FLOPs of the linear run's steps over those of the tree run's, settling steps not counted."""
    versions: str
    """What was run, on what."""

    @property
    def steps(self) -> int:
        """Optimiser steps of each run."""
        return len(self.tree.losses)

    @property
    def differences(self) -> list[float]:
        """Distance of the two losses at every step, in nats."""
        return [abs(a - b) for a, b in zip(self.tree.losses, self.linear.losses, strict=True)]

    @property
    def largest_difference(self) -> float:
        """Over all steps and both evaluations."""
        held_out = (
            abs(self.tree.held_out_before - self.linear.held_out_before),
            abs(self.tree.held_out_after - self.linear.held_out_after),
        )
        return max(*self.differences, *held_out)

    @property
    def speedup(self) -> float:
        """Measured: linear over tree, the median over the steps, since something else may disturb a few of them."""
        pairs = list(zip(self.linear.step_seconds, self.tree.step_seconds, strict=True))
        return statistics.median(linear / tree for linear, tree in pairs[SETTLING:])

    @property
    def efficiency(self) -> float:
        """Share of the ideal that was reached."""
        return self.speedup / self.ideal

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        derived = ("largest_difference", "speedup", "efficiency")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def compare(tree: Path, linear: Path) -> Comparison:
    """Read two output folders of `treetrain train`."""
    config = json.loads((tree / "train_config.json").read_text(encoding="utf-8"))["config"]
    return Comparison(
        tree=read_run(tree), linear=read_run(linear), ideal=ideal_speedup(config), versions=describe_versions()
    )


def read_run(folder: Path) -> Run:
    """Read metrics.jsonl."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    evaluations = [record["nll"] for record in records if record["kind"] == "eval"]
    return Run(
        losses=[step["loss"] for step in steps],
        step_seconds=[step["forward_backward_seconds"] for step in steps],
        held_out_before=evaluations[0],
        held_out_after=evaluations[-1],
        computed_tokens=sum(step["computed_tokens"] for step in steps),
        peak_bytes=max(step["peak_memory_bytes"] for step in steps),
    )


def ideal_speedup(config: dict[str, Any]) -> float:
    """What the tree would gain in the timed steps if nothing but arithmetic took time.

    Args:
        config: of the run, as it is stored with its result; the steps follow from it.
    """
    prepared = prepare(TrainConfig(**config | {"overwrite": True}))
    shape = tt.ModelShape.from_config(read_config(config["model"]))
    ours = theirs = 0.0
    for _, numbers in list(prepared.plan.steps(config["steps"]))[SETTLING:]:
        tree = tt.build_tree([prepared.rows[number] for number in numbers.tolist()])
        ours += shape.flops(*tree_work(tree))
        theirs += shape.flops(*linear_work(tree))
    return theirs / ours


def describe_versions() -> str:
    """Versions, commit and machine in one line."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = f" ({git.stdout.strip()})" if git.returncode == 0 else ""
    return (
        f"treetrain {tt.__version__}{commit}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads on {os.cpu_count()} cores"
    )
