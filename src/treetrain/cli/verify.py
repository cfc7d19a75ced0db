"""`treetrain verify`: are loss and gradients those of training on every row by itself?"""

import dataclasses
import logging
from collections.abc import Sequence

from treetrain.cli.common import Parser, console, pairs, print_json, sample, table, tree_facts

SUMMARY = (
    "Loss and every parameter's gradient, tree against linear, on your model and a sample of your rows. Exit code 0 if "
    "they agree, 1 if not."
)
FAILED = 1
WORST = 5
"""Parameters that are listed, those with the largest error first."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("verify", SUMMARY)
    parser.sample_options()
    dtypes = ["float32", "float64", "bfloat16"]
    parser.option("dtype", "Type of the weights and of the arithmetic.", "float32", choices=dtypes)
    parser.flag("all", "Compare gradients element by element: holds those of all runs, two or three times the weights.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, compare, print; 0 if tree and linear agree."""
    options = make_parser().parse_args(argv)
    from treetrain.check.verify import logger, verify

    logger.setLevel(logging.INFO)
    logger.handlers = [logging.StreamHandler()]  # says how far it is where it takes long

    model, rows = sample(options, options.dtype)
    report = verify(model, rows, budget=options.budget, all_gradients=options.all)
    if options.json:
        print_json(dataclasses.asdict(report))
        return 0 if report.passed else FAILED
    out, worst = console(), report.parameters[:WORST]
    cells = [(parameter.name, f"{parameter.norm:.3e}", f"{parameter.error:.2e}") for parameter in worst]
    title = f"worst {len(worst)} of {len(report.parameters)} parameters"
    out.print(table(("parameter", "gradient norm", "relative error"), cells, title=title))
    loss = f"tree {report.loss_tree:.9g}, linear {report.loss_linear:.9g}"
    out.print(pairs([*tree_facts(report), ("dtype", report.dtype), ("loss", loss)]))
    out.print(report.verdict, style="green" if report.passed else "red", markup=False, soft_wrap=True)
    return 0 if report.passed else FAILED
