"""Write BENCHMARKS.md, and the table of the README, from the rows in benchmarks/results.

Run: python benchmarks/page.py [--check]. With --check nothing is written; exit code 1 if a page is out of date.
"""

# ruff: noqa: E402
import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_table

RESULTS, PAGE, README = ROOT / "benchmarks" / "results", ROOT / "BENCHMARKS.md", ROOT / "README.md"
Row = dict[str, str]
Cell = str | Callable[[Row], str]
"""The name of a column, or a function of the row."""
NAMES = {
    "tau_airline_think": "tool agent, think blocks dropped",
    "tau_airline_calls": "tool agent, one row per LLM call",
    "tot_game24": "search trees, short and bushy",
    "codet_humaneval": "sampled answers to two prompts",
    "unrelated": "nothing shared (control)",
    "demo": "the demo",
    "qwen3_moe": "mixture of experts, 52M parameters",
    "qwen3_5_hybrid": "hybrid of gated DeltaNet and attention, 29M parameters",
    "granite_4_hybrid": "hybrid of Mamba-2 and attention, 33M parameters",
}
INTRODUCTION = """# Benchmarks

All figures but those of the last section were measured on two cores of an AMD EPYC. The scripts are in
[benchmarks](benchmarks). The rows, each with its date, commit, machine and versions, are in
[benchmarks/results](benchmarks/results). `make bench` measures again; `python benchmarks/page.py` writes this page.

*Ideal* is the ratio of the FLOPs of rows and tree, attention included. *Efficiency* is the measured speed-up over the
ideal one. Times are medians over steps of forward and backward; the compared runs alternate in one process.
The baseline is the fastest of several runs without sharing, packed or padded, with the same fused head.
"""


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        title: its heading.
        text: what was measured, in one paragraph.
        file: the rows, a csv file in the folder of results.
        key: columns that tell one case from another; the last row of each case counts.
        columns: heading and content of each column.
    """

    title: str
    text: str
    file: str
    key: tuple[str, ...]
    columns: dict[str, Cell]


def name(row: Row) -> str:
    """The workload in words."""
    found = row.get("workload") or row.get("work") or row.get("task") or row["model"]
    return NAMES.get(found, found)


def budget(row: Row) -> str:
    """The budget, or a dash."""
    return row["budget"] or "–"


def bold_efficiency(row: Row) -> str:
    """The efficiency, in bold."""
    return f"**{number(row['efficiency'])}**"


SPEED: dict[str, Cell] = {
    "tokens: rows → tree": lambda row: f"{number(row['flat_tokens'])} → {number(row['unique_tokens'])}",
    "seconds: rows → tree": lambda row: f"{number(row['linear_seconds'])} → {number(row['tree_seconds'])}",
    "baseline": "baseline",
    "ideal": "ideal",
    "measured": "speedup",
    "efficiency": bold_efficiency,
}


def spread(row: Row) -> str:
    """A measured speed-up with the least and the greatest of its rounds."""
    return f"**{number(row['speedup'])}** ({number(row['speedup_min'])} to {number(row['speedup_max'])})"


HEADLINE = Section(
    "Headline",
    "A training step (forward and backward of SFT, float32) of a Qwen3-shaped model of 30M parameters as a tree, "
    "against the fastest run without one: rows that another row extends are merged into it, the others packed or "
    "padded. Medians over the rounds, with the least and the greatest. An efficiency above 1 comes from passes: "
    "those of a tree hold more rows, and longer passes cost less a token (see *Passes*). "
    "`python benchmarks/headline.py` measures it again.",
    "headline.csv",
    ("work",),
    {
        "work": "work",
        "rows: all, merged": lambda row: f"{row['rows']}, {row['merged_rows']}",
        "tokens: rows, merged, tree": lambda row: ", ".join(
            number(row[f"{which}_tokens"]) for which in ("flat", "merged", "unique")
        ),
        "times as fast": spread,
        "FLOPs allow": "ideal",
        "efficiency": "efficiency",
        "against every row by itself": "each_row_speedup",
        "rounds": "rounds",
    },
)
RIVALS = Section(
    "Rivals",
    "Other ways to share prefixes, each written in `benchmarks/rivals.py` from its public description in its simplest "
    "right form, on the same rows and model, taking turns in one process. *Rows* is the baseline of the table above, "
    "packed; *segments* is depth-first execution by segments against a cache of keys and values (the form of "
    "AReaL-DTA), made for long segments; *prefix groups* share prefixes of depth one (the form of PrefixGrouper). "
    "Memory is what a step adds; the error is that of the gradients against every row by itself in float64.",
    "rivals.csv",
    ("work", "rival"),
    {
        "work": "work",
        "rival": "rival",
        "seconds": lambda row: (
            f"{number(row['seconds'])} ({number(row['seconds_min'])} to {number(row['seconds_max'])})"
        ),
        "times as fast as rows": spread,
        "FLOPs allow a tree": "ideal",
        "memory, MB": "peak_mb",
        "error": "gradient_error",
        "rounds": "rounds",
    },
)
SECTIONS = (
    HEADLINE,
    RIVALS,
    Section(
        "Speed",
        "SFT on a Qwen3-shaped model of 30M parameters, float32, the whole tree in one part.",
        "cpu_efficiency.csv",
        ("workload",),
        {"work": name, **SPEED},
    ),
    Section(
        "Other layers",
        "The same on a mixture of experts and on hybrids with recurrent layers.",
        "families.csv",
        ("model",),
        {"model": lambda row: NAMES.get(row["model"], row["model"]), **SPEED},
    ),
    Section(
        "Budgets",
        "The budget is a quarter of the tree's tokens, or half of its longest path. Parts of a few dozen tokens are "
        "slow with or without a tree: see *Passes* below.",
        "budget_efficiency.csv",
        ("workload", "budget"),
        {
            "work": name,
            "budget": lambda row: f"{row['budget']}: {number(row['budget_tokens'])} tokens",
            "parts": "parts",
            "run twice": "recomputed",
            "at the least": "least_recomputed",
            "ideal": "ideal",
            "measured": "speedup",
            "efficiency": bold_efficiency,
        },
    ),
    Section(
        "Inside trainers",
        "A training step of TRL's trainers and of a plain `transformers.Trainer` with and without "
        "`tt.share_prefixes`, in CPU seconds. The baseline is the trainer with one row (DPO: one pair) at a "
        "time or one padded batch, whichever is faster. A pass per row costs extra, so efficiency can exceed 1.",
        "trainers.csv",
        ("work", "budget"),
        {
            "work": name,
            "budget": budget,
            "tokens: rows → tree": lambda row: f"{number(row['flat_tokens'])} → {number(row['unique_tokens'])}",
            "without, s": "linear_cpu_seconds",
            "with, s": "cpu_seconds",
            "ideal": "ideal",
            "efficiency": lambda row: f"**{number(row['cpu_efficiency'])}**",
        },
    ),
    Section(
        "Images",
        "A step of a Qwen3-VL shape on eight answers to one question about one image, in CPU seconds: the plain model "
        "on the padded batch that TRL's GRPO makes, and a tree. The encoder by itself, on eight images and on one.",
        "images.csv",
        ("answers",),
        {
            "answers": "answers",
            "tokens of a row, of its image": lambda row: f"{row['row_tokens']}, {row['image_tokens']}",
            "without, s": "without_s",
            "with, s": "with_s",
            "encoder without, s": "encoder_8_s",
            "encoder with, s": "encoder_1_s",
            "measured": "speedup",
        },
    ),
    Section(
        "Inside trainers, sharded",
        "An optimizer step of a plain `transformers.Trainer` over micro-batches of one tool-agent call, sharded by "
        "accelerate over two processes, with and without `tt.share_prefixes`: seconds of the slower process.",
        "sharded_trainers.csv",
        ("way",),
        {
            "weights": lambda row: {"fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}[row["way"]],
            "tokens: rows → tree": lambda row: f"{number(row['flat_tokens'])} → {number(row['unique_tokens'])}",
            "without, s": "plain_seconds",
            "with, s": "seconds",
            "ideal": "ideal",
            "measured": "speedup",
            "efficiency": bold_efficiency,
        },
    ),
    Section(
        "Score now, backward later",
        "`engine.score` and `scored.backward` against `forward_backward`. Parts whose graphs do not fit run twice.",
        "score.csv",
        ("workload", "budget"),
        {
            "work": name,
            "budget": budget,
            "parts": "parts",
            "graphs": "graphs",
            "forward_backward, s": "forward_backward_seconds",
            "score and backward, s": "score_seconds",
            "relative speed": lambda row: f"**{number(row['relative_speed'])}**",
        },
    ),
    Section(
        "Memory",
        "Peak above model, gradients and optimiser state.",
        "memory.csv",
        ("case", "engine", "budget"),
        {
            "case": lambda row: NAMES.get(row["case"], row["case"]),
            "engine": "engine",
            "budget": budget,
            "parts": "parts",
            "predicted MB": "predicted_mb",
            "measured MB": "measured_mb",
            "of the longest row alone": "measured_over_longest_row",
        },
    ),
    Section(
        "Memory of the first step",
        "Peak of the first step of share_prefixes above the weights, with its comparison with the plain model "
        "(checked) and without. Short rows: 162M parameters; long rows: 30M.",
        "first_step.csv",
        ("case",),
        {
            "case": "case",
            "rows": lambda row: f"{row['rows']} of {row['row_tokens']}",
            "weights, MB": "weights_mb",
            "step, MB": "step_mb",
            "checked step, MB": "checked_step_mb",
            "ratio": lambda row: f"**{number(row['checked_over_step'])}**",
        },
    ),
    Section(
        "FSDP2",
        "Two processes with sharded weights (together) against two independent ones that each train half of the batch "
        "(apart).",
        "fsdp_throughput.csv",
        ("model", "processes"),
        {
            "processes": "processes",
            "tokens: rows → trees": lambda row: f"{number(row['flat_tokens'])} → {number(row['computed_tokens'])}",
            "apart, s": "apart_seconds",
            "together, s": "together_seconds",
            "ratio": lambda row: f"**{number(row['throughput_ratio'])}**",
        },
    ),
    Section(
        "Context parallel",
        "Two processes of one thread that divide every part, each with half of the tree as its budget, against one "
        "process of two threads with the whole tree or half of it as its budget.",
        "context_parallel.csv",
        ("model", "processes"),
        {
            "tokens": "unique_tokens",
            "two processes, s": "context_seconds",
            "one, whole budget, s": "one_process_seconds",
            "one, half budget, s": "one_process_half_budget_seconds",
            "speed against the whole budget": "speed_of_one_process",
            "against half": lambda row: f"**{number(row['speed_of_one_process_half_budget'])}**",
        },
    ),
    Section(
        "Attention",
        "Forward and backward of one layer's attention on a tree, against one causal call over as many tokens.",
        "attention_cost.csv",
        ("tree",),
        {
            "tree": lambda row: NAMES.get(row["tree"], row["tree"]),
            "tokens": "tokens",
            "calls": "calls",
            "tree, ms": "tree_ms",
            "causal, ms": "causal_ms",
            "ratio": "ratio",
        },
    ),
    Section(
        "Passes",
        "Rows that share nothing, without a tree: speed relative to passes of 4,096 tokens.",
        "pass_sizes.csv",
        ("pass_tokens",),
        {"tokens of a pass": "pass_tokens", "passes": "passes", "relative speed": "efficiency"},
    ),
    Section(
        "Building trees",
        "Tokens merged per second of CPU.",
        "tree_build.csv",
        ("shape",),
        {
            "rows": "shape",
            "flat tokens": "flat_tokens",
            "overlap": "overlap",
            "million tokens a second": "mtokens_per_cpu_s_median",
        },
    ),
    Section(
        "Inspecting",
        "`treetrain inspect --html` on a JSONL file of token rows, in one process on a busy machine. Figures are "
        "of a sample of whole groups. The 200,000 rows are two random tokens each.",
        "inspect_scale.csv",
        ("rows",),
        {
            "rows": lambda row: number(row["rows"]),
            "tokens": lambda row: number(row["flat_tokens"]),
            "file, GB": lambda row: f"{int(row['file_bytes']) / 1e9:.3g}",
            "seconds": "seconds",
            "CPU seconds": "cpu_seconds",
            "MB a second of CPU": lambda row: f"{int(row['file_bytes']) / 1e6 / float(row['cpu_seconds']):.0f}",
            "peak memory, MB": "peak_rss_mb",
        },
    ),
    Section(
        "Reading",
        "Megabytes of JSONL a second of CPU time, in one process: parsed by `json.loads` alone, read and checked "
        "record by record, and made into rows (rendered and tokenised, except for token rows).",
        "read_speed.csv",
        ("kind",),
        {
            "file": "kind",
            "MB": lambda row: f"{int(row['file_bytes']) / 1e6:.1f}",
            "json.loads": "json_loads_mb_per_s",
            "before tokenisation": "parsed_mb_per_s",
            "rows": "rows_mb_per_s",
        },
    ),
    Section(
        "Verdict",
        "What `treetrain inspect` says against measured times: the rows that no other row extends, each by itself, "
        "over trees of as many batches, all rows at once or eight rows each; processor time of one "
        "thread. Batches of few tokens are slower than FLOPs say, because their passes are small (see Passes).",
        "verdict.csv",
        ("workload", "batch"),
        {
            "work": name,
            "rows of a batch": "batch",
            "rows without a tree": lambda row: f"{row['linear_rows']} of {row['rows']}",
            "verdict": lambda row: f"{row['verdict']}x, {row['said']}",
            "measured": lambda row: f"{float(row['measured']):.2f}x",
            "measured / verdict": lambda row: f"**{number(row['efficiency'])}**",
        },
    ),
    Section(
        "Lost sharing",
        "Causes planted in conversations of the tool agent, one row per LLM call: what `treetrain inspect` finds, "
        "and the ideal speed-up (qwen3-8b) that it predicts without the cause against that of the same conversations "
        "without it. The script can also plant every two of them together.",
        "lost_sharing.csv",
        ("planted",),
        {
            "planted": "planted",
            "found": "found",
            "rows": "rows_found",
            "speed-up": "speedup",
            "predicted": "predicted",
            "measured": "measured",
            "tokens lost, predicted": lambda row: number(row["lost_tokens_predicted"]),
            "measured, tokens": lambda row: number(row["lost_tokens"]),
        },
    ),
    Section(
        "Planning",
        "CPU seconds from rows to a plan.",
        "planning.csv",
        ("rows", "budget"),
        {
            "rows": "rows",
            "budget": budget,
            "flat tokens": "flat_tokens",
            "parts": "parts",
            "seconds": "cpu_s_median",
        },
    ),
    Section(
        "Deep and wide trees",
        "One step on a tiny model.",
        "deep_trees.csv",
        ("case",),
        {
            "tree": "case",
            "tokens": "unique_tokens",
            "parts": "parts",
            "build, s": "build_seconds",
            "plan, s": "plan_seconds",
            "step, s": "step_seconds",
        },
    ),
    Section(
        "Simulated against measured",
        "A step of real processes against `treetrain simulate`.",
        "simulate_check.csv",
        ("task", "ranks", "parallel"),
        {
            "work": name,
            "processes": "ranks",
            "parallel": "parallel",
            "measured, s": "seconds",
            "predicted, s": "predicted_seconds",
            "ratio": "measured_over_predicted",
        },
    ),
)
GPU = "gpu.jsonl"
NOT_ON_A_GPU = """## On a GPU

