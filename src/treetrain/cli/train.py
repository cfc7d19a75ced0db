"""`treetrain train`: from files of trajectories to a trained model folder."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from treetrain.cli.options import Files
from treetrain.cli.parse import flag_value, parse
from treetrain.train.config import NO_SETTINGS, TrainConfig, refuse_no_setting
from treetrain.train.settings import SECTIONS, DataSettings

if TYPE_CHECKING:
    from treetrain.train.trainer import TrainResult

SUMMARY = "Train a model on branching trajectories, every shared prefix computed once, gradients exact."
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --output out",
    "chats.jsonl --model tiny --output out --eval-fraction 0.1 --lr 1e-3 --epochs 3",
    "rollouts.jsonl --model ./policy --output out --loss grpo --clip 0.2 --lr 1e-6",
    "--config run.toml --lr 1e-5 --output out",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(DataSettings):
    """What is trained on."""

    data: Files
    """JSONL files (plain or .gz) of token rows or of conversations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The command itself."""

    config: str | None = None
    """TOML file of settings, named as the flags are (tokens_per_step = 65536); a flag outweighs the file."""
    json: bool = False
    """Print one JSON object at the end and no progress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainConfig, CommandOptions):
    """A training run, and how it is told about."""

    sections: ClassVar[dict[str, type]] = SECTIONS | {"data": DataOptions, "command": CommandOptions}

    @staticmethod
    def defaults(argv: Sequence[str]) -> dict[str, Any]:
        """What a configuration file says, where one is named and no flag says otherwise."""
        for name in NO_SETTINGS:
            if any(word.partition("=")[0].replace("_", "-") == f"--{name.replace('_', '-')}" for word in argv):
                refuse_no_setting(name)
        path = flag_value(argv, "config")
        if path is None:
            return {}
        from treetrain.train.config import EXCLUSIVE
        from treetrain.train.config_file import read_settings

        settings = read_settings(path)
        for pair in EXCLUSIVE:
            # A flag that says the same thing in the other way takes the place of what the file says.
            if any(flag_value(argv, name) is not None for name in pair):
                settings = {name: value for name, value in settings.items() if name not in pair}
        return settings


def run(argv: Sequence[str]) -> int:
    """Parse, train, say where the model is."""
    options = parse(TrainOptions, argv, command="train", summary=SUMMARY, examples=EXAMPLES)
    from treetrain.cli.output import console, print_json, print_notes
    from treetrain.cli.quiet import quiet_transformers
    from treetrain.train.signals import Interrupted
    from treetrain.train.trainer import Trainer

    quiet_transformers()
    observers = []
    if options.report:
        from treetrain.report.live import LivePage

        observers.append(LivePage())
    trainer = Trainer(options, console=None if options.json else console(stderr=True), observers=observers)
    if options.json:
        print_notes(trainer.prepared.notes)
    try:
        result = trainer.run()
    except Interrupted as stopped:
        raise stopped.with_advice(_resuming(argv, overwrite=options.overwrite)) from None
    if options.json:
        print_json(result.as_dict())
    else:
        _print(options, result)
    return 0


def _resuming(argv: Sequence[str], *, overwrite: bool) -> str:
    """The command that goes on with the run of these arguments."""
    kept, skip = [], False
    for word in argv:
        if not (skip or word == "--overwrite" or word.startswith("--resume")):
            kept.append(word)
        skip = word == "--resume"
    from_file = ["--no-overwrite"] if overwrite and "--overwrite" not in argv else []
    return shlex.join(["treetrain", "train", *kept, *from_file, "--resume", "auto"])


def _print(options: TrainOptions, result: "TrainResult") -> None:
    from treetrain.cli.output import console, megabytes, pairs

    overlap = 1 - result.unique_tokens / result.flat_tokens
    rows = [
        ("steps", f"{result.steps:,}, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}{_ending(result)}"),
        ("tokens", f"{result.flat_tokens:,} flat, {result.unique_tokens:,} unique, overlap {overlap:.3f}"),
        ("speed", f"{result.flat_tokens / result.seconds:,.0f} flat tokens/s, {result.seconds:,.1f} s in steps"),
        ("peak memory", megabytes(result.peak_memory_bytes)),
        ("execution", options.execution),
        ("adapter" if options.lora_rank else "model", result.output),
    ]
    if options.report:
        from treetrain.report.page import PAGE_FILE

        rows.append(("page", str(Path(result.output) / PAGE_FILE)))
    if result.eval_nll:
        before, after = result.eval_nll[0][1], result.eval_nll[-1][1]
        rows.insert(1, ("held out", f"{before:.4f} -> {after:.4f} nats per token"))
    console().print(pairs(rows))


def _ending(result: "TrainResult") -> str:
    """What is special about the end of a run."""
    early = ", stopped early" if result.stopped_early else ""
    return early if result.best_step is None else f"{early}; the weights saved are those of step {result.best_step}"
