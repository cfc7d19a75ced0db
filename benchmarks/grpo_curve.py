"""Does the reward rise in examples/grpo.py? Run: python benchmarks/grpo_curve.py [--seeds 0 1 2]

One warm start (examples/sft.py, its defaults), from which every seed plays and learns by itself. A row in
results/grpo_countdown.csv is one iteration of one seed; docs/images/grpo_countdown.png shows the last run.
The picture needs matplotlib, which is not a dependency of the project.
"""

import argparse
import copy
import csv
import importlib.util
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import rows as result_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from examples import grpo, sft  # noqa: E402
from treetrain.models.loading import load_model  # noqa: E402

NAME = "grpo_countdown"
PICTURE = ROOT / "docs" / "images" / f"{NAME}.png"
ENDS = 5
"""Iterations at either end whose mean rewards are compared."""


def measure(seeds: list[int], iterations: int, saved: str | None) -> None:
    """Train every seed from one warm start; a row for every iteration."""
    warm = sft.main()[0] if saved is None else load_model(saved)
    for seed in seeds:
        started = time.perf_counter()
        history = grpo.main(iterations=iterations, seed=seed, model=copy.deepcopy(warm))
        seconds = round(time.perf_counter() - started, 1)
        for entry in history:
            entry = {name: round(value, 4) for name, value in entry.items()}
            result_rows.append(NAME, {"seed": seed, "warm_steps": sft.STEPS} | entry | {"run_seconds": seconds})
        rewards = [entry["reward"] for entry in history]
        first, last = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
        print(f"seed {seed}: mean reward {first:.3f} -> {last:.3f} in {seconds} s", flush=True)


def last_run() -> dict[int, list[dict[str, str]]]:
    """Rows of the last commit and day in the file, by seed; the last run if one commit has several."""
    with (result_rows.RESULTS / f"{NAME}.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    newest = [row for row in found if all(row[name] == found[-1][name] for name in ("commit", "date"))]
    latest = {(int(row["seed"]), int(row["iteration"])): row for row in newest}
    runs = defaultdict(list)
    for (seed, _), row in sorted(latest.items()):
        runs[seed].append(row)
    return runs


def draw(runs: dict[int, list[dict[str, str]]]) -> None:
    """Mean reward of every iteration, a thin line for every seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    curves = {seed: [float(row["reward"]) for row in rows] for seed, rows in runs.items()}
    for seed, curve in curves.items():
        axes.plot(curve, linewidth=1, alpha=0.55, label=f"seed {seed}")
    axes.plot([statistics.fmean(at) for at in zip(*curves.values())], color="black", linewidth=2.2, label="mean")
    row = next(iter(runs.values()))[0]
    axes.set(xlabel="iteration", ylabel="mean reward of the games", ylim=(0, 1))
    axes.set_title(f"examples/grpo.py, 3.7M parameters, four countdown tasks ({row['commit']})", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only draw the picture anew")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--model", help="folder that examples.sft --output wrote, instead of a new one")
    options = parser.parse_args()
    if options.seeds:
        measure(options.seeds, options.iterations, options.model)
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
    else:
        draw(last_run())