Nothing was measured on a GPU yet. `python3 benchmarks/quarter_hour.py` does it ([docs/gpu.md](docs/gpu.md)).
"""
ON_A_GPU = """Steps of forward, backward and AdamW back to back on Qwen3 shapes with random weights, in bfloat16
([docs/gpu.md](docs/gpu.md)). The baseline trains the rows that no other row extends, with the weights of all, packed
without padding, by the same kernels. *Over the fastest attention* takes its attention at the rate of PyTorch's fastest
causal kernel on that card, *over every row by itself* merges no rows. *Memory* is what a step adds."""
EXACTNESS = (
    (
        "exactness.csv",
        "Exactness of gradients",
        "Relative error of the gradients against each row alone: the worst of all forests, in bfloat16 the root mean "
        "square. Allowed: 1e-12 in float64, 1e-5 in float32; in bfloat16 1.5 times the error of the rows themselves "
        "against float64.",
    ),
    (
        "trainer_exactness.csv",
        "Exactness inside trainers",
        "Twenty steps with and without sharing from the same seed: relative difference of every logged metric and "
        "of the final weights. Allowed: 1e-10 in float64, 1e-5 in float32. *Updates* is the difference of the "
        "weights divided by how far they moved in these steps.",
    ),
)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write BENCHMARKS.md from the rows.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if out of date")
    check = parser.parse_args().check
    stale = False
    for path, text in ((PAGE, generated(RESULTS)), (README, readme(RESULTS))):
        if text == (path.read_text(encoding="utf-8") if path.is_file() else ""):
            continue
        stale = True
        if check:
            print(f"{path.name} is out of date: run python benchmarks/page.py")
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and stale)


def headline(results: Path) -> str:
    """The table of the README, and the machine and commits of its rows."""
    rows = latest(results / HEADLINE.file, HEADLINE.key)
    machines, commits = (", ".join(sorted({row[column] for row in rows})) for column in ("machine", "commit"))
    return f"{table(HEADLINE, rows)}\n\n{machines}; commit {commits}" if rows else ""


def readme(results: Path) -> str:
    """The README with the table of `headline.py` between its two marks."""
    begin, end = "<!-- headline.py -->\n", "<!-- end of headline.py -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{headline(results)}\n{end}{after}" if after else before


def generated(results: Path) -> str:
    """The page; a section without rows is left out."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        if rows := latest(results / section.file, section.key):
            parts.append(f"## {section.title}\n\n{section.text}\n\n{table(section, rows)}\n")
    for file, title, text in EXACTNESS:
        if rows := latest(results / file, ("test", "what")):
            parts.append(f"## {title}\n\n{text}\n\n{worst_errors(rows)}\n")
    rows = gpu_table.read(results / GPU) if (results / GPU).is_file() else []
    parts.append(f"## On a GPU\n\n{ON_A_GPU}\n\n{gpu_table.tables(rows)}" if rows else NOT_ON_A_GPU)
    return "\n".join(parts)


