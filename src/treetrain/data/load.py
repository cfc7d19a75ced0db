"""Read files into trajectories: detect the format, and check that rows fit the model."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from treetrain.data.chat import CHAT, clean_tools, read_tools, tokenizer_settings
from treetrain.data.records import Format, Notes, ReadSettings, Record, View, read_records
from treetrain.data.token_rows import TOKENS
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError, quoted

FORMATS = (TOKENS, CHAT)
"""Tried in this order on the first record of a file."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """The rows of one or more files, with remarks for the user."""

    trajectories: Sequence[Trajectory]
    """In file order; in the calls view the calls of a conversation are in order."""
    notes: tuple[str, ...]
    """Remarks on what was ignored or looks wrong, each once with a count and the first place."""
    format: str
    """The format of the files: "tokens" or "chat"."""


def load(
    path: Paths,
    *,
    tokenizer: Any = None,
    format: str = "auto",
    view: View = "transcript",
    tools: Sequence[Any] | str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    limit: int | None = None,
    memory_map: str | os.PathLike[str] | None = None,
) -> LoadedFile:
    """Read files of token rows or of conversations. No row is dropped: a bad row raises an error.

    Args:
        path: one file or several of one format: JSONL, plain or gzipped, Parquet (`.parquet`) or Arrow (`.arrow`).
        tokenizer: a transformers tokenizer; needed for conversations only.
        format: "tokens" (`input_ids`), "chat" (`messages`), or "auto": detected from the first row.
        view: one row per conversation ("transcript") or one row per LLM call ("calls").
        tools: tool schemas, or a JSON file of them, for conversations without their own.
        chat_template: replaces the tokenizer's own: "chatml" (built in), a file, or the template's text.
        vocab_size: reject token ids at or above this.
        max_positions: reject rows with more tokens than this.
        limit: read at most this many rows (conversations) over all files.
        memory_map: an Arrow file to keep the rows in, for more rows than fit in memory. The rows are converted once,
            and again only when a file, the tokenizer, its template or a setting has changed. The trajectories are then
            read from the mapped file one by one (`MappedTrajectories`). Needs pyarrow. With several processes, one
            must call this first (`with args.main_process_first()` in transformers).

    Raises:
        DataError: a file or row that cannot be used; the message names file and line, and what to do.
    """
    formats = {kind.name: kind for kind in FORMATS}
    if view not in ("transcript", "calls") or format not in ("auto", *formats):
        known = "/".join(("auto", *formats))
        raise ValueError(f"format {format!r}, view {view!r}: known are {known} and transcript/calls")
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise DataError("no file given; pass at least one file")
    schemas = read_tools(Path(tools)) if isinstance(tools, str | os.PathLike) else clean_tools(tools)
    settings = ReadSettings(tokenizer=tokenizer, view=view, tools=schemas, chat_template=chat_template)
    kind = formats[detect_format(paths[0]) if format == "auto" else format]

    def check(row: Trajectory) -> None:
        _check_fits(row, vocab_size, max_positions)

    notes = Notes()
    rows = _trajectories(paths, kind, settings, check, limit, notes)
    if memory_map is None:
        trajectories: Sequence[Trajectory] = list(rows)
        return LoadedFile(trajectories=trajectories, notes=notes.lines(), format=kind.name)
    from treetrain.data.arrow import MappedTrajectories, files_key, read_about, write_trajectories

    key = files_key(
        paths,
        limit=limit,
        limits=[vocab_size, max_positions],
        format=kind.name,
        view=view,
        tools=schemas,
        tokenizer=None if tokenizer is None else tokenizer_settings(tokenizer, chat_template),
    )
    if (read_about(memory_map) or {}).get("key") != key:
        write_trajectories(memory_map, rows, lambda: {"key": key, "notes": notes.lines(), "format": kind.name})
    mapped = MappedTrajectories(memory_map)
    return LoadedFile(trajectories=mapped, notes=tuple(mapped.about["notes"]), format=mapped.about["format"])


def detect_format(path: str | os.PathLike[str]) -> str:
    """Detect the format of a file from its first record.

    Raises:
        DataError: the file cannot be read, or the record matches none of `FORMATS`.
    """
    place, record = next(read_records(path))
    for kind in FORMATS:
        if kind.matches(record):
            return kind.name
    known = " or ".join(f"{kind.wants} ({kind.name})" for kind in FORMATS)
    raise DataError(f"{place}: cannot tell the format: the row has {_keys(record)}; expected {known}")


def _keys(record: Record) -> str:
    return ", ".join(map(quoted, list(record)[:20])) or "no keys"


def _trajectories(
    paths: Sequence[str | os.PathLike[str]],
    kind: Format,
    settings: ReadSettings,
    check: Callable[[Trajectory], None],
    limit: int | None,
    notes: Notes,
) -> Iterator[Trajectory]:
    """The trajectories of all files, in order. Raises DataError with the place of the record."""
    read, count = None, 0
    for notes.place, record in (found for path in paths for found in read_records(path)):
        if limit is not None and count >= limit:
            notes.add(f"only the first {limit} rows are read; there are more", None)
            break
        count += 1
        try:
            read = read or kind.reader(settings)
            made = read(record, notes)
            for trajectory in made:
                check(trajectory)
        except DataError as error:
            raise DataError(f"{notes.place}: {error}") from error
        yield from made
    if count == 0:
        raise DataError(f"no rows were read (limit {limit}); give a limit of at least 1 or none")
    if kind is TOKENS and (settings.view, settings.chat_template, settings.tools) != ("transcript", None, None):
        notes.add("the rows are token ids already: view, chat template and tools have no effect", None)


def _check_fits(trajectory: Trajectory, vocab_size: int | None, max_positions: int | None) -> None:
    ids = trajectory.ids
    if vocab_size is not None and ids.size and int(ids.max()) >= vocab_size:
        at = int(ids.argmax())
        raise DataError(
            f"ids[{at}] = {ids[at]} is outside the model's vocabulary of {vocab_size} tokens; "
            "the rows were made for another model: pass that model, or its tokenizer"
        )
    if max_positions is not None and ids.size > max_positions:
        raise DataError(
            f"row {quoted(trajectory.id)} has {ids.size} tokens, the model has {max_positions} positions; "
            "rows are never cut or dropped for you: shorten it, take it out, or use a longer model"
        )
