"""`treetrain simulate`: what a step of a file would take on many ranks, predicted. Needs torch only for --model."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treetrain.cli.common import Parser, at_least, console, find_shape, pairs, print_json, print_notes, read, table

if TYPE_CHECKING:
    from treetrain.inspection.report import Shape
    from treetrain.planning.devices import Device

SUMMARY = "What one training step over a file would take on many ranks: balance, time and memory, predicted."
EXAMPLES = (
    "rollouts.jsonl --shape qwen3-8b --ranks 8 16 64",
    "chats.jsonl --model ./my-model --view calls --ranks 8 --device-description a100",
    "rollouts.jsonl --shape qwen3-32b --ranks 64 256 1024 --device-description my-cluster.toml --checkpointing",
    "rollouts.jsonl --shape qwen3-0.6b --ranks 2 4 --device-description cpu --parallel ddp --budget 8192 --json",
)
MOST_RANKS = 65_536


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("simulate", SUMMARY, EXAMPLES)
    parser.row_options()
    parser.budget_option()
    parser.shape_options()
    parser.option("ranks", "Numbers of ranks to try.", [8, 16, 32, 64], type=at_least(1), nargs="+")
    text = "A rank's device: a100, h100, h200, cpu, or a JSON or TOML file of figures (docs/distributed.md)."
    parser.option("device_description", text, "h100")
    text = "Weights, gradients and moments in shards, or whole on every rank."
    parser.option("parallel", text, "fsdp", choices=["fsdp", "ddp"])
    text = "FSDP: gradients are reduced after every part, or once per step."
    parser.option("sync", text, "part", choices=["part", "step"])
    parser.flag("checkpointing", "Every layer keeps its input alone and is run again in backward.")
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, simulate, print."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if max(options.ranks) > MOST_RANKS:
        parser.error(f"--ranks is {max(options.ranks)}; give at most {MOST_RANKS}")
    from treetrain.planning.devices import find_device
    from treetrain.planning.simulate import simulate
    from treetrain.tree.build import build_tree

    device = find_device(options.device_description)
    shape = find_shape(options.model, options.shape, dtype_bytes=device.dtype_bytes)
    found_rows = read(options)
    print_notes(found_rows.notes)
    tree = build_tree(found_rows.rows)
    if not tree.trained_edges()[1].any():
        raise ValueError(f"{', '.join(options.files)}: no token is trained, so there is nothing to simulate")
    own: dict[str, Any] = {name: getattr(options, name) for name in ("parallel", "sync", "checkpointing")}
    found: list[Any] = []
    for count in sorted(set(options.ranks)):
        try:
            found.append(simulate(tree, shape.counts, count, device, budget=options.budget, **own))
        except ValueError as error:  # so many ranks cannot share this batch
            found.append({"ranks": count, "refused": str(error)})
    batch = {
        "trajectories": tree.num_trajectories,
        "flat_tokens": tree.num_flat_tokens,
        "unique_tokens": tree.num_tokens,
    }
    if options.json:
        print_json(
            {
                "files": list(options.files),
                "batch": batch,
                "shape": {"name": shape.name, "assumed": shape.assumed, "parameters": shape.counts.parameters},
                "device": dataclasses.asdict(device),
                "ranks": [row if isinstance(row, dict) else dataclasses.asdict(row) for row in found],
                "notes": list(found_rows.notes),
            }
        )
    else:
        _print(options, batch, shape, device, found)
    return 0


def _print(options: Namespace, batch: dict[str, int], shape: "Shape", device: "Device", found: list[Any]) -> None:
    out = console()
    sync = f", gradients reduced once per {options.sync}" * (options.parallel == "fsdp")
    tokens = f"{batch['flat_tokens']:,} flat tokens, {batch['unique_tokens']:,} unique"
    facts = [
        ("batch", f"{batch['trajectories']:,} trajectories, {tokens}"),
        ("shape", f"{shape.words}, {shape.counts.parameters / 1e9:.2f} billion parameters"),
        ("device", f"{device.name}, {device.flops * device.efficiency / 1e12:,.3g} TFLOP/s reached"),
        ("parallel", options.parallel + sync),
    ]
    out.print(pairs(facts))
    names = ["ranks", "slowest/mean", "duplicated", "work", "waiting", "links", "step", "speed-up", "memory", "passes"]
    rows = []
    for row in found:
        if isinstance(row, dict):
            continue
        memory = f"{row.peak_bytes / 1e9:,.3g} of {device.memory_bytes / 1e9:,.0f} GB" + ": too much" * (not row.fits)
        seconds = f"{row.waiting_seconds:.2g} s", f"{row.communication_seconds:.2g} s", f"{row.step_seconds:.3g} s"
        balance = f"{row.imbalance:.3f}", f"{row.duplicated:.1%}", f"{row.slowest_rank_seconds:.3g} s"
        rows.append((f"{row.ranks:,}", *balance, *seconds, f"{row.speedup:.2f}x", memory, f"{row.passes:,}"))
    if rows:
        out.print(table(names, rows, title="one training step, predicted"))
    for row in found:
        if isinstance(row, dict):
            out.print(f"{row['ranks']:,} ranks: {row['refused']}", markup=False, soft_wrap=True)
        elif row.idle_ranks:
            out.print(f"{row.ranks:,} ranks: {row.idle_ranks:,} have nothing to compute", markup=False, soft_wrap=True)
