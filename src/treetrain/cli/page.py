"""`treetrain page`: the logs of a run, beside those of the same training without shared prefixes, as an HTML page."""

from collections.abc import Sequence

from treetrain.cli.common import Parser, console

SUMMARY = (
    "One self-contained page about a run: losses, evaluations, speed, memory and all other logs, by step; with "
    "a second run, such as the same one with --execution linear, both on each other."
)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("page", SUMMARY)
    parser.add_argument("run", metavar="RUN", help="Output folder of a training run; it holds trainer_state.json.")
    text = "Output folder of the same training without shared prefixes."
    parser.add_argument("linear", metavar="LINEAR", nargs="?", help=text)
    parser.option("html", "The file to write.", "run.html")
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, read both folders, write the page."""
    options = make_parser().parse_args(argv)
    from treetrain.trainers.run_page import write_page

    console().print(
        f"the page is {write_page(options.run, options.linear, options.html)}", markup=False, soft_wrap=True
    )
    return 0
