"""`treetrain simulate`: what a step of a file would take on many ranks. Starts no process, needs no torch."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from treetrain.cli.options import BudgetOptions
from treetrain.cli.parse import parse

if TYPE_CHECKING:
    from treetrain.cli.inputs import NamedShape
    from treetrain.planning.devices import Device

SUMMARY = "What one training step over a file would take on many ranks: balance, time and memory, predicted."
EXAMPLES = (
    "rollouts.jsonl --shape qwen3-8b --ranks 8 16 64",
    "chats.jsonl --model ./my-model --view calls --ranks 8 --device-description a100",
    "rollouts.jsonl --shape qwen3-32b --ranks 64 256 1024 --device-description my-cluster.toml --checkpointing",
    "rollouts.jsonl --shape qwen3-0.6b --ranks 2 4 --device-description cpu --parallel ddp --budget 8192 --json",
)
MOST_RANKS = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions(BudgetOptions):
    """Options of `treetrain simulate`."""

    model: str | None = None
    """Hub id, local folder or preset (tiny, small): gives tokenizer, vocabulary check and model shape."""
    shape: str | None = None
    """Model shape by name, e.g. qwen3-0.6b, qwen3-8b, llama-3.1-8b; qwen3-8b if none is known."""
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Numbers of ranks to try."""
    device_description: str = "h100"
    """Of one rank: a100, h100, h200, cpu, or a JSON or TOML file of figures (docs/distributed.md)."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """Weights, gradients and moments in shards, or whole on every rank."""
    sync: Literal["part", "step"] = "part"
    """FSDP: gradients are reduced after every part, or once per step."""
    checkpointing: bool = False
    """Every layer keeps its input alone and is run again in backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [count for count in self.ranks if not 1 <= count <= MOST_RANKS]
        if wrong or not self.ranks:
            raise ValueError(
                f"--ranks is {wrong[0] if wrong else 'empty'}; give numbers of processes, 1 to {MOST_RANKS}"
            )


def run(argv: Sequence[str]) -> int:
    """Parse, simulate, print."""
    options = parse(SimulateOptions, argv, command="simulate", summary=SUMMARY, examples=EXAMPLES)
    from treetrain.cli.inputs import find_shape
    from treetrain.cli.output import print_json, print_notes
    from treetrain.planning.devices import find_device
    from treetrain.planning.simulate import simulate
    from treetrain.tree.build import build_tree

    device, shape = find_device(options.device_description), find_shape(options.model, options.shape)
    read = options.read(options.model)
    print_notes(read.notes)
    tree = build_tree(read.rows)
    if not tree.trained_edges()[1].any():
        raise ValueError(f"{', '.join(options.files)}: no token is trained, so there is nothing to simulate")
    own: dict[str, Any] = {name: getattr(options, name) for name in ("parallel", "sync", "checkpointing")}
    found: list[Any] = []
    for count in sorted(set(options.ranks)):
        try:
            found.append(simulate(tree, shape.shape, count, device, budget=options.parsed_budget(), **own))
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
                "shape": {"name": shape.name, "assumed": shape.assumed, "parameters": shape.shape.parameters},
                "device": dataclasses.asdict(device),
                "ranks": [row if isinstance(row, dict) else row.as_dict() for row in found],
                "notes": list(read.notes),
            }
        )
    else:
        _print(options, batch, shape, device, found)
    return 0


def _print(
    options: SimulateOptions, batch: dict[str, int], shape: "NamedShape", device: "Device", found: list[Any]
) -> None:
    from treetrain.cli.output import console, pairs, table

    out = console()
    sync = f", gradients reduced once per {options.sync}" * (options.parallel == "fsdp")
    tokens = f"{batch['flat_tokens']:,} flat tokens, {batch['unique_tokens']:,} unique"
    facts = [
        ("batch", f"{batch['trajectories']:,} trajectories, {tokens}"),
        ("shape", f"{shape.words}, {shape.shape.parameters / 1e9:.2f} billion parameters"),
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
