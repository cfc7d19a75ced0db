"""Does a pretrained model learn the same with shared prefixes, and sooner? SFT, then GRPO, in TRL; three seeds.

Run: python benchmarks/calculator.py [RUN ...] [--sft-steps 12] [--steps 20] [--picture-only]

SmolLM2-135M-Instruct learns to solve arithmetic and word problems with a calculator over several turns
(examples/calculator), LoRA, float32, one thread. `tt.share_prefixes` is the one difference between the runs that are
compared. Both runs of GRPO of a seed start from what SFT with sharing has learned with that seed. Accuracy is of greedy
decoding on held-out problems: stories that were trained with numbers that were not, and stories that were not. Seconds
of the processor are compared, since wall time on a busy machine says little.

A run that was stopped goes on: models and checkpoints are in runs/calculator, and a run with its row of this commit is
left out. results/calculator.csv has a row for every step, results/calculator_accuracy.csv one for every run,
results/calculator_texts.jsonl what the models wrote about some held-out problems. docs/images/calculator.png and
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
PHASES = ("pretrained", "sft", "grpo")
RUNS_IN_ORDER = [
    "pretrained",
    *(f"{phase}-shared-{seed}" for phase in PHASES[1:] for seed in range(3)),
    *("sft-alone-0", "grpo-alone-0", "grpo-alone-1", "grpo-alone-2"),
]
SECONDS = ("seconds", "cpu_seconds", "sampling")
SHOWN = 3
"""Problems of each test whose texts are kept."""
TESTS = ("other numbers", "other stories")


def test(model: Any, phase: str, arm: str, seed: int, count: int, more: dict[str, Any]) -> None:
    """Test a model; append a row for each test, and texts."""
    from examples.calculator import train

    name = {"phase": phase, "arm": arm, "seed": seed}
    tokenizer, rows = train.load_tokenizer(), []
    for which, problems in train.held_out(count).items():
        accuracy, episodes = train.accuracy(model, problems)
        rows.append({**name, "test": which, "problems": count, "accuracy": f"{accuracy:.4f}"} | more)
        with TEXTS.open("a", encoding="utf-8") as file:
            for problem, episode in list(zip(problems, episodes))[:SHOWN]:
                said = tokenizer.decode(episode.ids)
                text = {
                    "commit": result_rows.provenance()["commit"],
                    **name,
                    "question": problem.question,
                    "said": said,
                }
                file.write(json.dumps(text) + "\n")
    for row in rows:
        result_rows.report(FINAL, row)


def run(name: str, sft_steps: int, steps: int, count: int) -> None:
    """Train a model in its folder, and append its rows; nothing if its rows are there."""
    from examples.calculator import train
    from transformers.trainer_utils import get_last_checkpoint

    phase, arm, seed = [*name.split("-"), "", "0"][:3]
    if result_rows.has(FINAL, phase=phase, arm=arm, seed=seed):
        return print(f"{name}: has its row at this commit")
    if phase == "pretrained":
        return test(train.load_adapters(), phase, arm, 0, count, {"steps": 0} | dict.fromkeys(SECONDS, ""))
    seed, folder, length = int(seed), RUNS / name, sft_steps if phase == "sft" else steps
    start = RUNS / f"sft-shared-{seed}" if phase == "grpo" else None
    model = train.load_adapters(start, seed=seed)
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
            allowed = {"flops_allow": f"{entry['tree/ideal_speedup']:.3f}" if "tree/ideal_speedup" in entry else ""}
            result_rows.report(STEPS, row | {name: entry[name] for name in SECONDS} | allowed)


# ---- Picture


def last_rows(name: str, *key: str) -> list[dict[str, str]]:
    """The last row of each case in a file of results."""
    with (result_rows.RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list({tuple(row[column] for column in key): row for row in csv.DictReader(file)}.values())


def steps_of_grpo() -> dict[tuple[str, str], list[dict[str, str]]]:
    """The rows of every run of GRPO, by (seed, arm)."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in last_rows(STEPS, "phase", "arm", "seed", "step"):
        if row["phase"] == "grpo":
            runs[row["seed"], row["arm"]].append(row)
    return {run: sorted(rows, key=lambda row: int(row["step"])) for run, rows in sorted(runs.items())}


def accuracies() -> dict[tuple[str, str, str, str], float]:
    """The share of solved problems by (phase, arm, seed, test)."""
    key = ("phase", "arm", "seed", "test")
    return {tuple(row[name] for name in key): float(row["accuracy"]) for row in last_rows(FINAL, *key)}


def way(seed: str, test: str) -> list[tuple[str, str, str, str]]:
    """The keys of `accuracies` of a seed with shared prefixes: before, after SFT, after GRPO."""
    return [("pretrained", "", "0", test), *((phase, "shared", seed, test) for phase in PHASES[1:])]


