"""Does a pretrained model learn the same with shared prefixes, and sooner? SFT, then GRPO, in TRL; three seeds.

Run: python benchmarks/calculator.py [--seeds 0 1 2] [--sft-steps 8] [--steps 40] [--test 96] [--picture-only]

SmolLM2-135M-Instruct learns to solve arithmetic and word problems with a calculator over several turns
(examples/calculator), full weights, float32. `tt.share_prefixes` is the one difference between the runs that are
compared. Both runs of GRPO of a seed start from what SFT without sharing has learned with that seed. Accuracy is of
greedy decoding on held-out problems, whose stories tell of other things than those that were trained.

A run that was stopped goes on: models and checkpoints are in runs/calculator, and a run with its row of this commit is
left out. results/calculator.csv has a row for every step, results/calculator_accuracy.csv one for every run,
results/calculator_texts.jsonl what the models wrote about three held-out problems. docs/images/calculator.png and
docs/numerics.md show them.
"""

import argparse
import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import rows as result_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STEPS, FINAL = "calculator", "calculator_accuracy"
TEXTS = result_rows.RESULTS / "calculator_texts.jsonl"
PICTURE, DOCS = ROOT / "docs" / "images" / "calculator.png", ROOT / "docs" / "numerics.md"
RUNS = Path("runs/calculator")
ARMS = {"shared": True, "alone": False}
"""With `tt.share_prefixes`, and TRL by itself."""
SECONDS = ("seconds", "cpu_seconds", "sampling")
SHOWN = 3
"""Held-out problems whose texts are kept."""


def test(model: Any, phase: str, arm: str, seed: int, count: int, more: dict[str, Any]) -> None:
    """Test a model; append its row and texts."""
    from examples.calculator import train

    problems = train.held_out(count)
    accuracy, episodes = train.accuracy(model, problems)
    name = {"phase": phase, "arm": arm, "seed": seed}
    tokenizer = train.load_tokenizer()
    with TEXTS.open("a", encoding="utf-8") as file:
        for problem, episode in list(zip(problems, episodes))[:SHOWN]:
            said = tokenizer.decode(episode.ids)
            row = {"commit": result_rows.provenance()["commit"], **name, "question": problem.question, "said": said}
            file.write(json.dumps(row) + "\n")
    row = {**name, "problems": count, "accuracy": f"{accuracy:.4f}"}
    result_rows.report(FINAL, row | more)


def run(phase: str, arm: str, seed: int, length: int, start: Path | None, count: int) -> None:
    """Train a model in its folder, and append its rows; nothing if its rows are there."""
    from examples.calculator import agent, train
    from transformers.trainer_utils import get_last_checkpoint

    folder = RUNS / f"{phase}-{arm}-{seed}"
    if result_rows.has(FINAL, phase=phase, arm=arm, seed=str(seed)):
        return print(f"{folder.name}: has its row at this commit")
    model = agent.load(start, seed=seed)
    options = {"seed": seed, "steps": length, "share": ARMS[arm], "output": str(folder)}
    trainer = train.make_sft(model, **options) if phase == "sft" else train.make_grpo(model, **options, save_steps=2)
    trainer.add_callback(Rows(phase=phase, arm=arm, seed=seed))
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    model.save_pretrained(folder)
    log = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
    test(model, phase, arm, seed, count, {"steps": length} | {name: log[name] for name in SECONDS})


class Rows(TrainerCallback):
    """Appends the row of a step when it is logged; steps that are repeated after a stop have two, the last counts."""

    def __init__(self, **name: Any) -> None:
        self.name = name

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        entry = state.log_history[-1]
        if "loss" in entry:
            row = self.name | {
                "step": state.global_step,
                "loss": f"{float(entry['loss']):.6g}",
                "grad_norm": f"{float(entry['grad_norm']):.6g}",
                "reward": f"{float(entry['reward']):.4f}" if "reward" in entry else "",
            }
            result_rows.report(STEPS, row | {name: entry[name] for name in SECONDS})


def measure(seeds: list[int], arms: list[str], sft_steps: int, steps: int, count: int) -> None:
    """The pretrained model, then both phases for every seed and arm; GRPO starts from the adapters of shared SFT."""
    import torch
    from examples.calculator import agent

    torch.set_num_threads(1)
    result_rows.keep_memory()
    if 0 in seeds and "shared" in arms and not result_rows.has(FINAL, phase="pretrained"):
        test(agent.load(), "pretrained", "", 0, count, {"steps": 0} | dict.fromkeys(SECONDS, ""))
    for seed in seeds:
        for arm in arms:
            run("sft", arm, seed, sft_steps, None, count)
        for arm in arms:
            run("grpo", arm, seed, steps, RUNS / f"sft-shared-{seed}", count)


# ---- Picture


