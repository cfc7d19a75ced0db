"""`treetrain simulate`: what a step of a file would take on many ranks, predicted. Counting a model needs torch."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetrain.cli.common import Parser, at_least, console, find_shape, pairs, print_json, print_notes, read, table
from treetrain.core.errors import nearest
from treetrain.simulation.launch import in_trainers

if TYPE_CHECKING:
    from treetrain.core.planning.devices import Device
    from treetrain.simulation.simulate import Refused, Simulation
    from treetrain.simulation.splits import Split

SUMMARY = "How to split a model and a file's rows over many ranks: time, parts, links and memory of a step, predicted."
MOST_RANKS = 65_536
SHOWN = 12
"""Splits in the table."""
HUB_IDS = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}
"""Where the tokenizer of a named shape is, if not under its name at Qwen (Qwen/Qwen3-8B)."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("simulate", SUMMARY)
    parser.row_options()
    parser.budget_option()
    text = "A shape by name (qwen3-0.6b to qwen3-235b-a22b, llama-3.1-8b), or a hub id, local folder or preset; chats "
    text += "are read with its tokenizer."
    parser.option("model", text, "qwen3-8b")
    parser.option("ranks", "Number of ranks, one GPU or process each.", 8, type=at_least(1))
    parser.option("device", "h100, h200, a100, cpu, or a TOML file of figures (docs/distributed.md).", "h100")
    parser.option(
        "nodes", "Nodes with equal ranks. Not given: as the device's node_ranks, 8 for GPUs.", type=at_least(1)
    )
    for name, what in (
        ("context", "share the tokens of every part"),
        ("tensor", "share every weight (transformers' tp_plan)"),
        ("expert", "share the experts"),
    ):
        parser.option(name, f"Ranks that {what}. Not given: all sizes that fit are tried.", type=at_least(1))
    parser.flag("checkpointing", "Every layer keeps its input alone and is run again in backward.")
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, simulate, print."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.ranks > MOST_RANKS:
        parser.error(f"--ranks is {options.ranks}; give at most {MOST_RANKS}")
    from treetrain.core.tree.token_tree import build_tree
    from treetrain.models.work import cheapest_rows
    from treetrain.shapes import ModelShape
    from treetrain.simulation.device_files import find_device
    from treetrain.simulation.launch import launch_of
    from treetrain.simulation.simulate import Simulation, simulate
    from treetrain.simulation.splits import splits_of
    from treetrain.simulation.verdict import verdict

    device = find_device(options.device)
    if options.nodes is not None:
        if options.ranks % options.nodes:
            raise ValueError(f"--ranks {options.ranks} cannot be spread evenly over --nodes {options.nodes}")
        device = dataclasses.replace(device, node_ranks=options.ranks // options.nodes)
    name, hub_id = options.model, None
    if name.lower() in ModelShape.names():
        options.model, hub_id = None, HUB_IDS.get(name.lower(), f"Qwen/{name.title()}")
    elif not Path(name).exists() and (found := nearest(name, ModelShape.names())).startswith("did"):
        raise ValueError(f"--model {name} is no shape and no folder; {found}")
    shape = find_shape(options.model, None if options.model else name, dtype_bytes=device.dtype_bytes)
    counts = shape.counts.checkpointed(options.checkpointing)
    sizes = {size: getattr(options, size) for size in ("context", "tensor", "expert")}
    splits = splits_of(counts, options.ranks, device, **sizes)
    rows = read(options, hub_id=hub_id)
    print_notes(rows.notes)
    tree = build_tree(rows.rows)
    if not tree.trained_edges()[1].any():
        raise ValueError(f"{', '.join(options.files)}: no token is trained, so there is nothing to simulate")
    answers = simulate(tree, counts, splits, device, budget=options.budget)
    found = sorted((one for one in answers if isinstance(one, Simulation)), key=lambda one: one.step_seconds)
    refused = [one for one in answers if not isinstance(one, Simulation)]
    batch = {
        "trajectories": tree.num_trajectories,
        "flat_tokens": tree.num_flat_tokens,
        "unique_tokens": tree.num_tokens,
    }
    # The same tokens without a tree, on the splits that are fastest with one.
    splits = [one.split for one in found[:SHOWN]]
    rows_apart = build_tree(cheapest_rows(tree), merge=False)
    apart = simulate(rows_apart, counts, splits, device, budget=options.budget)
    sentences = [*verdict(found, device, apart), _certainty(device)]
    nodes = -(-options.ranks // int(device.node_ranks))
    launches = {
        split: launch_of(
            split,
            nodes,
            model=name if options.model else f"./{name}",
            files=shlex.join(options.files),
            budget=options.budget,
            checkpointing=options.checkpointing,
            cpu=device.kind == "cpu",
        )
        for split in _recommended(found)
    }
    if options.json:
        derived = ("step_seconds", "link_share", "peak_bytes")
        print_json(
            {
                "files": list(options.files),
                "batch": batch,
                "model": {"name": shape.name, "parameters": counts.parameters},
                "device": dataclasses.asdict(device),
                "splits": [
                    dataclasses.asdict(one)
                    | {"split": one.split._asdict() | {"data": one.split.data}}
                    | {key: getattr(one, key) for key in derived}
                    for one in found
                ],
                "refused": [{"split": one.split._asdict(), "reason": one.reason} for one in refused],
                "verdict": sentences,
                "launch": [{"split": str(split), **launch._asdict()} for split, launch in launches.items()],
                "notes": list(rows.notes),
            }
        )
        return 0
    tokens = f"{batch['flat_tokens']:,} flat tokens, {batch['unique_tokens']:,} unique"
    network = (device.network_bandwidth or device.link_bandwidth) / 1e9
    links = f"{device.link_bandwidth / 1e9:,.3g} GB/s within nodes of {device.node_ranks:g}, {network:,.3g} between"
    facts = [
        ("batch", f"{batch['trajectories']:,} trajectories, {tokens}"),
        ("model", f"{shape.name}, {counts.parameters / 1e9:.2f} billion parameters"),
        ("ranks", f"{options.ranks:,} x {device.name}, {device.flops * device.efficiency / 1e12:,.3g} TFLOP/s reached"),
        ("links", f"{links}, {device.link_efficiency:.0%} of it reached"),
    ]
    _print(facts, found, refused, sentences)
    for split, launch in launches.items():
        where = "in TreeTrainer and share_prefixes" if launch.accelerate else "in a loop of your own"
        print(f"\n{split}, {where}:" + ("  # on every node; HEAD: the name of one" if nodes > 1 else ""))
        print("\n".join(filter(None, (launch.command, launch.mesh))))
        if launch.accelerate:
            print(f"\nas accelerate's file, for share_prefixes:\n{launch.accelerate}")
    return 0


def _recommended(found: "list[Simulation]") -> "list[Split]":
    """The fastest split that `TreeEngine` supports, and the fastest that trainers take if that is another."""
    by_engine = [one.split for one in found if one.split.in_engine]
    by_trainers = [split for split in by_engine if in_trainers(split)]
    return list(dict.fromkeys([*by_engine[:1], *by_trainers[:1]]))


def _certainty(device: "Device") -> str:
    """A sentence on what is counted and what is a model."""
    compared = (
        "measured steps on CPUs took 1.11 to 1.65 times as long" if device.kind == "cpu" else "compared with no GPU"
    )
    return (
        "Counted from your rows and model: trajectories, tokens, parts, bytes. A model: seconds and memory, from the "
        f"figures of {device.name} ({compared}). benchmarks/links.py measures your links."
    )


def _print(
    facts: list[tuple[str, str]], found: "list[Simulation]", refused: "list[Refused]", sentences: list[str]
) -> None:
    out = console()
    out.print(pairs(facts))
    names = ["data", "con-\ntext", "ten-\nsor", "ex-\npert", "weights\nover", "parts"]
    names += ["step,\ns", "work,\ns", "waiting,\ns", "links", "memory,\nGB"]
    lines = []
    for one in found[:SHOWN]:
        split = one.split
        over = f"{split.shards:,}" + f" x {split.copies:,}" * (split.copies > 1)
        times = (f"{x:.3g}" for x in (one.step_seconds, one.work_seconds, one.waiting_seconds))
        sizes = (f"{split.data:,}", *map(str, (split.context, split.tensor, split.expert)))
        lines.append((*sizes, over, f"{one.parts:,}", *times, f"{one.link_share:.1%}", f"{one.peak_bytes / 1e9:,.1f}"))
    told = [k for k in range(len(names)) if k not in (1, 2, 3, 8) or {line[k] for line in lines} - {"1", "0"}]
    names, lines = [names[k] for k in told], [[line[k] for k in told] for line in lines]
    if lines:
        out.print(table(names, lines, title="one training step, predicted; the fastest splits first"))
    if len(found) > SHOWN:
        out.print(f"slower and left out: {len(found) - SHOWN}; --json has all")
    if found and found[0].idle_ranks:
        out.print(f"{found[0].idle_ranks:,} ranks of the fastest split have nothing to compute.")
    for reason in dict.fromkeys(one.reason for one in refused):
        said = "; ".join(str(one.split) for one in refused if one.reason == reason)
        out.print(f"does not fit: {said}: {reason}", markup=False, soft_wrap=True)
    for sentence in sentences:
        out.print(sentence, markup=False, soft_wrap=True)
