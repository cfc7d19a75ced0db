"""`treetrain page`: the logs of a run, beside those of the same training without shared prefixes, as a page."""

from collections.abc import Sequence
from pathlib import Path

from treetrain.cli.common import Parser, console

SUMMARY = (
    "One self-contained page about a run: losses, evaluations, speed, memory and all other logs, by step; with "
    "a second run, such as the same one with --execution linear, both on each other. Its figures are written beside it "
    "as one picture, PNG and SVG."
)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("page", SUMMARY)
    parser.add_argument("run", metavar="RUN", help="Output folder of a training run; it holds trainer_state.json.")
    text = "Output folder of the same training without shared prefixes."
    parser.add_argument("linear", metavar="LINEAR", nargs="?", help=text)
    parser.option("html", "The file to write. Not given: run.html in the folder RUN.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, read both folders, write the page and its pictures."""
    options = make_parser().parse_args(argv)
    from treetrain.trainers.run_page import write_page, write_picture

    both = options.run, options.linear
    page = Path(options.html or Path(options.run, "run.html"))
    written = [write_page(*both, page), *(write_picture(*both, page.with_suffix(end)) for end in (".png", ".svg"))]
    console().print(
        f"the page is {written[0]}, its figures are {written[1]} and {written[2]}", markup=False, soft_wrap=True
    )
    return 0