def last_rows(name: str, *key: str) -> list[dict[str, str]]:
    """The last row of each case in a file of results."""
    with (result_rows.RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list({tuple(row[column] for column in key): row for row in csv.DictReader(file)}.values())


def draw(window: int = 5) -> None:
    """Reward of GRPO by step and by seconds, a running mean, and accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in last_rows(STEPS, "phase", "arm", "seed", "step"):
        if row["phase"] == "grpo":
            runs[row["seed"], row["arm"]].append(row)
    figure, (by_step, by_seconds, after) = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    styles = {"alone": {"linewidth": 3.2, "alpha": 0.35}, "shared": {"linewidth": 1.3}}
    labels = {"alone": "TRL alone", "shared": "with share_prefixes"}
    for (seed, arm), rows in sorted(runs.items()):
        rewards = [float(row["reward"]) for row in rows]
        means = [statistics.fmean(rewards[max(0, at + 1 - window) : at + 1]) for at in range(len(rewards))]
        look: dict[str, Any] = {"color": f"C{seed}", "label": f"{labels[arm]}, seed {seed}", **styles[arm]}
        by_step.plot([int(row["step"]) for row in rows], means, **look)
        by_seconds.plot([float(row["seconds"]) for row in rows], means, **look)
    by_step.set(xlabel="step of GRPO", ylabel=f"reward, mean of {window} steps")
    by_seconds.set(xlabel="seconds, sampling included")
    by_step.legend(frameon=False, fontsize=7, loc="lower right")
    finals = last_rows(FINAL, "phase", "arm", "seed")
    for at, phase in enumerate(("pretrained", "sft", "grpo")):
        for row in finals:
            if row["phase"] == phase:
                shift = {"alone": -0.08, "shared": 0.08}.get(row["arm"], 0.0)
                marker = "o" if row["arm"] == "alone" else "x"
                after.plot(at + shift, 100 * float(row["accuracy"]), marker, color=f"C{row['seed']}")
    after.set(xticks=range(3), xticklabels=["pretrained", "after SFT", "after GRPO"], ylim=(0, 100))
    after.set_ylabel("held-out problems solved, %")
    for axes in (by_step, by_seconds, after):
        axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


# ---- Page


def tables() -> str:
    """Accuracy and seconds of every run, and what the first seed's models wrote about the problems that are shown."""
    finals = {(row["phase"], row["arm"], row["seed"]): row for row in last_rows(FINAL, "phase", "arm", "seed")}
    start = finals["pretrained", "", "0"]
    lines = [
        f"Pretrained: {_share(start)} of {start['problems']} held-out problems.",
        "",
        "| | seed | without: held-out | with: held-out | without, s | with, s | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    runs = {(phase, seed) for phase, _, seed in finals if phase != "pretrained"}
    for phase, seed in sorted(runs, key=lambda run: (run[0] != "sft", run[1])):
        pair = [finals.get((phase, arm, seed)) for arm in ARMS]
        if None not in pair:
            seconds = [float(row["seconds"]) for row in pair]
            lines.append(
                f"| {phase.upper()} | {seed} | {_share(pair[0])} | {_share(pair[1])} | {seconds[0]:,.0f} | "
                f"{seconds[1]:,.0f} | {seconds[0] / seconds[1]:.1f} |"
            )
    texts = {}
    for line in TEXTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["seed"] == 0 and row["arm"] != "alone":
            texts[row["question"], row["phase"]] = row["said"].replace("<|im_end|>", "").replace("<|im_start|>", "")
    for (question, phase), said in texts.items():
        if phase == "pretrained":
            lines += ["", f"*{question}*", "", "```text"]
            for name in ("pretrained", "sft", "grpo"):
                lines.append(f"--- {name}\n{texts.get((question, name), said).strip()}")
            lines.append("```")
    machine = f"{start['machine']}; commits {', '.join(sorted({row['commit'] for row in finals.values()}))}"
    return "\n".join([*lines, "", machine, ""])


def _share(row: dict[str, str]) -> str:
    return f"{100 * float(row['accuracy']):.0f}%"


def write_page() -> None:
    """Put the tables between the marks of the page."""
    before, begin, rest = DOCS.read_text(encoding="utf-8").partition("<!-- calculator.py -->\n")
    if begin:
        after = rest.partition("<!-- end of calculator.py -->")[2]
        DOCS.write_text(f"{before}{begin}{tables()}<!-- end of calculator.py -->{after}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="shared comes first")
    parser.add_argument("--sft-steps", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--test", type=int, default=64, help="held-out problems")
    parser.add_argument("--picture-only", action="store_true", help="draw the rows that are there")
    options = parser.parse_args()
    if not options.picture_only:
        measure(options.seeds, options.arms, options.sft_steps, options.steps, options.test)
    draw()
    write_page()
