"""`treetrain inspect`: how much the rows of a file share. Needs torch only where --model names a model."""

import contextlib
import dataclasses
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetrain.cli.common import (
    Parser,
    at_least,
    best_device_model,
    console,
    find_shape,
    pairs,
    print_json,
    print_notes,
    printable,
    read,
)
from treetrain.core.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from treetrain.core.planning.plan import Plan
    from treetrain.logs.inspection.report import Inspection

SUMMARY = "How much the rows of a file share, where, and what computing every shared prefix once is worth."
NOTHING_TRAINED = 1
"""The exit code where no token of the rows has a loss weight."""
EVERY = 10
"""Seconds between lines of progress where there is no terminal."""
COLUMNS, WIDEST = 80, 120
"""Columns of the report where there is no terminal, and at most."""
COMPARED = 50
"""Conversations that are read again to compare calls with transcripts."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("inspect", SUMMARY)
    parser.row_options()
    text = "key: read conversations with images, and keep rows with different images apart."
    parser.option("images", text, "refuse", choices=["refuse", "key"])
    parser.budget_option()
    text = "Hub id, local folder or preset (tiny, small): gives tokenizer, vocabulary check and model shape."
    parser.option("model", text)
    text = "Model shape by name, e.g. qwen3-0.6b, qwen3-8b, llama-3.1-8b; qwen3-8b if none is known."
    parser.option("shape", text)
    text = "Whose speeds the plan's prediction takes; with --calibrate the model is on the device that is there."
    parser.option("device", text, "cpu", choices=["cpu", "cuda"])
    text = "Load the model and measure, in a few seconds, what its passes cost here; needs --model and torch."
    parser.flag("calibrate", text)
    parser.option("html", "Write a page to this file: the figures, the tree to look into, histograms, the plan.")
    text = "Print row N as it is trained, and nothing else: its text with trained parts marked, and what was dropped."
    parser.option("show", text, type=at_least(1), metavar="N")
    text = "Rows of your batches (all accumulation steps of one process): how much sharing is left within them. Not "
    text += "given: the steps of treetrain train, whole groups."
    parser.option("batch_size", text, type=at_least(1))
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, measure, print."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.calibrate and (options.model is None or options.shape is not None):
        parser.error("--calibrate measures a model; name it with --model, and give no --shape")
    if options.show is not None:
        return _show(options)
    from treetrain.logs.inspection.report import inspect_rows
    from treetrain.logs.inspection.sample import Sampler

    shape = find_shape(options.model, options.shape)
    out = console(stderr=True)
    with out.status("reading") as status:
        sampler = Sampler(progress=Progress(options.files, status.update if out.is_terminal else None))
        found = read(options, collect=sampler)
    rows, notes = found.rows, found.notes
    if sampler.share < 1:
        notes += (
            f"not all rows are kept in memory. The figures are of a sample: {len(rows):,} rows, {sampler.share:.2%} of "
            "the groups, each whole. Rows outside the sample were read but not checked",
        )
    print_notes(notes)
    measured = inspect_rows(rows, shape, view=found.view, tokenizer=found.tokenizer, batch_size=options.batch_size)
    inspection = dataclasses.replace(
        measured,
        files=tuple(options.files),
        format=found.format,
        notes=notes,
        remarks=sampler.remarks,
        transcripts=_transcripts(options, measured),
        sampled=sampler.share,
        plan=_plan(options, measured) if options.calibrate or options.budget is not None else None,
    )
    if options.html is not None:
        from treetrain.logs.inspection.page import write_page

        print_notes([f"the page is {write_page(inspection, options.html)}"])
    if options.json:
        print_json(inspection.as_dict())
    else:
        _print(inspection)
    return 0 if measured.stats.trained_flat else NOTHING_TRAINED


def _show(options: Namespace) -> int:
    """Print one row; trained text has a colour on a terminal, and brackets elsewhere."""
    from rich.text import Text

    from treetrain.logs.inspection.one_row import OneRow, facts_of, notes_on, runs_of, without_folders

    found = read(options, collect=OneRow(options.show))
    (row,) = found.rows
    runs, trained = runs_of(row, found.tokenizer), int((row.weights != 0).sum())
    facts, notes = facts_of(row), [*found.notes, *notes_on(row)]
    if options.json:
        pieces = [{"text": text, "weight": weight} for text, weight in runs]
        facts |= {"format": found.format, "tokens": len(row), "trained": trained}
        print_json(facts | {"pieces": pieces, "notes": notes})
        return 0 if trained else NOTHING_TRAINED
    out, shown = console(), Text()
    out.width = min(out.width, WIDEST) if out.is_terminal else COLUMNS
    for text, weight in runs:
        text = "".join(word if word.isprintable() or word in "\n\t" else "\N{REPLACEMENT CHARACTER}" for word in text)
        text = text if weight == 0 or out.is_terminal else f"⟦{text}⟧"
        shown.append(text, "bold dark_orange" if weight else "")
        if weight not in (0, 1):
            shown.append(f"(weight {weight:g})", "dim")
    marked = "in colour" if out.is_terminal else "in ⟦ ⟧"
    head = f"row {options.show}, read as {found.format}: {len(row):,} tokens, {trained:,} trained ({marked})"
    described = ", ".join(f"{name} {without_folders(value)}" for name, value in facts.items())
    _print_wrapped(out, head)
    _print_wrapped(out, described)
    out.print()
    out.print(shown, soft_wrap=True, end="\n" if shown.plain.endswith("\n") else "\n\n")
    for note in notes:
        _print_wrapped(out, f"note: {note}")
    if not trained:
        out.print("Nothing of this row is trained.", markup=False)
    return 0 if trained else NOTHING_TRAINED


class Progress:
    """Says how many rows are read, which share of the files that is, and how long the rest takes.

    Args:
        files: files and folders.
        show: shows a text in place of the one before; None prints a line on stderr every ten seconds.
    """

    def __init__(self, files: Sequence[str], show: Callable[[str], None] | None) -> None:
        self.show, self.start = show, time.monotonic()
        self.next = self.start if show else self.start + EVERY
        found = [one for file in files for one in (sorted(Path(file).rglob("*")) if Path(file).is_dir() else [file])]
        self.sizes = {os.path.realpath(one): os.path.getsize(one) for one in found if os.path.isfile(one)}

    def __call__(self, rows: int) -> None:
        """Called with the number of rows so far."""
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (0.2 if self.show else EVERY)
        share, seconds = self.share(), now - self.start
        left = f", {share:.0%}, about {seconds / share - seconds:,.0f} s left" if share and seconds > 1 else ""
        (self.show or (lambda text: print(text, file=sys.stderr, flush=True)))(f"reading: {rows:,} rows{left}")

    def share(self) -> float:
        """The share of the files' bytes that is read; 0 where the system does not say, as outside Linux."""
        paths, best = list(self.sizes), 0
        for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fdinfo") else []:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                path = os.path.realpath(f"/proc/self/fd/{number}")
                if path in self.sizes:
                    place = int(Path(f"/proc/self/fdinfo/{number}").read_text().split()[1])
                    best = max(best, sum(self.sizes[one] for one in paths[: paths.index(path)]) + place)
        return min(best / max(sum(self.sizes.values()), 1), 1.0)


