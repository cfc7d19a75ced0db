"""`treetrain verify`: are loss and gradients those of training on every row by itself?"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetrain.cli.common import Parser, at_least, console, pairs, print_json, sample, table, tree_facts

if TYPE_CHECKING:
    from treetrain.verification.verify import VerifyReport

SUMMARY = (
    "Loss and every parameter's gradient, tree against linear, on your model and a sample of your rows. Exit code 0 if "
    "they agree, 1 if not."
)
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B",
    "chats.jsonl --model tiny --view calls --sample 32 --dtype float64",
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --budget 2048",
)
FAILED = 1


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("verify", SUMMARY, EXAMPLES)
    parser.sample_options()
    dtypes = ["float32", "float64", "bfloat16"]
    parser.option("dtype", "Type of the weights and of the arithmetic.", "float32", choices=dtypes)
    text = "Largest relative error of the gradient; not given: 1e-5 in float32, 1e-6 in float64, measured in bfloat16."
    parser.option("tolerance", text, type=float)
    parser.option("worst", "How many parameters to list, those with the largest error first.", 10, type=at_least(0))
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, compare, print; 0 if tree and linear agree."""
    options = make_parser().parse_args(argv)
    from treetrain.verification.verify import verify

    model, rows = sample(options, options.dtype)
    how = {name: getattr(options, name) for name in ("temperature", "tolerance", "budget")}
    report = verify(model, rows, **how)
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report, options.worst)
    return 0 if report.passed else FAILED


def _print(report: "VerifyReport", count: int) -> None:
    out = console()
    worst = sorted(report.parameters, key=lambda parameter: -parameter.error)[:count]
    if worst:
        rows = [(parameter.name, f"{parameter.norm:.3e}", f"{parameter.error:.2e}") for parameter in worst]
        title = f"worst {len(rows)} of {len(report.parameters)} parameters"
        out.print(table(("parameter", "gradient norm", "relative error"), rows, title=title))
    own = "" if report.linear_error is None else f" (the linear run itself: {report.linear_error:.2e})"
    error = f"relative error {report.gradient_error:.2e}, allowed {report.tolerance:.2e} in {report.dtype}{own}"
    loss = f"tree {report.loss_tree:.9g}, linear {report.loss_linear:.9g}"
    out.print(pairs([*tree_facts(report), ("loss", loss), ("gradient", error)]))
    out.print(report.verdict, style="green" if report.passed else "red", markup=False, soft_wrap=True)
