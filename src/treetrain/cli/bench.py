"""`treetrain bench`: how much faster is the tree than the best linear baseline?"""

import dataclasses
from collections.abc import Sequence

from treetrain.cli.common import Parser, at_least, console, pairs, print_json, sample, table, tree_facts

SUMMARY = (
    "A training step as a tree against the best linear baseline, on your model and a sample of your rows: alternating "
    "in one process, medians. Efficiency is the speed-up over the FLOP-ideal one."
)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("bench", SUMMARY)
    parser.sample_options()
    text = "Measured rounds, in each of which every engine runs once; the median counts."
    parser.option("repeats", text, 5, type=at_least(1))
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, measure, print."""
    options = make_parser().parse_args(argv)
    from treetrain.check.bench import bench

    model, rows = sample(options)
    report = bench(model, rows, budget=options.budget, repeats=options.repeats)
    if options.json:
        print_json(dataclasses.asdict(report))
        return 0
    seconds = {"tree": report.tree_seconds} | dict(sorted(report.baselines.items(), key=lambda entry: entry[1]))
    cells = [(name, f"{one:.3f}", f"{one / report.tree_seconds:.2f}x") for name, one in seconds.items()]
    low, high = report.speedup_spread
    known = report.ideal is not None and report.efficiency is not None
    ideal = f"{report.ideal:.2f}x, so an efficiency of {report.efficiency:.2f}" if known else "not known for this model"
    speedup = f"{report.speedup:.2f}x ({low:.2f} to {high:.2f}) over the best baseline, {report.baseline}"
    out = console()
    out.print(table(("forward + backward", "seconds", "over the tree"), cells))
    merged = "no other row extends or repeats" if report.linear_rows < report.trajectories else "are given"
    rows = ("rows without a tree", f"{report.linear_rows:,}, those that {merged}")
    out.print(pairs([*tree_facts(report), rows, ("speed-up", speedup), ("FLOP-ideal", ideal)]))
    return 0
