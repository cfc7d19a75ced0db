"""Files to trajectories."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from treetrain.data.chat import View, trajectories_from_chat_row
from treetrain.data.jsonl import read_jsonl
from treetrain.data.messages import clean_tools, read_tools
from treetrain.data.notes import Notes
from treetrain.data.rendering import Renderer
from treetrain.data.spans import Tools
from treetrain.data.token_rows import trajectory_from_token_row
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Format = Literal["tokens", "chat"]
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
    if view not in ("transcript", "calls") or format not in ("auto", "tokens", "chat"):
        raise ValueError(f"format {format!r}, view {view!r}: known are auto/tokens/chat and transcript/calls")
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise DataError("no file given; pass at least one JSONL file")
    notes = Notes()
    trajectories: list[Trajectory] = []
    found: Format | None = None if format == "auto" else format
    renderer = None
    schemas = _tools(tools)
    for place, row in _rows(paths, limit, notes):
        found = found or _format_of(row, place)
        if found == "tokens":
            made = [trajectory_from_token_row(row, place, notes)]
        else:
            renderer = renderer or _renderer(tokenizer, chat_template, place)
            made = trajectories_from_chat_row(row, renderer, place, view=view, tools=schemas, notes=notes)
        for trajectory in made:
            _check_fits(trajectory, place, vocab_size, max_positions)
        trajectories += made
    if found is None:
        raise DataError(f"no rows were read (limit {limit}); give a limit of at least 1 or none")
    if found == "tokens" and (view == "calls" or chat_template is not None or tools is not None):
        notes.add("the rows are token ids already: view, chat template and tools have no effect")
    return LoadedFile(trajectories=trajectories, notes=notes.lines(), format=found)


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


def _format_of(row: dict[str, Any], place: str) -> Format:
    if "input_ids" in row:
        return "tokens"
    if "messages" in row:
        return "chat"
    keys = ", ".join(map(repr, row)) or "no keys"
    raise DataError(
        f"{place}: cannot tell the format: the row has {keys}; expected `input_ids` (token rows) or `messages` (chat)"
    )


def _renderer(tokenizer: Any, chat_template: str | None, place: str) -> Renderer:
    if tokenizer is None:
        raise DataError(f"{place}: conversations need a tokenizer; pass --model or --tokenizer")
    return Renderer(tokenizer, chat_template)


def _tools(tools: Sequence[Any] | str | os.PathLike[str] | None) -> Tools:
    return read_tools(Path(tools)) if isinstance(tools, str | os.PathLike) else clean_tools(tools, "tools")


def _check_fits(trajectory: Trajectory, place: str, vocab_size: int | None, max_positions: int | None) -> None:
    ids = trajectory.ids
    if vocab_size is not None and ids.size and int(ids.max()) >= vocab_size:
        at = int(ids.argmax())
        raise DataError(
            f"{place}: ids[{at}] = {ids[at]} is outside the model's vocabulary of {vocab_size} tokens; "
            "the rows were made for another model: pass that model, or its tokenizer"
        )
    if max_positions is not None and ids.size > max_positions:
        raise DataError(
            f"{place}: row {trajectory.id!r} has {ids.size} tokens, the model has {max_positions} positions; "
            "rows are never cut or dropped for you: shorten it, take it out, or use a longer model"
        )
