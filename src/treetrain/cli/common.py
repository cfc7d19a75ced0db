"""Code that all commands share: argparse options, reading rows and models, and printing.

numpy, torch, transformers and rich are imported only where they are used, so that --help is fast.
"""

import argparse
import itertools
import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from treetrain.core.errors import nearest, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from treetrain.check.verify import TreeReport
    from treetrain.layers.trajectory import Trajectory
    from treetrain.logs.inspection.report import Shape
    from treetrain.logs.records import Json

SKIPPED = "treetrain-skipped.txt"
"""Where `--on_error skip` lists the records that were left out."""
EXAMPLE = "Qwen/Qwen3-0.6B"
"""The hub id that messages show."""


# ---- Options


class Parser(argparse.ArgumentParser):
    """The parser of a command; it reports errors as a one-line `ValueError`."""

    lists_all = "--help"
    """The option that lists all options."""

    def __init__(self, command: str, summary: str, **more: Any) -> None:
        more |= {"prog": f"treetrain {command}", "description": summary, "allow_abbrev": False}
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, **more)
        # argparse before Python 3.14 takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        """Raise `ValueError`; `argparse` would exit."""
        message = re.sub(r"^argument (--\w+)\S*: ", r"\1: ", re.sub(r"(?<!\.)\.$", "", message))
        end = "" if message.endswith("?") else ";"
        raise ValueError(f"{message}{end} {self.prog} {self.lists_all} lists all options")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options; before missing ones, since a mistyped option is missing too."""
        options = self._option_string_actions
        for word in args:
            name = word.split("=")[0]
            if re.match("-+[a-zA-Z]", name) and " " not in name and name not in options:
                known = dict.fromkeys(each.replace("-", "_").lstrip("_") for each in options)
                found = nearest(name.strip("-").replace("-", "_"), known).replace("mean ", "mean --")
                self.error(f"unknown option {name}" + (f"; {found}" if found.startswith("did") else ""))
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"{extra[0]!r} is the value of no option")
        found.command = shlex.join([*self.prog.split(), *args])  # errors show it, with what is missing added
        return found, []

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}; {nearest(value, map(str, action.choices))}")

    def option(self, name: str, help: str, default: Any = None, **more: Any) -> None:
        """Add `--name`. Users may write `-` in place of `_`."""
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        self.add_argument(*names, help=help, default=default, **more)

    def flag(self, name: str, help: str) -> None:
        """Add the switch `--name`, off by default."""
        self.option(name, help, default=False, action="store_true")

    def row_options(self) -> None:
        """Add the files, and the options for reading them."""
        text = "Logs: JSONL, JSON, Parquet or Arrow, plain, gzip or zstd, or folders of them."
        self.add_argument("files", metavar="FILE", nargs="+", help=text)
        text = "Format of the files, one of docs/data.md or your own; auto: what the first record looks like."
        self.option("format", text, "auto")
        text = "Conversations as whole transcripts, or every LLM call as its own row."
        self.option("view", text, "transcript", choices=["transcript", "calls"])
        text = "Which assistant messages are trained; last: one record is one LLM call, its last message the answer."
        self.option("train", text, "all", choices=["all", "last"])
        text = "Read the value at PATH of a record as KEY: reward=result.score."
        self.option("map", text, [], action="extend", nargs="+", type=_key_and_path, metavar="KEY=PATH")
        text = "Read only calls whose value at PATH is VALUE: model=my-policy leaves out a judge's."
        self.option("where", text, [], action="extend", nargs="+", type=_key_and_path, metavar="PATH=VALUE")
        text = "skip: leave out records that cannot be used, and list them in treetrain-skipped.txt."
        self.option("on_error", text, "stop", choices=["stop", "skip"])
        self.option("tools", "JSON file of tool schemas for conversations that bring none; none leaves all tools out.")
        self.option("chat_template", "Instead of the tokenizer's: chatml (built in, keeps prefixes) or a Jinja file.")
        self.option("tokenizer", "Tokenizer to use instead of the model's own; a hub id, a folder or a preset.")

    def budget_option(self) -> None:
        """Add `--budget`."""
        text = "Tokens whose graph is alive at once (4096), or bytes above model, gradients and optimiser state (8GiB)."
        self.option("budget", f"{text} Not given: what the device has free.")

    def sample_options(self) -> None:
        """Add the options of commands that run a model on a sample of rows."""
        self.row_options()
        self.budget_option()
        self.option("model", "Hub id, local folder, or a built-in random preset: tiny, small.", required=True)
        text = "Rows to use: the first whole groups (else trees) of at most so many; 0 uses all."
        self.option("sample", text, 16, type=at_least(0))
        self.json_option()

    def json_option(self) -> None:
        """Add `--json`."""
        self.flag("json", "Print one JSON object and nothing else.")


def _key_and_path(text: str) -> tuple[str, str]:
    """Read KEY=PATH, as an argparse type."""
    key, _, path = text.partition("=")
    if not (key and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=PATH, such as reward=result.score, or PATH=VALUE")
    return key, path


def at_least(least: int) -> Callable[[str], int]:
    """Make an argparse type that reads an integer of `least` or more."""

    def whole_number(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
        return value

    return whole_number


def json_object(text: str) -> "dict[str, Json]":
    """Read a JSON object, as an argparse type."""
    with suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"""{text!r} is no JSON object; give one, such as '{{"r": 16}}'""")


# ---- Inputs


def find_shape(model: str | None, shape: str | None, *, dtype_bytes: int = 4) -> "Shape":
    """Find the named `shape` if given, else the shape of `model`, else the default shape. Only `model` needs torch."""
    from treetrain.logs.inspection.report import Shape
    from treetrain.shapes import ModelShape

    if shape is None and model is not None:
        from treetrain.models.costs import count_named

        return Shape(counts=count_named(model, dtype_bytes), name=model, assumed=False)
    name = shape or "qwen3-8b"
    counts = ModelShape.named(name).counts(dtype_bytes=dtype_bytes)
    return Shape(counts=counts, name=name, assumed=shape is None)


class ReadRows(NamedTuple):
    """Rows and how they were read."""

    rows: "Sequence[Trajectory]"
    notes: tuple[str, ...]
    """Remarks for the user."""
    format: str
    view: str | None
    """None for token rows."""
    tokenizer: "PreTrainedTokenizerBase | None"
    """None for token rows without --tokenizer."""


def read(options: Namespace, files: Sequence[str] | None = None, *, hub_id: str | None = None, **more: Any) -> ReadRows:
    """Read the rows of the files.

    The model determines the tokenizer, and the vocabulary size and length that rows must fit.

    Args:
        hub_id: whose tokenizer reads conversations if the options name none.
        more: options of `tt.load`.

    Raises:
        DataError: see `tt.load`; without a tokenizer for conversations it shows the command with one.
    """
    from treetrain.core.errors import DataError
    from treetrain.core.planning.make import parse_budget
    from treetrain.logs.chat import NO_TOKENIZER
    from treetrain.logs.load import detect_format, load

    parse_budget(getattr(options, "budget", None))  # a wrong one is refused before anything is read
    files = list(files or options.files)
    renamed = dict(options.map)
    kind, _ = detect_format(files[0], options.format, renamed)
    config = tokenizer = None
    wanted = options.tokenizer or (None if kind.tokens else options.model or hub_id)
    if options.model is not None or wanted is not None:
        from treetrain.models.loading import load_config, load_tokenizer

        config = None if options.model is None else load_config(options.model).get_text_config()
        try:
            tokenizer = None if wanted is None else load_tokenizer(wanted)
        except DataError as error:
            by_option = wanted in (options.tokenizer, options.model)
            raise (
                error if by_option else DataError(f"conversations need --tokenizer, or the model's: {error}")
            ) from error
    vocab_size, positions = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    given = ("format", "view", "train", "tools", "chat_template", "on_error")
    try:
        loaded = load(
            files,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_positions=positions,
            map=renamed,
            where=dict(options.where),
            images=getattr(options, "images", "refuse"),
            **{option: getattr(options, option) for option in given},
            **more,
        )
    except DataError as error:
        if NO_TOKENIZER not in str(error):
            raise
        added = f"conversations need a tokenizer, your model's: {options.command} --tokenizer {EXAMPLE}"
        raise DataError(str(error).replace(NO_TOKENIZER, added)) from error
    notes = loaded.notes
    if loaded.skipped:
        lines = "".join(line + "\n" for line in loaded.skipped)
        writes = not getattr(options, "dry_run", False)
        listed = f"are listed in {_written_anew(SKIPPED, lines)}" if writes else f"would be listed in {SKIPPED}"
        notes = (*notes, f"the skipped records {listed}")
    return ReadRows(loaded.trajectories, notes, loaded.format, None if kind.tokens else options.view, tokenizer)


def _written_anew(name: str, text: str) -> Path:
    """Write a file of this name, or with a number after it where there is one: that of another run stays."""
    for number in itertools.count(1):
        path = Path(name if number == 1 else f"{Path(name).stem}-{number}{Path(name).suffix}")
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:  # nor is a link followed
            file.write(text)
            return path
    raise AssertionError


def sample(options: Namespace, dtype: str = "float32") -> "tuple[nn.Module, list[Trajectory]]":
    """Load the model and the rows to run it on, and print notes on the rows."""
    from treetrain.core.errors import DataError
    from treetrain.trainers.groups import sample_groups

    found = read(options)
    rows, cut = sample_groups(found.rows, options.sample or len(found.rows))
    print_notes(found.notes)
    if len(rows) < len(found.rows):
        of = "of the first group or tree, which has more" if cut else "in whole groups or trees"
        print_notes([f"a sample of {len(rows)} of {len(found.rows)} rows, {of}; --sample sets how many, 0 takes all"])
    if not any(row.weights.any() for row in rows):
        raise DataError(f"nothing to train: no token of the {len(rows)} sampled rows has a loss weight")
    return best_device_model(options.model, dtype), rows


def best_device_model(name: str, dtype: str = "float32") -> "nn.Module":
    """A model in eval mode on the GPU, or on the CPU if there is none."""
    import torch
    from transformers.utils import logging

    from treetrain.models.loading import load_model

    logging.disable_progress_bar()
    model = load_model(name, dtype=dtype)
    return torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu").eval()


# ---- Printing


def console(*, stderr: bool = False) -> "Console":
    """A console that wraps at the terminal's width, or at 160 columns if there is no terminal."""
    from rich.console import Console

    class Printing(Console):
        """Escapes control characters of texts; those of styles are rich's own."""

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)

    made = Printing(stderr=stderr, highlight=False)
    return made if made.is_terminal else Printing(stderr=stderr, highlight=False, width=160)


def print_json(data: Mapping[str, object]) -> None:
    """Print one indented JSON object on stdout."""
    print(json.dumps(data, indent=2, default=str))


def print_notes(notes: Iterable[str]) -> None:
    """Print remarks on stderr, one line each."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def pairs(rows: Iterable[tuple[str, str]]) -> "Table":
    """A table of names and values without a frame."""
    from rich.markup import escape
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        made.add_row(f"[dim]{escape(printable(name))}[/]", escape(printable(value)))
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> "Table":
    """A table whose first column is text and all others numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), show_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(escape(printable(cell)) for cell in row))
    return made


def tree_facts(report: "TreeReport") -> list[tuple[str, str]]:
    """Names and values about the tree in a report of `verify` or `bench`."""
    overlap = 1 - report.unique_tokens / max(report.flat_tokens, 1)
    tokens = f"{report.flat_tokens:,} flat, {report.unique_tokens:,} unique tokens, overlap {overlap:.3f}"
    return [
        ("rows", f"{report.trajectories:,}: {tokens}"),
        ("attention", report.attention),
        ("parts", f"{report.parts:,}, {report.recomputed_tokens:,} tokens run forward twice"),
    ]
