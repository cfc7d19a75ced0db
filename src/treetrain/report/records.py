"""The records of a run, read back from its folder as columns of numbers."""

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treetrain.train.metrics import METRICS_FILE

State = Literal["running", "silent", "interrupted", "failed", "finished"]
STOPS: dict[str, State] = {"interrupted": "interrupted", "failed": "failed", "end": "finished"}
"""Kinds of record after which a run does nothing, and the state they leave it in."""
SILENCE_SECONDS, SILENCE_STEPS = 300.0, 20
"""A run without a last word that has not been heard of for this long, and for so many of its steps, may be dead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One measure over the steps that have it."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    """NaN where the record has null (JSON's word for what is no finite number)."""

    @property
    def finite(self) -> "Column":
        """The entries that are numbers."""
        good = np.isfinite(self.values)
        return self if good.all() else Column(self.steps[good], self.values[good])

    def __len__(self) -> int:
        return len(self.steps)


NOTHING = Column(np.empty(0, np.int64), np.empty(0))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run, finished or not."""

    folder: Path
    start: Mapping[str, Any]
    """The record it began with: steps, config, versions, machine, plan; empty where a run has none."""
    train: Mapping[str, Column]
    """Every number of the optimiser steps."""
    evaluations: Mapping[str, Column]
    """Every number of the evaluations; step 0 is before the first update."""
    stop: Mapping[str, Any]
    """The record it ended with: end, interrupted or failed; empty while it runs."""
    updated: float
    """When the last record was written, in seconds since 1970."""
    unreadable: int
    """Lines that are no record; the last one is while it is being written."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings."""
        config = self.start.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def step(self) -> int:
        """Steps that are done."""
        loss = self.train.get("loss") or next(iter(self.train.values()), NOTHING)
        return int(loss.steps[-1]) if len(loss) else 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if it says so."""
        total = self.start.get("steps")
        return total if isinstance(total, int) and total > 0 else None

    @property
    def silence_limit(self) -> float:
        """Seconds without a record after which the run may be dead."""
        seconds = self.column("seconds").finite.values[-50:]
        longest = max([*seconds, *self.evaluated("seconds").finite.values, 0.0])
        return max(SILENCE_SECONDS, SILENCE_STEPS * float(longest))

    def state(self, now: float | None = None) -> State:
        """What it is doing now, as far as its records tell."""
        if self.stop:
            return STOPS[self.stop["kind"]]
        quiet = (time.time() if now is None else now) - self.updated
        return "silent" if quiet > self.silence_limit else "running"

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; evaluations to come are not foreseen. None where nothing tells."""
        seconds = self.column("seconds").finite.values[-50:]
        if self.total_steps is None or not len(seconds):
            return None
        return float(np.mean(seconds)) * max(self.total_steps - self.step, 0)

    def column(self, name: str) -> Column:
        """A measure of the steps; empty where there is none."""
        return self.train.get(name, NOTHING)

    def evaluated(self, name: str) -> Column:
        """A measure of the evaluations; empty where there is none."""
        return self.evaluations.get(name, NOTHING)


def read_run(folder: Path | str) -> Run:
    """Read the metrics of a run, which may be going on.

    Raises:
        ValueError: no metrics in the folder, or nothing in them that is a record.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        there = "no such folder" if not folder.exists() else f"there is no {METRICS_FILE} in it"
        raise ValueError(f"{folder}: {there}; name the output folder of a run that has done at least one step")
    with path.open(encoding="utf-8", errors="replace") as file:
        records, unreadable = _parse(file)
    if not records:
        raise ValueError(f"{path}: none of its {unreadable} lines is a record; is it the metrics file of a run?")
    return _run(folder, records, unreadable, path.stat().st_mtime)


def _parse(lines: Iterable[str]) -> tuple[list[dict[str, Any]], int]:
    records, unreadable = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(record)
        else:
            unreadable += 1
    return records, unreadable


def _run(folder: Path, records: list[dict[str, Any]], unreadable: int, updated: float) -> Run:
    start: dict[str, Any] = {}
    stop: dict[str, Any] = {}
    steps: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "eval": {}}
    for record in records:
        kind = record["kind"]
        if kind == "start":
            start = start | record
        elif kind in STOPS:
            stop = record
        elif kind in steps and isinstance(record.get("step"), int):
            stop = {}  # it went on
            steps[kind][record["step"]] = record  # a resumed run may repeat a step; the later one counts
    return Run(
        folder=folder,
        start=start,
        train=_columns(steps["train"]),
        evaluations=_columns(steps["eval"]),
        stop=stop,
        updated=updated,
        unreadable=unreadable,
    )


def _columns(records: Mapping[int, Mapping[str, Any]]) -> dict[str, Column]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for step in sorted(records):
        for name, value in records[step].items():
            if name in ("kind", "step") or not (value is None or isinstance(value, int | float)):
                continue
            steps, values = found.setdefault(name, ([], []))
            steps.append(step)
            values.append(math.nan if value is None else float(value))
    columns = {name: Column(np.array(steps, np.int64), np.array(values)) for name, (steps, values) in found.items()}
    return {name: column for name, column in columns.items() if np.isfinite(column.values).any() or name == "loss"}
