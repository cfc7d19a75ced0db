"""Folders of runs as `treetrain train` leaves them, made in a moment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import step_record

CONFIG = {"model": "tiny", "loss": "sft", "execution": "tree", "budget": None, "output": "out", "lr": 1e-3}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes metrics.jsonl of a run into a folder of `tmp_path` and returns the folder."""

    def make(
        name: str = "run",
        *,
        steps: int = 12,
        total: int = 12,
        config: dict[str, Any] | None = None,
        start: dict[str, Any] | None = None,
        change: Callable[[int], dict[str, Any]] = lambda step: {},
        evaluations: dict[int, float] | None = None,
        stop: dict[str, Any] | None = None,
    ) -> Path:
        records = [{"kind": "start", "steps": total, "config": CONFIG | (config or {}), **(start or {})}]
        evaluations = {0: 3.0, steps: 2.1} if evaluations is None else evaluations
        for step in range(steps + 1):
            if step:
                records.append(step_record(step, **change(step)))
            if step in evaluations:
                records.append(
                    {"kind": "eval", "step": step, "nll": evaluations[step], "trained_tokens": 9, "seconds": 1.0}
                )
        if stop is not None:
            records.append(stop)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make
