"""`treetrain train`: from files of trajectories to a trained model folder."""

import dataclasses
import gc
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from treetrain.cli.options import Files
from treetrain.cli.parse import flag_value, parse
from treetrain.train.config import NO_SETTINGS, TrainConfig, refuse_no_setting
from treetrain.train.settings import SECTIONS, DataSettings

if TYPE_CHECKING:
    from treetrain.train.signals import Interrupted
    from treetrain.train.trainer import Trainer, TrainResult

SUMMARY = "Train a model on branching trajectories, every shared prefix computed once, gradients exact."
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --output out",
    "chats.jsonl --model tiny --output out --eval-fraction 0.1 --lr 1e-3 --epochs 3",
    "rollouts.jsonl --model ./policy --output out --loss grpo --clip 0.2 --lr 1e-6",
    "--config run.toml --lr 1e-5 --output out",
    "rollouts.jsonl --model ./policy --output out --parallel fsdp  (after torchrun --nproc-per-node 8 -m treetrain)",
)
SECONDS_TO_SPEAK = 10.0
"""For the first process of several to say why all of them stop; it is the first to end then, and they with it."""


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
    """Parse, train, say where the model is; of several processes the first one speaks for all."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        options = parse(TrainOptions, argv, command="train", summary=SUMMARY, examples=EXAMPLES)
        code = _run(options, argv)
        gc.collect()  # a process group that is held until the interpreter ends may abort there
        return code
    except (ValueError, OSError, RuntimeError, FloatingPointError, KeyboardInterrupt) as error:
        if rank == 0:
            raise
        return _quietly(error, rank)


def _run(options: TrainOptions, argv: Sequence[str]) -> int:
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
    if options.json and trainer.world.main:
        print_notes(trainer.prepared.notes)
    try:
        result = trainer.run()
    except Interrupted as stopped:
        told = stopped.with_advice(_resuming(argv, overwrite=options.overwrite))
        if trainer.ranks.alone:
            raise told from None
        return _stopped(told, trainer)
    if options.json and trainer.world.main:
        print_json(result.as_dict())
    elif trainer.world.main:
        _print(options, result)
    trainer.leave()
    return 0


def _stopped(told: "Interrupted", trainer: "Trainer") -> int:
    """All processes of a run were stopped together; none ends before the first one has said so.

    The launcher ends the others as soon as one has.
    """
    if trainer.world.main:
        print(f"treetrain: {told}", file=sys.stderr, flush=True)
    trainer.ranks.gather(None)
    trainer.leave()
    return told.exit_code


def _quietly(error: BaseException, rank: int) -> int:
    """The exit code of another process than the first one, which tells only what that one cannot know."""
    from treetrain.errors import RanksDisagree

    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "exit_code", 130)
    if isinstance(error, RanksDisagree | FloatingPointError):
        time.sleep(SECONDS_TO_SPEAK)  # the launcher ends all processes when the first of them has gone
        return 2
    if isinstance(error, RuntimeError):
        raise error
    print(f"treetrain: rank {rank}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2


def _resuming(argv: Sequence[str], *, overwrite: bool) -> str:
    """The command that goes on with the run of these arguments."""
    kept, skip = [], False
    for word in argv:
        if not (skip or word == "--overwrite" or word.startswith("--resume")):
            kept.append(word)
        skip = word == "--resume"
    from_file = ["--no-overwrite"] if overwrite and "--overwrite" not in argv else []
    return shlex.join([*_launch(), "train", *kept, *from_file, "--resume", "auto"])


def _launch() -> list[str]:
    """How this process was started: by torchrun, with so many others, or by itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ["treetrain"]
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    several = ["--nnodes", str(nodes)] if nodes > 1 else []
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return ["torchrun", *several, "--nproc-per-node", here, "-m", "treetrain"]


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
