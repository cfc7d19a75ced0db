"""The command line, one file per command; a command and what it needs are imported when it is called."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from treetrain import __version__
from treetrain.core.errors import RanksDisagree, nearest, printable

COMMANDS = {
    "demo": "the built-in model learns recorded games, as a tree and row by row, side by side; needs nothing",
    "inspect": "how much the rows of a file share, and what computing it once is worth",
    "verify": "is it exact: loss and every gradient, tree against linear, on your model and rows",
    "bench": "is it faster: tree against the best linear baseline, on your model and rows",
    "train": "train a model on branching trajectories, every shared prefix computed once",
    "simulate": "what a step of a file would take on many ranks: balance, time, memory",
    "page": "the logs of a run as a page, beside those of the same run without shared prefixes",
    "models": "which models are exact on a tree, and why others are refused",
    "doctor": "versions, devices and kernels of this environment, what is missing and how to install it",
}
HELP = """usage: treetrain COMMAND ...

Train LLMs on branching trajectories, every shared prefix once.

commands:
{commands}

examples:
  treetrain demo
  treetrain inspect rollouts.jsonl
  treetrain verify rollouts.jsonl --model Qwen/Qwen3-0.6B
  treetrain train rollouts.jsonl --model Qwen/Qwen3-0.6B --output_dir out

treetrain COMMAND --help shows all of its options."""
BAD_INPUT = 2
OWN_FAULT = 70
INTERRUPTED = 130
LONGEST = 400
EXPECTED = (ImportError, ValueError, OSError, FloatingPointError, MemoryError, RanksDisagree)
"""Errors that a user can cause, whoever raises them."""
GIVEN_SETTINGS = ("accelerate", "huggingface_hub", "peft", "safetensors", "transformers")
"""Libraries that get the user's settings and files; whatever they raise themselves is about those."""
READERS = (*GIVEN_SETTINGS, "json", "numpy", "torch", "yaml")
"""Libraries whose messages on a value do not say what it is of; the message names the library."""
EXTRAS = {"peft": "peft", "trl": "trl", "bitsandbytes": "bitsandbytes"}
"""Extras of treetrain that install a missing module; all others come with `train`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0, 1 (a check failed), 2 (bad input), 70 (a fault of treetrain), 130 (Ctrl-C) or 143 (SIGTERM). Errors that a user
    can cause are one line on stderr. TREETRAIN_TRACEBACK=1 shows their traceback instead.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", INTERRUPTED)
    except BrokenPipeError:  # `treetrain inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("TREETRAIN_TRACEBACK", "0") not in ("", "0"):
            raise
        if (message := _message(error)) is not None:
            return _fail(f"error: {message}", BAD_INPUT)
        traceback.print_exc()
        return _fail(
            "this is a fault of treetrain, not of what you typed; please report it with the lines above, the command "
            "and the output of `pip list`",
            OWN_FAULT,
        )


def _message(error: Exception) -> str | None:
    """Return the line for an error of the user's; None for a fault of ours."""
    text = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        extra = EXTRAS.get(package, "train")
        return None if package == "treetrain" else f"{text}; pip install 'treetrain[{extra}]' installs what is missing"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        return f"{text.splitlines()[0]} A smaller --budget bounds the memory of a step"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    *_, frame = traceback.walk_tb(error.__traceback__)
    library = frame[0].f_globals.get("__name__", "").split(".")[0]
    if isinstance(error, EXPECTED):  # of another library: "invalid literal for int()" does not say what is
        of_others = type(error) in (ValueError, json.JSONDecodeError) and library in READERS
        return f"{text} ({type(error).__name__} of {library})" if of_others else text
    return f"{text} ({type(error).__name__} of {library})" if library in GIVEN_SETTINGS else None


def _run(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())))
        return 0
    if command == "--version":
        print(f"treetrain {__version__}")
        return 0
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    return importlib.import_module(f"treetrain.cli.{command}").run(argv[1:])


def _fail(message: str, code: int) -> int:
    line = f"treetrain: {' '.join(message.split())}"
    if len(line) > LONGEST:  # the end often says what to do
        line = f"{line[: LONGEST - 125]} ... {line[-120:]}"
    print(printable(line), file=sys.stderr)
    return code
