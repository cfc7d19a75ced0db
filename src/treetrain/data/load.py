"""Files to trajectories."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from treetrain.data.chat import View
from treetrain.data.jsonl import read_jsonl
from treetrain.data.notes import Notes
from treetrain.data.row_maker import Format, RowMaker
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """What was read, and what the user should know about it."""

    trajectories: list[Trajectory]
    """In the order of the file; in the calls view each conversation's calls in their order."""
    notes: tuple[str, ...]
    """What was ignored or looks odd, each once with a count and the first place."""
    format: Format
    """Which of the two formats the file has."""


def load(
    path: Paths,
    *,
    tokenizer: Any = None,
    format: Literal["auto", "tokens", "chat"] = "auto",
    view: View = "transcript",
    tools: Sequence[Any] | str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    limit: int | None = None,
) -> LoadedFile:
    """Read JSONL files of token rows or of conversations. Every row is read or refused, none is dropped.

    Args:
        path: one file or several of one format, plain or gzipped.
        tokenizer: a transformers tokenizer; needed for conversations only.
        format: "tokens" (`input_ids`), "chat" (`messages`), or "auto": what the first row has.
        view: conversations as whole transcripts or one row per LLM call ("calls").
        tools: schemas, or a JSON file of them, for conversations that bring none.
        chat_template: instead of the tokenizer's own: "chatml" (ours), a file, or the template's text.
        vocab_size: refuse token ids from here on.
        max_positions: refuse rows of more tokens.
        limit: read only the first so many rows (conversations) over all files.

    Raises:
        DataError: naming file and line, what is wrong, both values and what to do.
    """
    maker = RowMaker(
        tokenizer=tokenizer,
        format=format,
        view=view,
        tools=tools,
        chat_template=chat_template,
        vocab_size=vocab_size,
        max_positions=max_positions,
    )
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise no_file()
    notes = Notes()
    trajectories: list[Trajectory] = []
    for place, row in _rows(paths, limit, notes):
        trajectories += maker.make(row, place, notes)
    if maker.format is None:
        raise DataError(f"no rows were read (limit {limit}); give a limit of at least 1 or none")
    notes.add_all(maker.remarks())
    return LoadedFile(trajectories=trajectories, notes=notes.lines(), format=maker.format)


def no_file() -> DataError:
    """What is raised where no file is named."""
    return DataError("no file given; pass at least one JSONL file")


def _rows(
    paths: Iterable[str | os.PathLike[str]], limit: int | None, notes: Notes
) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = 0
    for path in paths:
        for number, row in read_jsonl(Path(path)):
            if limit is not None and rows >= limit:
                notes.add(f"only the first {limit} rows are read; there are more")
                return
            rows += 1
            yield f"{path} line {number}", row