def latest(path: Path, key: tuple[str, ...]) -> list[Row]:
    """The last row of every case, grouped by the first column of the key; none without a file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list({tuple(row[column] for column in key): row for row in csv.DictReader(file)}.values())
    works = list(dict.fromkeys(row[key[0]] for row in rows))
    return sorted(rows, key=lambda row: works.index(row[key[0]]))


def table(section: Section, rows: Iterable[Row]) -> str:
    """A table in Markdown; a column that no row fills is left out."""
    lines = [
        [number(row[cell]) if isinstance(cell, str) else cell(row) for cell in section.columns.values()] for row in rows
    ]
    return gpu_table.markdown(list(section.columns), lines)


def worst_errors(rows: list[Row]) -> str:
    """The largest error of every test and dtype, over all its cases."""
    worst: dict[tuple[str, str], tuple[float, int]] = {}
    for row in rows:
        if row["what"].startswith("distinct"):
            continue
        test, _, case = row["test"].partition("[")
        words = test.removeprefix("test_").replace("_", " ")
        what = " ".join((*re.findall(r"float\d\d", case), row["what"]))
        error, cases = worst.get((words, what), (0.0, 0))
        worst[words, what] = (max(error, float(row["value"])), cases + 1)
    lines = [[test, what, str(cases), f"{error:.1e}"] for (test, what), (error, cases) in worst.items()]
    return gpu_table.markdown(["test", "", "cases", "worst"], lines)


def number(text: str) -> str:
    """Separators in counts, two decimals below a hundred; words as they are, a dash for nothing."""
    try:
        value = float(text)
    except ValueError:
        return text or "–"
    return f"{value:,.0f}" if abs(value) >= 100 or text.isdigit() else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
