"""Command lines to dataclasses by tyro; what cannot be parsed is a ValueError of one line."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def parse(kind: type[Options], argv: Sequence[str], *, command: str, summary: str, examples: Sequence[str]) -> Options:
    """The options of a command. `--help` prints and exits with 0.

    Raises:
        ValueError: an unknown flag, a missing or bad value, or what the dataclass itself refuses.
    """
    prog = f"treetrain {command}"
    shown = "\n".join(f"  {prog} {example}" for example in examples)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=prog,
                description=f"{summary}\n\nexamples:\n{shown}",
                args=list(argv),
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(f"{_first_sentence(said.getvalue())}; {prog} --help lists what there is") from None


def _first_sentence(box: str) -> str:
    """What tyro says under the title and above the next rule, without the frame (which is plain ASCII in places)."""
    lines = [line.strip().strip("│").strip() for line in box.splitlines()]
    rules = [at for at, line in enumerate(lines) if line and set(line) <= set("─-╰╯")]
    framed = bool(lines) and lines[0].startswith("╭")
    start = 1 if framed or not rules else rules[0] + 1
    stop = next((at for at in rules if at > start), len(lines))
    text = " ".join(lines[start:stop]) or " ".join(box.split())
    return re.sub(r"^Error parsing \w*Options: ", "", text)
