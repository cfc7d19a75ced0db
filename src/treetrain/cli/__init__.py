"""The command line, one file per command; a command and what it needs are imported when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence

from treetrain import __version__
from treetrain.errors import RanksDisagree

COMMANDS = {
    "inspect": "how much the rows of a file share, and what computing it once is worth",
    "verify": "is it exact: loss and every gradient, tree against linear, on your model and rows",
    "bench": "is it faster: tree against the best linear baseline, on your model and rows",
    "train": "train a model on branching trajectories, every shared prefix computed once",
    "simulate": "what a step of a file would take on many ranks: balance, time, memory",
    "models": "which models are exact on a tree, and why others are refused",
}
HELP = """usage: treetrain COMMAND ...

Train LLMs on branching trajectories, every shared prefix once.

commands:
{commands}

examples:
  treetrain inspect rollouts.jsonl
  treetrain verify rollouts.jsonl --model Qwen/Qwen3-0.6B
  treetrain train rollouts.jsonl --model Qwen/Qwen3-0.6B --output_dir out

treetrain COMMAND --help shows all of its options."""
BAD_INPUT = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (a check failed), 2 (bad input), 130 (Ctrl-C) or 143 (SIGTERM).

    Errors that a user can cause are one line on stderr. TREETRAIN_TRACEBACK=1 shows the traceback instead.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", INTERRUPTED)
    except BrokenPipeError:  # `treetrain inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ModuleNotFoundError, ValueError, OSError, FloatingPointError, RanksDisagree) as error:
        missing = isinstance(error, ModuleNotFoundError)
        ours = missing and (error.name or "").startswith("treetrain")
        if os.environ.get("TREETRAIN_TRACEBACK", "0") not in ("", "0") or ours:
            raise
        cure = "; install what is missing, e.g. pip install 'treetrain[train]'" if missing else ""
        return _fail(f"error: {error}{cure}", BAD_INPUT)


def _run(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())))
        return 0
    if command == "--version":
        print(f"treetrain {__version__}")
        return 0
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; there are {', '.join(COMMANDS)}")
    return importlib.import_module(f"treetrain.cli.{command}").run(argv[1:])


def _fail(message: str, code: int) -> int:
    print(f"treetrain: {' '.join(message.split())}", file=sys.stderr)
    return code
