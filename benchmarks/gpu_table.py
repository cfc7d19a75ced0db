"""The table of the rows that `quarter_hour.py` leaves: speed-ups over the best linear baseline, in Markdown.

Run: python3 benchmarks/gpu_table.py rows.jsonl

A speed-up is shown only if both sides computed the same gradient. The baseline merges rows that extend one another;
the figure against every row by itself stands beside it. Both sides run the same kernels. Where PyTorch has a faster
causal kernel (cuDNN's on a Hopper card) the baseline is shown with the attention at that kernel's rate as well: its
measured time, less the time of its attention at the rate of the kernel that ran, plus that at the best rate.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BASELINE, EVERY_ROW = "linear", "linear, every row"
DASH = "–"


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def best_linear_seconds(linear: Row, sweep: Iterable[Row]) -> tuple[float, str] | None:
    """Seconds of a baseline with its attention at the best rate of a plain causal kernel, and the kernel.

    None if no rates were measured beside the kernel that ran, or if none is faster.
    """
    rates = [row for row in sweep if row["kernel"].startswith("plain") and row.get("right", True) and "tflops" in row]

    def attention_seconds(rate: Row) -> float:
        forward = 2 / rate["forward_tflops"] if linear["checkpointed"] else 0.0  # the layers' forward runs twice
        return linear["product_flops"] / 1e12 * (7 / rate["tflops"] + forward)

    near = [rate for rate in rates if rate["tree"] == linear["rows"]] or rates
    kernel = "plain flash", linear["flash"]
    ran = [attention_seconds(rate) for rate in near if (rate["kernel"], rate["flash"]) == kernel]
    if not ran:
        return None
    best = min(near, key=attention_seconds)
    saved = ran[-1] - attention_seconds(best)
    name = best["kernel"].removeprefix("plain ") + (f", {best['flash']}" if best["flash"] != "FA2" else "")
    return (linear["seconds"] - saved, name) if saved > 0 else None


def speedups(rows: Sequence[Row]) -> list[Row]:
    """One entry per tree: its row, the baselines' rows, and what follows from them; the newest row of a case counts."""
    steps = {
        (row["machine"], row["flash"], row["model"], row["rows"], row["checkpointed"], row["engine"]): row
        for row in rows
        if row["kind"] == "steps"
    }
    found = []
    for (machine, flash, model, name, checkpointed, engine), tree in steps.items():
        if engine.startswith("linear"):
            continue
        linear, every = (steps.get((machine, flash, model, name, checkpointed, side)) for side in (BASELINE, EVERY_ROW))
        if linear is None or "seconds" not in linear:  # rows that do not fit otherwise are checkpointed
            smaller = steps.get((machine, flash, model, name, True, BASELINE), {})
            linear = smaller if "seconds" in smaller else linear
        entry: Row = {"tree": tree, "linear": linear, "every": every}
        wrong = [side for side in (tree, linear) if side is not None and not side.get("right", True)]
        if linear is not None and not wrong and "seconds" in tree and "seconds" in linear:
            sweep = [row for row in rows if row["kind"] == "sweep" and row["machine"] == machine]
            entry |= {"speedup": linear["seconds"] / tree["seconds"], "ideal": linear["ideal"]}
            entry["efficiency"] = entry["speedup"] / entry["ideal"]
            entry["without_optimiser"] = linear["seconds_without_optimiser"] / tree["seconds_without_optimiser"]
            if (best := best_linear_seconds(linear, sweep)) is not None:
                entry |= {"best_linear": best[0], "best_kernel": best[1], "over_best": best[0] / tree["seconds"]}
            if every is not None and "seconds" in every and every.get("right", True):
                entry["over_every_row"] = every["seconds"] / tree["seconds"]
        found.append(entry)
    return found


