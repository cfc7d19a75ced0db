"""Printing: one JSON object, or tables for people; remarks always on stderr."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """A console that wraps at the terminal's width, or at 160 columns if there is no terminal."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=160)


def print_json(data: dict[str, Any]) -> None:
    """Print one indented JSON object on stdout."""
    print(json.dumps(data, indent=2, default=str))


def print_notes(notes: Iterable[str]) -> None:
    """Print remarks on stderr, one line each."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values without a frame."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def tree_facts(report: Any) -> list[tuple[str, str]]:
    """Names and values about the tree in a report of `verify` or `bench`."""
    overlap = 1 - report.unique_tokens / max(report.flat_tokens, 1)
    tokens = f"{report.flat_tokens:,} flat, {report.unique_tokens:,} unique tokens, overlap {overlap:.3f}"
    return [
        ("rows", f"{report.trajectories:,}: {tokens}"),
        ("attention", report.attention),
        ("parts", f"{report.parts:,}, {report.recomputed_tokens:,} tokens run forward twice"),
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> Table:
    """A table whose first column is text and all others numbers."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made
