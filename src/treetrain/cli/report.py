"""`treetrain report`: a run's folder as one HTML page, or two runs beside each other."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from treetrain.cli.parse import parse

SUMMARY = "Write one self-contained HTML page of a run, finished or not, or of two runs beside each other."
EXAMPLES = (
    "out",
    "out --output page.html",
    "runs/tree --compare runs/linear",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What to show, and where to."""

    folder: Annotated[str, tyro.conf.arg(metavar="FOLDER"), tyro.conf.Positional]
    """Output folder of a run of `treetrain train`."""
    compare: str | None = None
    """Folder of a second run to judge it by, e.g. of the same run with --execution linear."""
    output: str | None = None
    """The file to write; report.html, or comparison.html, in the run's folder if not given."""
    json: bool = False
    """Print where the page is, the run's state and a comparison's figures as one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Parse, read, write the page."""
    options = parse(ReportOptions, argv, command="report", summary=SUMMARY, examples=EXAMPLES)
    from treetrain.report.compare import Comparison
    from treetrain.report.page import COMPARISON_FILE, PAGE_FILE, comparison_page, run_page, write_page
    from treetrain.report.records import read_run

    run = read_run(options.folder)
    pair = None if options.compare is None else Comparison(run, read_run(options.compare))
    text = run_page(run) if pair is None else comparison_page(pair)
    default = Path(options.folder) / (PAGE_FILE if pair is None else COMPARISON_FILE)
    path = write_page(text, Path(options.output or default))
    if options.json:
        from treetrain.cli.output import print_json

        figures = {} if pair is None else {"comparison": pair.as_dict()}
        print_json({"page": str(path), "state": run.state(), "step": run.step, **figures})
    else:
        print(f"{path}: {run.name}, {run.state()}, {run.step:,} steps")
    return 0
