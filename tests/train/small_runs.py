"""Runs small enough for a test: what they are told, and what they wrote down."""

import json
from pathlib import Path
from typing import Any


def small_run(data: str, model: str, output: Path) -> dict[str, Any]:
    """Settings that all small runs share; steps of two groups of `branching_rows`."""
    return {"data": (data,), "model": model, "output": str(output), "tokens_per_step": 120, "lr": 1e-2}


def records(run: Any, kind: str = "train") -> list[dict[str, Any]]:
    """Records of one kind, of a run's folder or of its result."""
    folder = Path(run if isinstance(run, str | Path) else run.output)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
