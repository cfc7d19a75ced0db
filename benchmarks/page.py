"""Write BENCHMARKS.md, and the README's sentence and table of speed-ups, from the rows in benchmarks/results.

Run: python benchmarks/page.py [--check]. With --check nothing is written; exit code 1 if a page is out of date.
"""

# ruff: noqa: E402
import argparse
import csv
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
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
    "tau_airline_calls": "tool agent, one row per LLM call",
    "tot_game24": "search trees, short and bushy",
    "codet_humaneval": "sampled answers to two prompts",
    "qwen3_moe": "mixture of experts, 52M parameters",
    "qwen3_5_hybrid": "hybrid of gated DeltaNet and attention, 29M parameters",
    "granite_4_hybrid": "hybrid of Mamba-2 and attention, 33M parameters",
}
INTRODUCTION = """# Benchmarks

The scripts are in [benchmarks](benchmarks). The rows, each with its date, commit, machine and versions, are in
[benchmarks/results](benchmarks/results). `make bench` measures again; `python benchmarks/page.py` writes this page.
Below each table stand the machine and the commit of its rows; versions of Python and packages are in the rows.

The baseline of a speed-up is the fastest run without a tree, with the same fused head: rows that another row extends
are merged into it wherever the loss allows, and the others packed or padded. The figure against every row by itself
stands beside it. *FLOPs allow* is the ratio of the FLOPs of baseline and tree, attention included; *efficiency* is the
measured speed-up over it. Times are medians over rounds in which the compared runs take turns, with the least and the
greatest of the rounds in brackets.
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
        above_one: why an efficiency can exceed 1; shown if one does.
        efficiency: the column of that figure.
    """

    title: str
    text: str
    file: str
    key: tuple[str, ...]
    columns: dict[str, Cell]
    above_one: str = ""
    efficiency: str = "efficiency"


def budget(row: Row) -> str:
    """The budget, or a dash."""
    return row["budget"] or "–"


def rounds(row: Row) -> str:
    """How many times it was measured."""
    return row.get("rounds") or row.get("repeats") or "–"


def bold_efficiency(row: Row) -> str:
    """The efficiency, in bold."""
    return f"**{number(row['efficiency'])}**"


def between(column: str) -> Callable[[Row], str]:
    """A cell with a figure and the least and the greatest of its rounds."""

    def cell(row: Row) -> str:
        least, greatest = row.get(f"{column}_min"), row.get(f"{column}_max")
        return number(row[column]) + (
            f" ({number(least)} to {number(greatest)})" if least and greatest and least != greatest else ""
        )

    return cell


def tokens(row: Row) -> str:
    """Tokens in rows and in the tree."""
    return f"{number(row['flat_tokens'])} → {number(row['unique_tokens'])}"


SPEED: dict[str, Cell] = {
    "rows: all, merged": lambda row: f"{row['rows']}, {row['merged_rows']}",
    "tokens: rows, merged, tree": lambda row: ", ".join(
        number(row[f"{which}_tokens"]) for which in ("flat", "merged", "unique")
    ),
    "seconds: rows → tree": lambda row: f"{number(row['linear_seconds'])} → {number(row['seconds'])}",
    "times as fast": between("speedup"),
    "FLOPs allow": "ideal",
    "efficiency": bold_efficiency,
    "against every row by itself": "each_row_speedup",
    "rounds": rounds,
}
SMALL_PASSES = (
    "An efficiency above 1 comes from passes: those of a tree hold more rows, and longer passes cost less a token (see "
    "*Passes*)."
)


