"""`treetrain train`: from files of trajectories to a trained model folder."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetrain.cli.options import Files
from treetrain.cli.parse import parse
from treetrain.train.config import TrainConfig

if TYPE_CHECKING:
    from treetrain.train.trainer import TrainResult

SUMMARY = "Train a model on branching trajectories, every shared prefix computed once, gradients exact."
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --output out",
    "chats.jsonl --model tiny --output out --eval-fraction 0.1 --lr 1e-3 --epochs 3",
    "rollouts.jsonl --model ./policy --output out --loss grpo --clip 0.2 --lr 1e-6",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainConfig):
    """A training run, and how it is told about."""

    data: Files
    """JSONL files (plain or .gz) of token rows or of conversations."""
    json: bool = False
    """Print one JSON object at the end and no progress."""


def run(argv: Sequence[str]) -> int:
    """Parse, train, say where the model is."""
    options = parse(TrainOptions, argv, command="train", summary=SUMMARY, examples=EXAMPLES)
    from treetrain.cli.output import console, print_json, print_notes
    from treetrain.cli.quiet import quiet_transformers
    from treetrain.train.trainer import Trainer

    quiet_transformers()
    trainer = Trainer(options, console=None if options.json else console(stderr=True))
    if options.json:
        print_notes(trainer.prepared.notes)
    result = trainer.run()
    if options.json:
        print_json(result.as_dict())
    else:
        _print(options, result)
    return 0


def _print(options: TrainOptions, result: "TrainResult") -> None:
    from treetrain.cli.output import console, megabytes, pairs

    overlap = 1 - result.unique_tokens / result.flat_tokens
    rows = [
        ("steps", f"{result.steps:,}, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"),
        ("tokens", f"{result.flat_tokens:,} flat, {result.unique_tokens:,} unique, overlap {overlap:.3f}"),
        ("speed", f"{result.flat_tokens / result.seconds:,.0f} flat tokens/s, {result.seconds:,.1f} s in steps"),
        ("peak memory", megabytes(result.peak_memory_bytes)),
        ("execution", options.execution),
        ("model", result.output),
    ]
    if result.eval_nll:
        before, after = result.eval_nll[0][1], result.eval_nll[-1][1]
        rows.insert(1, ("held out", f"{before:.4f} -> {after:.4f} nats per token"))
    console().print(pairs(rows))
