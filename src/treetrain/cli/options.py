"""Command lines by argparse: one parser, and the options that several commands share.

Nothing here imports numpy, torch or transformers: --help must be fast.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of examples."""


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as a one-line `ValueError`.

    Args:
        command: name of the command.
        summary: what it does.
        examples: the arguments of example calls, without `treetrain COMMAND`.
    """

    def __init__(self, command: str, summary: str, examples: Sequence[str], **more: Any) -> None:
        prog = f"treetrain {command}"
        shown = "\n".join(f"  {prog} {example}".rstrip() for example in examples)
        super().__init__(
            prog=prog,
            description=f"{summary}\n\nexamples:\n{shown}",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            **more,
        )

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        raise ValueError(f"{message}; {self.prog} --help lists all options")

    def option(self, name: str, help: str, default: Any = None, **more: Any) -> None:
        """Add `--name`; a name of several words may be written with `_` or `-`."""
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        self.add_argument(*names, help=help, default=default, **more)

    def flag(self, name: str, help: str) -> None:
        """Add `--name`, which is off unless it is given."""
        self.option(name, help, default=False, action="store_true")

    def row_options(self, *, nargs: str = "+") -> None:
        """Add the files, and the options for reading them."""
        text = "Logs: JSONL, JSON, Parquet or Arrow, plain, gzip or zstd, or folders of them."
        self.add_argument("files", metavar="FILE", nargs=nargs, help=text)
        text = (
            "The files' format, one of docs/data.md or your own (entry point); auto: what the first record looks like."
        )
        self.option("format", text, "auto")
        self.option(
            "view",
            "Conversations as whole transcripts, or every LLM call as its own row.",
            "transcript",
            choices=["transcript", "calls"],
        )
        text = "Which assistant messages are trained; last: one record is one LLM call, its last message the answer."
        self.option("train", text, "all", choices=["all", "last"])
        text = "Read the value at PATH of a record as KEY: reward=result.score; may be given several times."
        self.option("map", text, {}, action=_Map, metavar="KEY=PATH")
        text = "skip: leave out records that cannot be used, and list them in treetrain-skipped.txt."
        self.option("on_error", text, "stop", choices=["stop", "skip"])
        self.option(
            "tools", "JSON file of tool schemas for conversations that bring none; or none, to leave all tools out."
        )
        self.option("chat_template", "Instead of the tokenizer's: chatml (built in, keeps prefixes) or a Jinja file.")
        self.option("tokenizer", "Tokenizer to use instead of the model's own; a hub id, a folder or a preset.")

    def shape_options(self) -> None:
        """Add `--model` and `--shape`, for commands that need no weights."""
        text = "Hub id, local folder or preset (tiny, small): gives tokenizer, vocabulary check and model shape."
        self.option("model", text)
        text = "Model shape by name, e.g. qwen3-0.6b, qwen3-8b, llama-3.1-8b; qwen3-8b if none is known."
        self.option("shape", text)

    def budget_option(self) -> None:
        """Add `--budget`."""
        self.option(
            "budget",
            "Tokens whose graph is alive at once (4096), or bytes above model, gradients and optimiser state (8GiB, "
            "900MB); any tree fits. Not given: what the device has free.",
            type=_budget,
        )

    def sample_options(self) -> None:
        """Add the options of commands that run a model on a sample of rows."""
        self.row_options()
        self.budget_option()
        self.option("model", "Hub id, local folder, or a built-in random preset: tiny, small.", required=True)
        self.option(
            "sample",
            "Rows to use: the first whole groups (else trees) of at most so many; 0 uses all.",
            16,
            type=at_least(0),
        )
        self.option("seed", "Seed of a preset's random weights.", 0, type=int)
        self.option("threads", "CPU threads; not given: torch's choice.", type=at_least(1))
        self.json_option()

    def json_option(self) -> None:
        """Add `--json`."""
        self.flag("json", "Print one JSON object and nothing else.")


class _Map(argparse.Action):
    """Collects KEY=PATH in a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, equals, path = values.partition("=")
        if not (name and equals and path):
            parser.error(f"{option_string} {values}: expected KEY=PATH, such as reward=result.score")
        namespace.map = namespace.map | {name: path}


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer of `least` or more."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give at least {least}")
        return value

    number.__name__ = "int"  # argparse names the type in its errors
    return number


def _budget(text: str) -> Any:
    from treetrain.planning.budget import parse_budget

    try:
        return parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
