"""What a training step spends outside forward, backward and optimiser: reading rows, trees, plans, records, the page.

Run: python benchmarks/overhead.py [work ...] [--steps 6]

Whole runs of the trainer on the preset "tiny", with observers as the command line has them. Time of the walk (every
model call, forward and backward) and of the optimiser are taken off the time between the starts of two steps; what is
left is the share reported, the median over the steps but the first. Rows are appended to results/overhead.csv.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
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

    from treetrain.engine.walk import Walk
    from treetrain.report.live import LivePage
    from treetrain.train.config import TrainConfig
    from treetrain.train.trainer import Trainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    walking = [0.0]
    original = Walk.train

    def train(self, feed):
        start = time.perf_counter()
        try:
            return original(self, feed)
        finally:
            walking[0] += time.perf_counter() - start

    Walk.train = train
    starts: list[tuple[float, float, float]] = []
    file, settings = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(data=(file,), model="tiny", output=folder, overwrite=True, steps=steps, **settings)
        trainer = Trainer(config, observers=[LivePage(), Watch(starts, walking)])
        trainer.run()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    updates = [line["optimizer_seconds"] for line in lines if line["kind"] == "train"]
    tokens = [line["flat_tokens"] for line in lines if line["kind"] == "train"]
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


class Watch:
    """Notes when each step is recorded, and how long walks had taken by then."""

    def __init__(self, starts: list, walking: list[float]):
        self._starts, self._walking = starts, walking

    def open(self, *args, **options) -> None:
        """See `treetrain.train.sinks.Observer`."""

    def record(self, record: dict) -> None:
        """See `treetrain.train.sinks.Observer`."""
        if record.get("kind") == "train":
            self._starts.append((time.perf_counter(), self._walking[0]))

    def close(self, *args, **options) -> None:
        """See `treetrain.train.sinks.Observer`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--here", action="store_true", help="in this process (one work)")
    options = parser.parse_args()
    unknown = set(options.works) - set(WORKS)
    if unknown:
        parser.error(f"unknown work {sorted(unknown)[0]!r}; there are {', '.join(WORKS)}")
    if options.here:
        return measure(options.works[0], options.steps)
    for name in options.works:
        subprocess.run([sys.executable, __file__, name, "--here", "--steps", str(options.steps)], check=True)


if __name__ == "__main__":
    main()
