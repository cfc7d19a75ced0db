"""`treetrain bench`: how much faster is the tree than the best linear baseline?"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetrain.cli.common import Parser, at_least, console, pairs, print_json, sample, table, tree_facts

if TYPE_CHECKING:
    from treetrain.verification.bench import BenchReport

SUMMARY = (
    "A training step as a tree against the best linear baseline, on your model and a sample of your rows: alternating "
    "in one process, medians. Efficiency is the speed-up over the FLOP-ideal one."
)
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B",
    "chats.jsonl --model small --view calls --sample 64 --repeats 7 --json",
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --budget 4096",
)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("bench", SUMMARY, EXAMPLES)
    parser.sample_options()
    text = "Measured rounds, in each of which every engine runs once; the median counts."
    parser.option("repeats", text, 5, type=at_least(1))
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, measure, print."""
    options = make_parser().parse_args(argv)
    from treetrain.verification.bench import bench

    model, rows = sample(options)
    how = {name: getattr(options, name) for name in ("budget", "temperature", "repeats")}
    with console(stderr=True).status("loading") as status:
        report = bench(model, rows, progress=status.update, **how)
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report)
    return 0


def _print(report: "BenchReport") -> None:
    out = console()
    rows = [("tree", f"{report.tree_seconds:.3f}", "")]
    for name, seconds in sorted(report.baselines.items(), key=lambda entry: entry[1]):
        rows.append((name, f"{seconds:.3f}", f"{seconds / report.tree_seconds:.2f}x"))
    out.print(table(("forward + backward", "seconds", "over the tree"), rows))
    low, high = report.speedup_spread
    known = report.ideal is not None and report.efficiency is not None
    ideal = f"{report.ideal:.2f}x, so an efficiency of {report.efficiency:.2f}" if known else "not known for this model"
    speedup = f"{report.speedup:.2f}x ({low:.2f} to {high:.2f}) over the best baseline, {report.baseline}"
    out.print(pairs([*tree_facts(report), ("speed-up", speedup), ("FLOP-ideal", ideal)]))