HEADINGS = (
    "model", "rows", "tree runs", "tokens: rows → tree", "seconds: rows → tree", "speed-up", "ideal", "efficiency",
    "without optimiser", "over the fastest attention", "over every row by itself", "gradients differ by", "MFU",
    "GB: predicted, measured",
)  # fmt: skip


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings and cells: a line per tree, also where there is no baseline or something went wrong."""
    lines = []
    for entry in speedups(rows):
        tree, linear = entry["tree"], entry["linear"]
        how = [tree["engine"].removeprefix("tree, "), *["checkpointed"] * tree["checkpointed"]]
        how += [tree["flash"]] if tree["flash"] != "FA2" else []
        how += ["rows checkpointed"] if linear and linear["checkpointed"] > tree["checkpointed"] else []
        seconds = [number(side.get("seconds")) if side else DASH for side in (linear, tree)]
        if not tree.get("right", True) or (linear and not linear.get("right", True)):
            result = differ(tree if not tree.get("right", True) else linear)
        elif "note" in tree or (linear and "note" in linear):
            note = tree.get("note") or f"linear: {linear['note']}"
            result = " ".join(note.replace("|", "/").split())[:80]
        else:
            result = f"**{number(entry.get('speedup'))}**"
        best = f"{number(entry['over_best'])} ({entry['best_kernel']})" if "over_best" in entry else DASH
        lines.append(
            [
                tree["model"], tree["rows"], ", ".join(how),
                f"{number(linear['tokens']) if linear and 'tokens' in linear else DASH} → {number(tree.get('tokens'))}",
                " → ".join(seconds), result, number(entry.get("ideal")), number(entry.get("efficiency")),
                number(entry.get("without_optimiser")), best, number(entry.get("over_every_row")),
                number(tree.get("gradient_error")), number(tree.get("mfu")),
                f"{number(tree.get('predicted_gb'))}, {number(tree.get('above_gb'))}",
            ]
        )  # fmt: skip
    return HEADINGS, lines


def trainer_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings and cells of the training steps of TRL with and without shared prefixes."""
    headings = ("trainer", "tokens: rows → tree", "seconds: without → with", "speed-up", "ideal", "baseline")
    newest = {(row["machine"], row["trainer"]): row for row in rows if row["kind"] == "trl" and "speedup" in row}
    lines = [
        [
            row["trainer"],
            f"{number(row['flat_tokens'])} → {number(row['unique_tokens'])}",
            f"{number(row['seconds_without'])} → {number(row['seconds_with'])}",
            f"**{number(row['speedup'])}**" if row["right"] else differ(row),
            number(row["ideal"]),
            row["baseline"],
        ]
        for row in newest.values()
    ]
    return headings, lines


def differ(row: Row) -> str:
    """Says that a row's gradient is not that of the others."""
    return f"wrong: gradients differ by {row['gradient_error']:.1e}"


def failed(rows: Iterable[Row]) -> list[Row]:
    """Rows of cases that failed, were cut, or gave wrong numbers."""
    return [row for row in rows if row["kind"] != "skipped" and ("note" in row or row.get("right") is False)]


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Headings and cells as a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *lines))


def number(value: float | None) -> str:
    """Separators in large numbers, three digits of small ones, a dash for nothing."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def sweep_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings and cells of the rates of attention kernels: on trees, and of plain causal kernels on rows."""
    newest = {(row["flash"], row["tree"], row["kernel"]): row for row in rows if row["kind"] == "sweep"}
    lines = [
        [
            row["tree"],
            row["kernel"] + (f", {row['flash']}" if row["flash"] != "FA2" else ""),
            f"{row['tokens']:,}" + (f" in rows of {row['length']:,}" if "length" in row else ""),
            number(row.get("forward_tflops")),
            number(row.get("tflops")) if row.get("right", True) else "wrong",
        ]
        for row in newest.values()
    ]
    return ("tree", "attention", "tokens", "forward, TFLOP/s", "forward and backward, TFLOP/s"), lines


def memory_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings and cells of steps under budgets: memory above the model, predicted and measured."""
    newest = {(row["model"], row["rows"], row["engine"]): row for row in rows if row["kind"] == "memory"}
    lines = [
        [
            row["model"], row["rows"], row["engine"].removeprefix("tree, "), number(row.get("parts")),
            number(row.get("predicted_gb")), number(row.get("above_gb")), number(row.get("seconds")),
        ]
        for row in newest.values()
    ]  # fmt: skip
    return ("model", "rows", "budget", "parts", "predicted, GB", "measured, GB", "seconds"), lines


def tables(rows: Sequence[Row]) -> str:
    """All tables, machine by machine."""
    parts = []
    for machine in dict.fromkeys(row["machine"] for row in rows if "machine" in row):
        found = [row for row in rows if row.get("machine") == machine]
        made = [markdown(*each(found)) for each in (table, trainer_table, sweep_table, memory_table) if each(found)[1]]
        if made:
            last = found[-1]
            parts.append(f"**{machine}**, torch {last['torch']}, commit {last['commit']}, {last['date']}.")
            parts += made
    return "\n\n".join(parts)


def report(rows: Sequence[Row]) -> str:
    """The tables, and what failed."""
    parts, bad = [tables(rows)], failed(rows)
    which = ("phase", "case", "model", "rows", "engine", "kernel", "backend", "dtype", "tree", "note", "said")
    for row in bad:
        said = ", ".join(str(row[name]) for name in which if row.get(name) is not None)
        parts.append(f"{'wrong' if row.get('right') is False else 'failed'}: {row['kind']}, {said}")
    return "\n\n".join([part for part in parts if part] + [f"{len(rows)} rows, {len(bad)} failed, cut or wrong"])


if __name__ == "__main__":
    print(report(read(Path(sys.argv[1]))))
