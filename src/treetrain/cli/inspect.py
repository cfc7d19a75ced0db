"""`treetrain inspect`: how much the rows of a file share. Needs torch only where --model names a model."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treetrain.cli.options import Parser, at_least

if TYPE_CHECKING:
    from treetrain.cli.inputs import NamedShape, ReadRows
    from treetrain.planning.plan import Plan

SUMMARY = "How much the rows of a file share, where, and what computing every shared prefix once is worth."
EXAMPLES = (
    "rollouts.jsonl",
    "chats.jsonl.gz --tokenizer Qwen/Qwen3-0.6B --view calls --shape qwen3-8b",
    "chats.jsonl --model ./my-model --groups 20 --json",
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --budget 8GiB --device cuda",
    "rollouts.jsonl --model small --budget 4096 --calibrate",
)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("inspect", SUMMARY, EXAMPLES)
    parser.row_options()
    parser.budget_option()
    parser.shape_options()
    parser.option("groups", "How many of the largest groups to list.", 10, type=at_least(0))
    text = "Whose speeds the plan's prediction takes; with --calibrate the model is on the device that is there."
    parser.option("device", text, "cpu", choices=["cpu", "cuda"])
    text = "Load the model and measure, in a few seconds, what its passes cost here; needs --model and torch."
    parser.flag("calibrate", text)
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, measure, print."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.calibrate and options.model is None:
        parser.error("--calibrate measures a model; name it with --model")
    if options.calibrate and options.shape is not None:
        parser.error(f"--calibrate measures {options.model}; --shape {options.shape} names another; give one")
    from treetrain.cli.inputs import find_shape, read
    from treetrain.cli.output import print_json, print_notes

    shape = find_shape(options.model, options.shape)
    found = read(options)
    print_notes(found.notes)
    report = _report(options, found, shape)
    plan = _plan(options, found, shape) if options.calibrate or options.budget is not None else None
    if options.json:
        print_json(report | {"plan": None if plan is None else plan.explanation()})
    else:
        _print(report, shape, plan)
    return 0


def _plan(options: Namespace, found: "ReadRows", shape: "NamedShape") -> "Plan":
    """The plan of all rows as one batch."""
    from treetrain.planning.devices import Device
    from treetrain.planning.make import make_plan
    from treetrain.planning.price import CostModel
    from treetrain.tree.build import build_tree

    if options.calibrate:
        from treetrain.cli.inputs import best_device_model
        from treetrain.engine.calibrate import measured_cost

        assert options.model is not None
        cost = measured_cost(best_device_model(options.model))
    else:
        cost = CostModel.on(Device.of_kind(options.device, 4), shape.counts)
    return make_plan(build_tree(found.rows), cost, budget=options.budget)


def _report(options: Namespace, found: "ReadRows", shape: "NamedShape") -> dict[str, Any]:
    from treetrain.data.diagnosis import diagnose_prefixes
    from treetrain.tree.build import build_tree
    from treetrain.tree.stats import tree_stats

    members: dict[Any, list[Any]] = {}
    for row in found.rows:
        if row.group is not None:
            members.setdefault(row.group, []).append(row)
    groups = [(str(name), tree_stats(build_tree(rows), shape.counts)) for name, rows in members.items()]
    flat, unique = (sum(getattr(stats, name) for _, stats in groups) for name in ("flat", "unique"))
    summary = {
        "count": len(groups),
        "trajectories": sum(stats.trajectories for _, stats in groups),
        "flat": flat,
        "unique": unique,
        "overlap": 1 - unique / flat if flat else 0.0,
        "token_speedup": flat / unique if unique else 1.0,
        "largest": [
            {"group": name, **dataclasses.asdict(stats)}
            for name, stats in sorted(groups, key=lambda group: -group[1].flat)[: options.groups]
        ],
    }
    calls = found.format == "chat" and options.view == "calls"
    prefixes = diagnose_prefixes(found.rows, found.tokenizer) if calls else None
    return {
        "files": list(options.files),
        "format": found.format,
        "view": options.view if found.format == "chat" else None,
        "shape": {"name": shape.name, "assumed": shape.assumed},
        "file": dataclasses.asdict(tree_stats(build_tree(found.rows), shape.counts)),
        "groups": summary if groups else None,
        "prefixes": prefixes
        and {name: getattr(prefixes, name) for name in ("calls", "successive", "broken")}
        | {"explanation": prefixes.explain()},
        "notes": list(found.notes),
    }


def _print(report: dict[str, Any], shape: "NamedShape", plan: "Plan | None") -> None:
    from treetrain.cli.output import console, pairs, table

    out, file, groups = console(), report["file"], report["groups"]
    rows = [
        ("trajectories", f"{file['trajectories']:,} in {file['trees']:,} trees, {file['duplicates']:,} exact repeats"),
        ("flat tokens", f"{file['flat']:,}"),
        ("unique tokens", f"{file['unique']:,}"),
        ("overlap", f"{file['overlap']:.3f}"),
        ("token-ideal speed-up", f"{file['token_speedup']:.2f}x"),
        ("FLOP-ideal speed-up", f"{file['flop_speedup']:.2f}x on the shape {shape.words}"),
    ]
    if file["duplicates"]:
        rows.append(("  without repeats", f"{file['flop_speedup_dedup']:.2f}x against rows without exact repeats"))
    rows += [
        ("longest path", f"{file['longest_path']:,} tokens"),
        ("forks", f"{file['forks']:,}, up to {file['max_out_degree']} ways, {file['max_forks_on_path']} on a path"),
        ("segments, leaves", f"{file['segments']:,}, {file['leaves']:,}"),
        ("trained tokens", f"{file['trained_flat']:,} flat, {file['trained_unique']:,} unique"),
        ("sharing saves", f"{file['saved_context']:,} context and {file['saved_trained']:,} trained tokens"),
    ]
    if groups:
        within = f"{groups['overlap']:.3f} ({groups['token_speedup']:.2f}x tokens) over {groups['count']:,} groups"
        rows.append(("overlap within groups", within))
    out.print(pairs(rows))
    if groups:
        forms = {
            "group": ("group", "{}"),
            "rows": ("trajectories", "{:,}"),
            "flat": ("flat", "{:,}"),
            "unique": ("unique", "{:,}"),
            "overlap": ("overlap", "{:.3f}"),
            "tokens": ("token_speedup", "{:.2f}x"),
            "FLOPs": ("flop_speedup", "{:.2f}x"),
            "longest": ("longest_path", "{:,}"),
            "forks": ("forks", "{:,}"),
        }
        cells = [[form.format(group[name]) for name, form in forms.values()] for group in groups["largest"]]
        out.print(table(list(forms), cells, title=f"largest {len(cells)} of {groups['count']} groups"))
    if report["prefixes"]:
        out.print("\n" + report["prefixes"]["explanation"], markup=False)
    if plan is not None:
        told = f"\nthe file as one batch, on the shape {shape.words}:\n\n{plan.explain()}"
        out.print(told, markup=False, soft_wrap=True)
