"""Files to trajectories: which format they have, and what their rows must fit."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from treetrain.data.chat import View, trajectories_from_chat_row
from treetrain.data.jsonl import read_jsonl
from treetrain.data.messages import clean_tools, read_tools
from treetrain.data.notes import Notes
from treetrain.data.rendering import Renderer, chat_template_text
from treetrain.data.spans import Tools
from treetrain.data.token_rows import trajectory_from_token_row
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Format = Literal["tokens", "chat"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """What was read, and what the user should know about it."""

    trajectories: Sequence[Trajectory]
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
    memory_map: str | os.PathLike[str] | None = None,
) -> LoadedFile:
    """Read files of token rows or of conversations. Every row is read or refused, none is dropped.

    Args:
        path: one file or several of one format: JSONL, plain or gzipped, Parquet (`.parquet`) or Arrow (`.arrow`).
        tokenizer: a transformers tokenizer; needed for conversations only.
        format: "tokens" (`input_ids`), "chat" (`messages`), or "auto": what the first row has.
        view: conversations as whole transcripts or one row per LLM call ("calls").
        tools: schemas, or a JSON file of them, for conversations that bring none.
        chat_template: instead of the tokenizer's own: "chatml" (ours), a file, or the template's text.
        vocab_size: refuse token ids from here on.
        max_positions: refuse rows of more tokens.
        limit: read only the first so many rows (conversations) over all files.
        memory_map: an Arrow file to keep the rows in, for more rows than fit in memory. The rows are converted once,
            and again only when a file, the tokenizer, its template or a setting has changed; the trajectories are then
            read from the mapped file one by one (`MappedTrajectories`). Needs pyarrow. Of several processes let one
            call this first (`with args.main_process_first()` in transformers).

    Raises:
        DataError: naming file and line, what is wrong, both values and what to do.
    """
    maker = _RowMaker(
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
    rows = _trajectories(paths, maker, limit, notes)
    if memory_map is None:
        trajectories = list(rows)
        assert maker.format is not None
        return LoadedFile(trajectories=trajectories, notes=notes.lines(), format=maker.format)
    from treetrain.data.arrow import MappedTrajectories, files_key, read_about, write_trajectories

    key = files_key(paths, limit=limit, **maker.settings())
    if (read_about(memory_map) or {}).get("key") != key:
        write_trajectories(memory_map, rows, lambda: {"key": key, "notes": notes.lines(), "format": maker.format})
    mapped = MappedTrajectories(memory_map)
    return LoadedFile(trajectories=mapped, notes=tuple(mapped.about["notes"]), format=mapped.about["format"])


def no_file() -> DataError:
    """What is raised where no file is named."""
    return DataError("no file given; pass at least one file")


class _RowMaker:
    """Makes the trajectories of every object of some files of one format; its arguments are those of `load`."""

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        format: Literal["auto", "tokens", "chat"] = "auto",
        view: View = "transcript",
        tools: Sequence[Any] | str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        vocab_size: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        if view not in ("transcript", "calls") or format not in ("auto", "tokens", "chat"):
            raise ValueError(f"format {format!r}, view {view!r}: known are auto/tokens/chat and transcript/calls")
        self.format: Format | None = None if format == "auto" else format
        """None until the first row has told."""
        self.view: View = view
        self.schemas: Tools = (
            read_tools(Path(tools)) if isinstance(tools, str | os.PathLike) else clean_tools(tools, "tools")
        )
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self._tools_given = tools is not None
        self._renderer: Renderer | None = None

    def make(self, row: dict[str, Any], place: str, notes: Notes) -> list[Trajectory]:
        """The trajectories of one object, in the order of the file.

        Args:
            row: the object.
            place: where it is, for messages.
            notes: collects what was ignored or looks odd.

        Raises:
            DataError: naming `place`, what is wrong, both values and what to do.
        """
        self.format = self.format or _format_of(row, place)
        if self.format == "tokens":
            made = [trajectory_from_token_row(row, place, notes)]
        else:
            renderer = self._renderer_at(place)
            made = trajectories_from_chat_row(row, renderer, place, view=self.view, tools=self.schemas, notes=notes)
        for trajectory in made:
            _check_fits(trajectory, place, self.vocab_size, self.max_positions)
        return made

    def _renderer_at(self, place: str) -> Renderer:
        """The tokenizer with its template; DataError, naming `place`, where there is none."""
        if self._renderer is None:
            if self.tokenizer is None:
                raise DataError(f"{place}: conversations need a tokenizer; pass --model or --tokenizer")
            self._renderer = Renderer(self.tokenizer, self.chat_template)
        return self._renderer

    def settings(self) -> dict[str, Any]:
        """All that decides what rows become, as plain data: to tell whether they must be read again."""
        tokenizer = self.tokenizer
        if tokenizer is not None:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            vocabulary = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
            template = chat_template_text(self.chat_template) or getattr(tokenizer, "chat_template", None)
            tokenizer = [type(tokenizer).__name__, vocabulary, template, tokenizer.special_tokens_map]
        limits = [self.vocab_size, self.max_positions]
        about = {"format": self.format, "view": self.view, "tools": self.schemas}
        return about | {"limits": limits, "tokenizer": tokenizer}

    def remarks(self) -> tuple[str, ...]:
        """What of the settings had no effect."""
        chat_only = self.view == "calls" or self.chat_template is not None or self._tools_given
        if self.format != "tokens" or not chat_only:
            return ()
        return ("the rows are token ids already: view, chat template and tools have no effect",)


def _trajectories(
    paths: Sequence[str | os.PathLike[str]], maker: _RowMaker, limit: int | None, notes: Notes
) -> Iterator[Trajectory]:
    for place, row in _rows(paths, limit, notes):
        yield from maker.make(row, place, notes)
    if maker.format is None:
        raise DataError(f"no rows were read (limit {limit}); give a limit of at least 1 or none")
    notes.add_all(maker.remarks())


def _rows(
    paths: Iterable[str | os.PathLike[str]], limit: int | None, notes: Notes
) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = 0
    for path in paths:
        for place, row in read_rows_of_file(path):
            if limit is not None and rows >= limit:
                notes.add(f"only the first {limit} rows are read; there are more")
                return
            rows += 1
            yield place, row


def read_rows_of_file(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in words, object) of every row of a JSONL, Parquet or Arrow file."""
    path = Path(path)
    if path.suffix not in (".parquet", ".arrow"):
        for number, row in read_jsonl(path):
            yield f"{path} line {number}", row
        return
    import pyarrow.dataset

    number = 0
    try:
        table = pyarrow.dataset.dataset(path, format=path.suffix[1:])
        for batch in table.to_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({error})") from error
    if number == 0:
        raise DataError(f"{path}: the file has no rows")


def _format_of(row: dict[str, Any], place: str) -> Format:
    """What a row looks like. Raises DataError where it looks like neither."""
    if "input_ids" in row:
        return "tokens"
    if "messages" in row:
        return "chat"
    keys = ", ".join(map(repr, row)) or "no keys"
    raise DataError(
        f"{place}: cannot tell the format: the row has {keys}; expected `input_ids` (token rows) or `messages` (chat)"
    )


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