def _transcripts(options: Namespace, measured: "Inspection") -> float:
    """FLOPs of the first conversations as transcripts / as calls, each row by itself; 1 where that is not asked."""
    if measured.view != "calls" or not measured.diagnosis.broken:
        return 1.0
    from treetrain.logs.inspection.report import linear_flops

    def flops(view: str) -> float:
        again = Namespace(**vars(options) | {"view": view, "on_error": "stop"})
        return linear_flops(read(again, limit=COMPARED).rows, measured.shape.counts)

    try:
        return flops("transcript") / flops("calls")
    except DataError:  # a template that cannot write whole conversations
        return 1.0


def _plan(options: Namespace, inspection: "Inspection") -> "Plan":
    """The plan of all rows as one batch."""
    from treetrain.core.planning.cost import CostModel
    from treetrain.core.planning.devices import Device
    from treetrain.shapes import make_plan

    if options.calibrate:
        from treetrain.check.bench import measured_cost

        cost = measured_cost(best_device_model(options.model))
    else:
        cost = CostModel.on(Device.of_kind(options.device, 4), inspection.shape.counts)
    return make_plan(inspection.tree, cost, budget=options.budget)


def _print(inspection: "Inspection") -> None:
    out, file = console(), inspection.stats
    out.width = min(out.width, WIDEST) if out.is_terminal else COLUMNS
    rows = [
        (
            "trajectories",
            f"{file.trajectories:,} in {file.trees:,} tree{'s' * (file.trees != 1)}, {file.duplicates:,} exact repeats",
        ),
        ("flat tokens", f"{file.flat:,}"),
        ("unique tokens", f"{file.unique:,}"),
        ("overlap", f"{file.overlap:.3f}"),
        ("token-ideal speed-up", f"{file.token_speedup:.2f}x"),
        ("FLOP-ideal speed-up", f"{file.flop_speedup:.2f}x on the shape {inspection.shape.words}"),
    ]
    way, cheapest = inspection.baseline()
    if cheapest < 1:
        rows.append(("  over the cheapest", f"{(file.flop_speedup or 1.0) * cheapest:.2f}x against {way}"))
    if inspection.batches:
        title, speeds = inspection.batch_words()
        rows.append((f"  {title}", ", ".join(f"{speed}x {order}" for order, speed in speeds.items())))
    again = f'{inspection.trained_again:,} repeat what an earlier row trains; count="once" trains each once'
    rows += [
        ("longest path", f"{file.longest_path:,} tokens"),
        ("forks", f"{file.forks:,}, up to {file.max_out_degree} ways"),
        ("segments, leaves", f"{file.segments:,}, {file.leaves:,}"),
        ("trained tokens", f"{file.trained_flat:,} flat, {file.trained_unique:,} unique"),
        *([("  trained again", again)] if inspection.trained_again else []),
        ("sharing saves", f"{file.saved_context:,} context and {file.saved_trained:,} trained tokens"),
    ]
    out.print(pairs(rows))
    if inspection.stats.unique:
        out.print(_picture(inspection))
    _print_wrapped(out, f"\nwhy not more: {inspection.diagnosis.explain()}")
    if inspection.plan is not None:
        plan = inspection.plan.explain()
        _print_wrapped(out, f"\nthe file as one batch, on the shape {inspection.shape.words}:\n\n{plan}")
    _print_wrapped(out, f"\n{inspection.verdict()}")


def _print_wrapped(out: "Console", text: str) -> None:
    """Print lines, each wrapped with its own indentation."""
    from rich.text import Text

    for line in printable(text).split("\n"):
        words = line.lstrip(" ")
        indent = len(line) - len(words)
        for part in Text(words).wrap(out, out.width - indent) or [Text()]:
            out.print(" " * indent + part.plain.rstrip(), markup=False, soft_wrap=True)


def _picture(inspection: "Inspection") -> "Text":
    """The tree in a few lines; see `inspection.picture`."""
    from rich.text import Text

    from treetrain.logs.inspection.picture import MARKS, draw

    picture = draw(inspection.tree, blocks=inspection.tree.num_tokens)
    colours = {"context": "blue", "trained": "dark_orange", "": ""}
    own, shared = (f"{MARKS['context'][many]} context, {MARKS['trained'][many]} trained" for many in (0, 1))
    sampled = "a sample: " if inspection.sampled < 1 else ""
    found = Text(f"\n{sampled}{picture.headline()}\n", no_wrap=True)
    for line in picture.lines(72, 14):
        found.append("  ").append_text(Text.assemble(*((mark, colours[kind]) for mark, kind in line))).append("\n")
    return found.append(f"  {shared} of several trajectories; {own} of one")
