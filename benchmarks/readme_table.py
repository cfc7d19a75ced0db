"""Writes the README's table of measured results from the rows in benchmarks/results.

Run: python benchmarks/readme_table.py [--check]. What stands between the two marks in README.md is replaced; with
--check nothing is written and the exit code is 1 where it is not up to date.
"""

import argparse
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
BEGIN, END = "<!-- measured: begin (benchmarks/readme_table.py) -->", "<!-- measured: end -->"
NOTHING = "No rows are there yet; `make bench` measures them."
WORK = {
    "tau_airline_calls": "tool agent, four trials of one task, one row per LLM call",
    "tot_game24": "search trees of six puzzles, short and bushy",
    "codet_humaneval": "200 sampled answers to two prompts",
    "unrelated": "one answer to each of 164 prompts (control)",
}
Row = dict[str, str]


def main() -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description="The README's table of measured results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if out of date")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    updated = replaced(text, generated(RESULTS))
    if updated != text and not check:
        README.write_text(updated, encoding="utf-8")
    if updated != text and check:
        print("README.md is not up to date: run python benchmarks/readme_table.py")
    return int(check and updated != text)


def replaced(text: str, section: str) -> str:
    """The text with `section` between the marks.

    Raises:
        ValueError: the marks are not there exactly once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def generated(results: Path) -> str:
    """Everything between the marks."""
    efficiency = latest(results / "cpu_efficiency.csv", "workload")
    parts = [efficiency_section(efficiency)] if efficiency else [NOTHING]
    attention = latest(results / "attention_cost.csv", "tree")
    if attention:
        parts.append(attention_section(attention))
    return "\n\n".join(parts)


def latest(path: Path, key: str) -> list[Row]:
    """The last row of every value of a column, in the order of first appearance; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(key)]
    return list({row[key]: row for row in rows}.values())


def efficiency_section(rows: list[Row]) -> str:
    """Step times of tree and best linear baseline."""
    table = [
        "| work | tokens: rows → tree | FLOP-ideal | measured | efficiency | peak MB: linear → tree |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        tokens = f"{thousands(row, 'flat_tokens')} → {thousands(row, 'unique_tokens')}"
        memory = " → ".join(thousands(row, name) for name in ("linear_peak_mb", "tree_peak_mb"))
        if not row.get("tree_peak_mb"):
            memory = "not measured"
        work = WORK.get(row["workload"], row["workload"])
        cells = (work, tokens, times(row, "ideal"), measured(row), f"**{number(row, 'efficiency')}**", memory)
        table.append(f"| {' | '.join(cells)} |")
    notes = [f"Measured {provenance(rows)}. Efficiency is the measured speed-up over the FLOP-ideal one."]
    for row in rows:
        if row.get("distinct_speedup"):
            notes.append(
                f"{WORK.get(row['workload'], row['workload']).capitalize()}: rows repeat exactly; against a baseline "
                f"that drops the repeats {times(row, 'distinct_speedup')} of {times(row, 'distinct_ideal')}."
            )
    return "\n".join(table) + "\n\n" + "\n".join(notes)


def measured(row: Row) -> str:
    """Speed-up with both times and the baseline's name."""
    seconds = f"{number(row, 'linear_seconds')} s → {number(row, 'tree_seconds')} s"
    return f"{times(row, 'speedup')} ({seconds}, against {row.get('baseline') or 'linear'})"


def attention_section(rows: list[Row]) -> str:
    """Tree attention against one causal call."""
    table = [
        "| tree | tokens | attention on the tree / causal attention over as many tokens |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        ratio = f"{number(row, 'ratio')} ({number(row, 'tree_ms')} / {number(row, 'causal_ms')} ms)"
        table.append(f"| {row['tree']} | {thousands(row, 'tokens')} | {ratio} |")
    return "\n".join(table) + f"\n\nForward plus backward of one layer, measured {provenance(rows)}."


def provenance(rows: list[Row]) -> str:
    """Date, commit, machine and versions, each named once; where rows differ, all of them."""
    names = ("date", "machine", "torch", "commit")
    found = {name: ", ".join(sorted({row[name] for row in rows if row.get(name)})) or "unknown" for name in names}
    return f"on {found['date']} at commit {found['commit']} on {found['machine']}, torch {found['torch']}, float32"


def number(row: Row, name: str) -> str:
    """Two decimals below a hundred; a dash where there is none."""
    try:
        value = float(row.get(name) or "")
    except ValueError:
        return "–"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def times(row: Row, name: str) -> str:
    """As a factor."""
    shown = number(row, name)
    return shown if shown == "–" else f"{shown}x"


def thousands(row: Row, name: str) -> str:
    """A count with separators."""
    try:
        return f"{float(row.get(name) or ''):,.0f}"
    except ValueError:
        return "–"


if __name__ == "__main__":
    sys.exit(main())
