"""`treetrain demo`: the built-in model learns recorded games, as a tree and row by row, side by side.

Both trainings have the same seed, weights, rows and steps, so their loss curves must coincide; otherwise the demo
fails. Each has a process, and so memory, to itself. They take turns step by step: whatever else the machine does slows
both. No network is used.
"""

import dataclasses
import gzip
import json
import multiprocessing
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetrain.cli.common import Parser, at_least, console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUMMARY = (
    "The built-in model learns recorded games of a small agent, as a tree and row by row in turns: exactness, a table "
    "of both as they run, and what the model writes before and after. Two cores take about two minutes; no network."
)
DIFFERENT = 1
"""The exit code where the gradients are not exact, or the loss curves differ."""
MODEL = "tiny"
GAMES = "games.jsonl.gz"
"""The rows, in the output folder."""
EXECUTIONS = ("tree", "linear")
TRAINING: dict[str, Any] = {
    "tokens_per_step": 10_000,  # all games
    "learning_rate": 2e-3,
    "adam_beta2": 0.98,
    "warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "overwrite_output_dir": True,  # of an earlier demo
}
CURVE_TOLERANCE = 0.001
"""Largest difference of the two loss curves, in nats. They are equal but for float32 rounding, which training
amplifies, to some millionths in these steps; an error in the mathematics shows as tenths at once."""
LINES = 8
"""Lines of the table, at most."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    # glibc gives large freed blocks back to the system and has them zeroed again at the next step; that costs either
    # execution a tenth of its time or more, by chance of the sizes, and says nothing about them.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
    "MALLOC_TOP_PAD_": str(1 << 30),
}
"""Of the processes that train."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("demo", SUMMARY)
    parser.option("steps", "Optimiser steps of each training.", 40, type=at_least(2))
    parser.option("output_dir", "Folder of the rows, both trained models and the page of the runs.", "treetrain-demo")
    return parser


def run(argv: Sequence[str]) -> int:
    """Check exactness, train twice, compare; 0 if both trainings agree."""
    options = make_parser().parse_args(argv)
    output, out = _folder(options.output_dir), console()
    with _trainings(output, options.steps) as trainings:  # they load while exactness is checked
        if not _verify(output, out):
            return DIFFERENT
        before = {name: _received(training) for name, training in trainings.items()}
        _train(trainings, options.steps, out)
        after = {name: _received(training) for name, training in trainings.items()}
    _print_texts(before["tree"], after["tree"], out)
    agree = _compare(output, out)
    out.print(f"\nIn {output}: {GAMES} (the rows), run.html (the page of both runs), tree and linear (the models).")
    out.print("Go on with the same rows, or with yours and your model:")
    command = f"treetrain inspect {shlex.quote(str(output / GAMES))} --model {MODEL}"
    for line in (command, "treetrain verify rollouts.jsonl --model Qwen/Qwen3-0.6B"):
        out.print(f"  {line}", style="cyan", markup=False, soft_wrap=True)
    return 0 if agree else DIFFERENT


def _folder(name: str) -> Path:
    """Make the output folder, with the rows in it. Raises ValueError for a folder that holds something else."""
    output = Path(name)
    if output.exists() and not (output / GAMES).exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output_dir {name} is there and holds no earlier demo; give another, or a new name")
    output.mkdir(parents=True, exist_ok=True)
    games = resources.files("treetrain.cli").joinpath("demo_games.jsonl.gz").read_bytes()
    (output / GAMES).write_bytes(games)
    return output


def _verify(output: Path, out: "Console") -> bool:
    """Compare gradients on the games of one puzzle, and print what the rows share."""
    from treetrain.check.verify import verify
    from treetrain.core.tree.token_tree import build_tree
    from treetrain.logs.load import load
    from treetrain.models.loading import load_model, load_tokenizer

    rows = load(output / GAMES, tokenizer=load_tokenizer(MODEL)).trajectories
    tree = build_tree(rows)
    out.print(
        f"{len(rows)} solved games of {len({row.group for row in rows})} puzzles: {tree.num_flat_tokens:,} tokens in "
        f"rows, {tree.num_tokens:,} in the tree"
    )
    report = verify(load_model(MODEL), [row for row in rows if row.group == rows[0].group])
    out.print(report.verdict, style="green" if report.passed else "bold red", soft_wrap=True)
    return report.passed


# ---- Two trainings, in turns


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """A training in a process of its own, and the connection to it."""

    process: BaseProcess
    connection: Connection


@contextmanager
def _trainings(output: Path, steps: int) -> "Iterator[dict[str, Training]]":
    """Start a process for each execution; they are ended at the end, whatever happens."""
    context, trainings = multiprocessing.get_context("spawn"), {}
    added = ENVIRONMENT.keys() - os.environ.keys()
    try:
        os.environ.update({name: ENVIRONMENT[name] for name in added})
        for execution in EXECUTIONS:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_training, args=(theirs, execution, output, steps), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed here
            trainings[execution] = Training(process, ours)
        for name in added:
            del os.environ[name]
        yield trainings
    finally:
        for training in trainings.values():
            training.process.kill()
            training.process.join()


def _received(training: Training) -> Any:
    """The next message of a training. Raises its error, or ChildProcessError if it ended without one."""
    try:
        message = training.connection.recv()
    except EOFError:
        training.process.join()
        raise ChildProcessError(
            f"a training of the demo ended with exit code {training.process.exitcode}; -9 is mostly the system's, for "
            "lack of memory (both need 3 GB)"
        ) from None
    if isinstance(message, Exception):
        raise message
    return message


