"""Command lines to dataclasses by tyro; what cannot be parsed is a ValueError of one line."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

Options = TypeVar("Options")


def parse(kind: type[Options], argv: Sequence[str], *, command: str, summary: str, examples: Sequence[str]) -> Options:
    """The options of a command. `--help` prints and exits with 0.

    A dataclass that names its `sections` (title -> base class) is shown section by section; one with `defaults` has
    defaults that depend on the arguments.

    Raises:
        ValueError: an unknown flag, a missing or bad value, or what the dataclass itself refuses.
    """
    prog = f"treetrain {command}"
    shown = "\n".join(f"  {prog} {example}" for example in examples)
    said = io.StringIO()
    sections = getattr(kind, "sections", None)
    target = kind if sections is None else _sectioned(sections, kind.defaults(argv))  # type: ignore[attr-defined]
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(
                target,
                prog=prog,
                description=f"{summary}\n\nexamples:\n{shown}",
                args=list(argv),
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(f"{_first_sentence(said.getvalue())}; {prog} --help lists what there is") from None
    return parsed if sections is None else kind(**_flat(parsed))


def flag_value(argv: Sequence[str], name: str) -> str | None:
    """What a flag is given on a command line, before it is parsed; None where it is not there."""
    found = None
    for at, word in enumerate(argv):
        flag, has_value, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            found = value if has_value else argv[at + 1] if at + 1 < len(argv) else None
    return found


def _sectioned(sections: dict[str, type], defaults: dict[str, Any]) -> type:
    """A dataclass of one field per section, which tyro shows as a group of flags each."""
    fields = [
        (title.replace(" ", "_"), section, dataclasses.field(default=_filled(section, defaults)))
        for title, section in sections.items()
    ]
    return dataclasses.make_dataclass("Options", fields, frozen=True, kw_only=True)


def _filled(section: type, defaults: dict[str, Any]) -> Any:
    """A section with its defaults; what has none is marked as missing, so it is not made by its constructor."""
    made = object.__new__(section)
    for field in dataclasses.fields(section):
        default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        object.__setattr__(made, field.name, defaults.get(field.name, default))
    return made


def _flat(parsed: Any) -> dict[str, Any]:
    """The values of all sections by their names."""
    sections = [getattr(parsed, field.name) for field in dataclasses.fields(parsed)]
    return {field.name: getattr(section, field.name) for section in sections for field in dataclasses.fields(section)}


def _first_sentence(box: str) -> str:
    """What tyro says under the title and above the next rule, without the frame (which is plain ASCII in places)."""
    lines = [line.strip().strip("│").strip() for line in box.splitlines()]
    rules = [at for at, line in enumerate(lines) if line and set(line) <= set("─-╰╯")]
    framed = bool(lines) and lines[0].startswith("╭")
    start = 1 if framed or not rules else rules[0] + 1
    stop = next((at for at in rules if at > start), len(lines))
    text = " ".join(lines[start:stop]) or " ".join(box.split())
    return re.sub(r"^Error parsing \w*Options: ", "", text)