HEADLINE = Section(
    "Speed",
    "A training step (forward and backward of SFT, float32) of a Qwen3-shaped model of 30M parameters, the whole tree "
    "in one part. `python benchmarks/headline.py` measures it again, in ten minutes. Rows of a search tree, and calls "
    "of an agent whose template drops think blocks, extend no other row. Where calls extend calls, most of them need "
    "no tree to be trained once.",
    "headline.csv",
    ("work",),
    {"work": "work", **SPEED},
    SMALL_PASSES,
)
RIVALS = Section(
    "Rivals",
    "Other ways to share prefixes, each written in `benchmarks/rivals.py` from its public description in its simplest "
    "right form, on the same rows and model, taking turns in one process. *Rows* are packed, those that another row "
    "extends merged into it; *segments* is depth-first execution by segments against a cache of keys and values (the "
    "form of AReaL-DTA), made for long segments; *prefix groups* share prefixes of depth one (the form of "
    "PrefixGrouper). Memory is what a step adds; the error is that of the gradients against every row by itself in "
    "float64.",
    "rivals.csv",
    ("work", "rival"),
    {
        "work": "work",
        "rival": "rival",
        "seconds": between("seconds"),
        "times as fast as rows": between("speedup"),
        "FLOPs allow a tree": "ideal",
        "memory, MB": "peak_mb",
        "error": lambda row: f"{float(row['gradient_error']):.1e}",
        "rounds": rounds,
    },
)
LEADS = "search trees"
"""The work of the README's sentence."""
README_COLUMNS = (
    "work",
    "tokens: rows, merged, tree",
    "times as fast",
    "FLOPs allow",
    "against every row by itself",
    "rounds",
)
SECTIONS = (
    HEADLINE,
    RIVALS,
    Section(
        "Other layers",
        "The same on a mixture of experts and on hybrids with recurrent layers. The rows are calls of a tool agent "
        "whose template drops think blocks, so that none extends another.",
        "families.csv",
        ("model",),
        {"model": lambda row: NAMES.get(row["model"], row["model"]), **SPEED},
        SMALL_PASSES,
    ),
    Section(
        "Budgets",
        "The budget is a quarter of the tree's tokens or the longest path, whichever is larger, or half of that path. "
        "What the FLOPs allow counts the forwards that no plan within the budget avoids. Parts of a few hundred tokens "
        "are slow with or without a tree (see *Passes*), so no budget is below 512.",
        "budget_efficiency.csv",
        ("work", "budget"),
        {
            "work": "work",
            "budget": lambda row: f"{row['budget']}: {number(row['budget_tokens'])} tokens",
            "parts": "parts",
            "run twice": "recomputed",
            "at the least": "least_recomputed",
            **{key: SPEED[key] for key in list(SPEED)[2:]},
        },
        SMALL_PASSES,
    ),
    Section(
        "Inside trainers",
        "A training step of TRL's trainers and of a plain `transformers.Trainer` with and without "
        "`tt.share_prefixes`, in CPU seconds. The baseline is the trainer with one row (DPO: one pair) at a time or "
        "one padded batch, whichever is faster. No row repeats or extends another, so nothing could be merged: the "
        "baseline trains every row by itself. A step of distillation includes the teacher's forward, and its heads run "
        "over all rows with and without sharing.",
        "trainers.csv",
        ("work", "budget"),
        {
            "work": "work",
            "budget": budget,
            "tokens: rows → tree": tokens,
            "without, s": "linear_cpu_seconds",
            "with, s": "cpu_seconds",
            "times as fast": between("cpu_speedup"),
            "FLOPs allow": "ideal",
            "efficiency": lambda row: f"**{number(row['cpu_efficiency'])}**",
            "rounds": rounds,
        },
        "An efficiency above 1 comes from the trainers: without sharing every operation runs once for every row, or on "
        "padding.",
        "cpu_efficiency",
    ),
    Section(
        "Further ids at each prediction",
        "Forward and backward of the LM head with the log-probabilities of further ids at each prediction, against the "
        "head alone, in CPU seconds: random states that predict one token each, as in a policy loss. A loss that is "
        "linear in the log-probabilities (SFT) needs the logits once; over kept ids, or a teacher's, they are made "
        "twice, or kept where memory is free, as a step of one part does.",
        "ids_at_head.csv",
        ("work", "device"),
        {
            "further ids": "work",
            "states": "states",
            "vocabulary": "vocabulary",
            "alone, s": "cpu_seconds_alone",
            "with ids, s": "cpu_seconds",
            "times as long": between("cpu_times"),
            "rounds": rounds,
        },
    ),
    Section(
        "What rows may carry",
        "A step whose rows carry what a sampler or a teacher recorded: rows one by one, packed, with the same fields, "
        "and a tree. *Than without* is the tree's time over that of a tree without the field: with the same loss, for "
        "teachers with SFT; of two adapters, with one for all rows. A teacher over the vocabulary runs a second model. "
        "The error is the difference between the gradients of rows and tree, both in float32.",
        "row_fields.csv",
        ("field",),
        {
            "rows carry": "field",
            "tokens: rows → tree": tokens,
            "rows, s": "rows_seconds",
            "tree, s": "seconds",
            "times as fast": between("speedup"),
            "FLOPs allow": "each_row_ideal",
            "efficiency": bold_efficiency,
            "than without": between("times"),
            "error": lambda row: row["gradient_error"],
            "rounds": rounds,
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
            "times as fast": "speedup",
            "rounds": rounds,
        },
    ),
    Section(
        "Inside trainers, sharded",
        "An optimizer step of a plain `transformers.Trainer` over micro-batches of one tool-agent call, sharded by "
        "accelerate over two processes, with and without `tt.share_prefixes`: seconds of the slower process. Their "
        "template drops think blocks, so that none extends another: the baseline trains every row by itself.",
        "sharded_trainers.csv",
        ("way",),
        {
            "weights": lambda row: {"fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}[row["way"]],
            "tokens: rows → tree": tokens,
            "without, s": "plain_seconds",
            "with, s": "seconds",
            "times as fast": between("speedup"),
            "FLOPs allow": "ideal",
            "efficiency": bold_efficiency,
            "rounds": rounds,
        },
        "An efficiency above 1 comes from passes over one row: each gathers the weights again (FSDP2, ZeRO-3), and "
        "runs every operation once more.",
    ),
    Section(
        "Score now, backward later",
        "`engine.score` and `scored.backward` against `forward_backward`, in CPU seconds. Parts whose graphs do not "
        "fit run twice.",
        "score.csv",
        ("work", "budget"),
        {
            "work": "work",
            "budget": budget,
            "parts": "parts",
            "graphs": "graphs",
            "forward_backward, s": "forward_backward_seconds",
            "score and backward, s": "score_seconds",
            "relative speed": between("speedup"),
            "rounds": rounds,
        },
        "A relative speed above 1 is within what two equal runs differ by, or comes from a plan with fewer passes.",
        "speedup",
    ),
    Section(
        "Memory",
        "Peak above model, gradients and optimiser state, each in fresh processes.",
        "memory.csv",
        ("case", "engine", "budget"),
        {
            "case": "case",
            "engine": "engine",
            "budget": budget,
            "parts": "parts",
            "predicted MB": "predicted_mb",
            "measured MB": between("measured_mb"),
            "of the longest row alone": "measured_over_longest_row",
            "rounds": rounds,
        },
    ),
    Section(
        "Memory of distillation",
        "Peak of a step of `TreeEngine.distill` over the whole vocabulary of 16,384 ids, above both models and "
        "gradients, against SFT on the same tree of 3,518 tokens (tool agent, think blocks dropped; a student and a "
        "teacher of 30M parameters). Beside the step's own, it needs the inputs of both heads and chunks of logits.",
        "distill_memory.csv",
        ("budget", "divergence"),
        {
            "budget": budget,
            "divergence": "divergence",
            "SFT, MB": "sft_mb",
            "distillation, MB": "distillation_mb",
            "ratio": between("distillation_over_sft"),
            "rounds": rounds,
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
            "ratio": between("checked_over_step"),
            "rounds": rounds,
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
            "rounds": rounds,
        },
    ),
    Section(
        "Checkpoints",
        "Seconds that a step waits for its checkpoint (30M parameters and AdamW), and with `async_save` until the "
        "checkpoint is complete.",
        "checkpoint_waits.csv",
        ("form",),
        {
            "processes": "form",
            "MB": "megabytes",
            "waits, s": between("sync_wait"),
            "with `async_save`": between("async_wait"),
            "complete after": "async_complete",
            "rounds": rounds,
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
            "rounds": rounds,
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
            "rounds": rounds,
        },
    ),
    Section(
        "Passes",
        "Rows that share nothing, without a tree: speed relative to passes of 4,096 tokens.",
        "pass_sizes.csv",
        ("pass_tokens",),
        {
            "tokens of a pass": "pass_tokens",
            "passes": "passes",
            "relative speed": between("efficiency"),
            "rounds": rounds,
        },
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
            "million tokens a second": lambda row: (
                f"{number(row['mtokens_per_cpu_s_median'])} "
                f"({number(row['mtokens_per_cpu_s_min'])} to {number(row['mtokens_per_cpu_s_max'])})"
            ),
            "rounds": rounds,
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
            "CPU seconds": between("cpu_seconds"),
            "MB a second of CPU": lambda row: f"{int(row['file_bytes']) / 1e6 / float(row['cpu_seconds']):.0f}",
            "peak memory, MB": "peak_rss_mb",
            "rounds": rounds,
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
            "json.loads": between("json_loads_mb_per_s"),
            "before tokenisation": between("parsed_mb_per_s"),
            "rows": between("rows_mb_per_s"),
            "rounds": rounds,
        },
    ),
    Section(
        "Verdict",
        "What `treetrain inspect` says against measured times: the rows that no other row extends over trees of as "
        "many batches, all rows at once or eight rows each; processor time of one thread. Batches of few tokens are "
        "slower than FLOPs say, because their passes are small (see *Passes*).",
        "verdict.csv",
        ("work", "batch"),
        {
            "work": "work",
            "rows of a batch": "batch",
            "rows without a tree": lambda row: f"{row['linear_rows']} of {row['rows']}",
            "verdict": lambda row: f"{row['verdict']}x, {row['said']}",
            "measured": between("speedup"),
            "measured / verdict": bold_efficiency,
            "rounds": rounds,
        },
        "A measured speed-up above the verdict's comes from passes: those of a tree hold more rows.",
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
            "seconds": lambda row: (
                f"{number(row['cpu_s_median'])} ({number(row['cpu_s_min'])} to {number(row['cpu_s_max'])})"
            ),
            "rounds": rounds,
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
            "step, s": between("step_seconds"),
            "rounds": rounds,
        },
    ),
    Section(
        "Simulated against measured",
        "A step of real processes against `treetrain simulate`.",
        "simulate_check.csv",
        ("task", "ranks", "parallel"),
        {
            "work": lambda row: NAMES.get(row["task"], row["task"]),
            "processes": "ranks",
            "parallel": "parallel",
            "measured, s": "seconds",
            "predicted, s": "predicted_seconds",
            "ratio": "measured_over_predicted",
        },
    ),
    Section(
        "Simulated against two hosts",
        "A step of `TreeTrainer` over two hosts (network namespaces, torchrun on each) against `treetrain simulate "
        "--nodes 2`, from speeds of one process and the cable's.",
        "two_hosts.csv",
        ("work", "split"),
        {
            "work": "work",
            "weights": "split",
            "cable, MB/s": "cable_mb_per_second",
            "tokens": "tokens",
            "predicted": "predicted_tokens",
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
    (
        "adamw_exactness.csv",
        "Exactness with AdamW",
        "The same trainers with AdamW at a learning rate of 1e-2, for 3 steps and for 20: relative difference of the "
        "final weights, and of their updates. AdamW divides a gradient by its own size, so a difference of rounding in "
        "one that is almost 0 becomes an update of another size.",
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


def made(rows: Iterable[Row]) -> str:
    """The machine, the dates and the commits of rows, as a line."""
    machines, dates, commits = (
        sorted({row.get(column, "") for row in rows}) for column in ("machine", "date", "commit")
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{', '.join(machines)}; {when}; commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"


def explained(section: Section, rows: Iterable[Row]) -> str:
    """The text of a section, with its last sentence if an efficiency exceeds 1."""
    above = section.above_one and any(round(float(row[section.efficiency] or 0), 2) > 1 for row in rows)
    return f"{section.text} {section.above_one}" if above else section.text


def headline(results: Path) -> str:
    """What `headline.py` measured, for the README: a sentence, the table, the machine and commits of its rows."""
    rows = latest(results / HEADLINE.file, HEADLINE.key)
    if not rows:
        return ""
    columns = {name: HEADLINE.columns[name] for name in README_COLUMNS}
    parts = [*(sentence(row) for row in rows if row["work"] == LEADS), table(columns, rows), made(rows)]
    return "\n\n".join(parts)


def sentence(row: Row) -> str:
    """The README's first figure: a work whose rows all branch."""
    text = (
        f"On the shapes of real search trees, whose rows all branch ({number(row['flat_tokens'])} tokens in rows, "
        f"{number(row['unique_tokens'])} in the tree), a training step on a CPU is "
        f"**{float(row['speedup']):.1f} times** as fast as the fastest run without sharing: "
        f"{number(row['efficiency'])} of what the FLOPs allow."
    )
    return "\n".join(textwrap.wrap(text, 120))


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
            text, lines = explained(section, rows), table(section.columns, rows)
            parts.append(f"## {section.title}\n\n{text}\n\n{lines}\n\n{made(rows)}\n")
    for file, title, text in EXACTNESS:
        if rows := latest(results / file, ("test", "what")):
            parts.append(f"## {title}\n\n{text}\n\n{worst_errors(rows)}\n\n{made(rows)}\n")
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


def table(columns: Mapping[str, Cell], rows: Iterable[Row]) -> str:
    """A table in Markdown."""
    lines = [[number(row[cell]) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows]
    return gpu_table.markdown(list(columns), lines)


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