def _run_training(connection: Connection, execution: str, output: Path, steps: int) -> None:
    """Train in this process: sends what the model writes, the logs of every step when it is asked for one, and texts
    again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the command ends this process
    try:
        from transformers import PrinterCallback, TrainerCallback
        from transformers.utils import logging

        from treetrain.logs.load import load
        from treetrain.models.loading import load_model, load_tokenizer
        from treetrain.trainers.arguments import TreeArguments
        from treetrain.trainers.tree_trainer import TreeTrainer

        class InTurn(TrainerCallback):
            """Waits for its turn before a step, and sends the logs after it."""

            def on_step_begin(self, *_: object, **__: object) -> None:
                connection.recv()

            def on_log(self, _: object, state: Any, __: object, logs: dict[str, float], **___: object) -> None:
                if "loss" in logs:
                    connection.send(logs)
                    if state.global_step == steps:  # what follows would slow the last step of the other
                        connection.recv()

        logging.disable_progress_bar()
        model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
        rows = load(output / GAMES, tokenizer=tokenizer).trajectories
        arguments = TreeArguments(str(output / execution), execution=execution, max_steps=steps, **TRAINING)
        trainer = TreeTrainer(model, arguments, rows, processing_class=tokenizer, callbacks=[InTurn()])
        trainer.remove_callback(PrinterCallback)
        connection.send(_first_turns(output, model, tokenizer))
        trainer.train()
        trainer.save_model()
        trainer.save_state()
        connection.send(_first_turns(output, model, tokenizer))
    except (EOFError, BrokenPipeError):
        return  # the command was killed
    except Exception as error:
        connection.send(error)


def _train(trainings: Mapping[str, Training], steps: int, out: "Console") -> None:
    """Run both trainings in turns and print some of their steps: loss, tokens computed, and seconds of each."""
    out.print("\n             loss              tokens computed      seconds of the step", style="dim")
    out.print(" step      tree    linear      tree    linear      tree    linear  speed-up", style="dim")
    shown = {1, *(round(steps * line / (LINES - 1)) for line in range(1, LINES))}
    for step in range(1, steps + 1):
        logs = []
        for training in trainings.values():
            training.connection.send("your turn")
            logs.append(_received(training))
        if step in shown:
            loss, tokens, seconds = (
                [log[name] for log in logs] for name in ("loss", "tree/computed_tokens", "tree/seconds")
            )
            out.print(
                f"{step:5}" + "".join(f"{one:10.4f}" for one in loss) + "".join(f"{one:10,.0f}" for one in tokens),
                *(f"{one:9.2f}" for one in seconds),
                f"{seconds[1] / seconds[0]:8.1f}x",
            )
    for training in trainings.values():
        training.connection.send("both are done")


# ---- What the model writes


def _first_turns(output: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """The likeliest first turn that the model writes in every puzzle, by the puzzle's text."""
    import torch

    puzzles = {}
    for line in gzip.decompress((output / GAMES).read_bytes()).splitlines():
        game = json.loads(line)
        puzzles.setdefault(game["messages"][1]["content"], game)
    texts = {}
    for puzzle, game in puzzles.items():
        options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompt: Any = tokenizer.apply_chat_template(game["messages"][:2], tools=game["tools"], **options)
        with torch.no_grad():
            generate: Any = model.eval().generate
            tokens = generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
        text = str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
        texts[puzzle] = " ".join(text.split())
    return texts


def _print_texts(before: dict[str, str], after: dict[str, str], out: "Console") -> None:
    out.print("\nThe likeliest first turn, by the random weights that the model began with and after these steps:")
    for puzzle in before:
        out.print(f"\n  {puzzle}", style="bold", markup=False)
        for when, text in (("before", before[puzzle]), ("after", after[puzzle])):
            out.print(f"  {when:<7} {text if len(text) <= 100 else text[:97] + '...'}", markup=False, soft_wrap=True)


def _compare(output: Path, out: "Console") -> bool:
    """Print how far the curves are apart, the speed-up and the memory, and write the page; whether they agree."""
    from treetrain.trainers.run_page import compare_runs, finite, read_run, si, write_page

    runs = [read_run(output / execution) for execution in EXECUTIONS]
    found: dict[str, Any] = compare_runs(*runs)
    agree = found["same_work"] and found["largest_difference"] <= CURVE_TOLERANCE
    tokens = [finite(run["computed_tokens"]).sum() for run in runs]
    memory = [si(finite(run["peak_memory_bytes"]).max(), "B") for run in runs]
    out.print(
        f"\nloss curves: at most {found['largest_difference']:.1e} nats apart over {found['common_steps']} steps, "
        f"allowed {CURVE_TOLERANCE:g}: {'they lie on each other' if agree else 'THEY DIFFER'}",
        style="green" if agree else "bold red",
        soft_wrap=True,
    )
    out.print(
        f"speed-up {found['speedup']:.2f}x (median over steps), {found['ideal']:.2f}x by FLOPs; {tokens[0]:,.0f} "
        f"tokens computed in place of {tokens[1]:,.0f}; peak memory {memory[0]} in place of {memory[1]}",
        soft_wrap=True,
    )
    write_page(output / EXECUTIONS[0], output / EXECUTIONS[1], output / "run.html")
    return agree