def draw(window: int = 4) -> None:
    """Reward of GRPO by step and by CPU seconds, a running mean, and accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (by_step, by_seconds, after) = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    styles: dict[str, Any] = {"alone": {"linewidth": 4.0, "alpha": 0.35}, "shared": {"linewidth": 1.4}}
    labels = {"alone": "TRL alone", "shared": "with share_prefixes"}
    for (seed, arm), rows in steps_of_grpo().items():
        rewards = [float(row["reward"]) for row in rows]
        means = [statistics.fmean(rewards[max(0, at + 1 - window) : at + 1]) for at in range(len(rewards))]
        look = {"color": f"C{seed}", "label": f"{labels[arm]}, seed {seed}", **styles[arm]}
        by_step.plot([int(row["step"]) for row in rows], means, **look)
        by_seconds.plot([float(row["cpu_seconds"]) for row in rows], means, **look)
    by_step.set(xlabel="step of GRPO", ylabel=f"reward, mean of the last {window} steps", ylim=(0, 1))
    by_seconds.set(xlabel="CPU seconds, sampling included", ylim=(0, 1))
    by_step.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    by_step.legend(frameon=False, fontsize=8, loc="upper left")
    found = accuracies()
    for test, line in zip(TESTS, ("-o", "--^")):
        for seed in sorted({seed for _, arm, seed, _ in found if arm == "shared"}):
            solved = [found.get(key) for key in way(seed, test)]
            label = test if seed == "0" else None
            after.plot(
                [100 * value if value is not None else None for value in solved], line, color=f"C{seed}", label=label
            )
    after.set(xticks=range(3), xticklabels=["pretrained", "after SFT", "after GRPO"], xlim=(-0.2, 2.2), ylim=(-3, 100))
    after.set_ylabel("held-out problems solved, %")
    after.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in (by_step, by_seconds, after):
        axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


# ---- Page


def tables(window: int = 4) -> str:
    """What every seed learned, what a step cost with and without sharing, and texts of one seed."""
    found, runs = accuracies(), steps_of_grpo()
    finals = last_rows(FINAL, "phase", "arm", "seed", "test")
    head = [
        "seed",
        "held-out",
        "pretrained",
        "after SFT",
        "after GRPO",
        f"reward, first {window} steps",
        f"last {window}",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for seed in sorted({seed for _, arm, seed, _ in found if arm == "shared"}):
        rewards = [float(row["reward"]) for row in runs.get((seed, "shared"), [])]
        means = [f"{statistics.fmean(part):.2f}" if part else "" for part in (rewards[:window], rewards[-window:])]
        for test in TESTS:
            cells = [f"{found[key]:.0%}" if key in found else "" for key in way(seed, test)]
            lines.append(f"| {' | '.join([seed, test, *cells, *means])} |")
    both = [seed for seed, arm in runs if arm == "alone" and (seed, "shared") in runs]
    if both:
        lines += [
            "",
            "| seed | steps of both | losses apart (6 digits) | rewards apart | CPU s a step: sampling | update "
            "without | with | ratio | FLOPs allow (without padding) |",
            f"|{' --- |' * 9}",
        ]
    for seed in both:
        pairs = list(zip(runs[seed, "alone"], runs[seed, "shared"]))
        losses, rewards = ([abs(float(a[name]) - float(b[name])) for a, b in pairs] for name in ("loss", "reward"))
        alone, shared = (float(row["cpu_seconds"]) - float(row["sampling"]) for row in pairs[-1])
        sampling, n = float(pairs[-1][1]["sampling"]), len(pairs)
        allowed = sorted(float(row["flops_allow"]) for _, row in pairs)
        lines.append(
            f"| {seed} | {n} | {max(losses):.0g} | {max(rewards):.2g} | {sampling / n:.1f} | {alone / n:.1f} | "
            f"{shared / n:.1f} | {alone / shared:.1f} | {statistics.median(allowed):.2f} ({allowed[0]:.2f} to "
            f"{allowed[-1]:.2f}) |"
        )
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    for line in TEXTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["seed"] == 0 and row["arm"] != "alone":
            said = row["said"].replace("<|im_start|>", "").replace("<|im_end|>", "")
            turns = [turn.removeprefix("assistant\n").replace("tool\n", "= ") for turn in said.split("\nassistant\n")]
            texts[row["question"]][row["phase"]] = " ".join("; ".join(turns).split())
    lines += ["", "```text"]
    for question, said in list(texts.items())[2:4]:
        lines.append(question)
        lines += [f"  {phase:10}  {said[phase]}" for phase in PHASES if phase in said]
    machine = f"{finals[0]['machine']}; commits {', '.join(sorted({row['commit'] for row in finals}))}"
    return "\n".join([*lines, "```", "", f"{finals[0]['problems']} problems of each test; {machine}.", ""])


def write_page() -> None:
    """Put the tables between the marks of the page."""
    before, begin, rest = DOCS.read_text(encoding="utf-8").partition("<!-- calculator.py -->\n")
    if begin:
        after = rest.partition("<!-- end of calculator.py -->")[2]
        DOCS.write_text(f"{before}{begin}{tables()}<!-- end of calculator.py -->{after}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS_IN_ORDER)}; none means all, and then the picture")
    parser.add_argument("--sft-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--test", type=int, default=60, help="problems of each test")
    parser.add_argument("--picture-only", action="store_true", help="draw the rows that are there")
    options = parser.parse_args()
    if unknown := sorted(set(options.runs) - set(RUNS_IN_ORDER)):
        parser.error(f"no run {unknown[0]!r}; there are {', '.join(RUNS_IN_ORDER)}")
    result_rows.keep_memory()
    for name in [] if options.picture_only else options.runs or RUNS_IN_ORDER:
        run(name, options.sft_steps, options.steps, options.test)
    if not options.runs:
        draw()
        write_page()
