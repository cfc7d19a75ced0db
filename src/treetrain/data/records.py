"""Read files record by record, and the interface of record readers.

A reader turns one record into trajectories. A format is a reader with a test of whether a record belongs to it. `load`
lists the formats, opens the files, and adds file and line to a reader's errors.
"""

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError, quoted

View = Literal["transcript", "calls"]
Tools = list[dict[str, Any]] | None
Record = Mapping[str, Any]

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Notes:
    """Remarks for the user, none an error; the same remark from many records becomes one line."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        """File and line of the current record."""
        self._count: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, text: str, where: str | None = "") -> None:
        """Add a remark on the current record; `where` names a part of it, None means no record."""
        self._first.setdefault(text, "" if where is None else f"{self.place} {where}".strip())
        self._count[text] = self._count.get(text, 0) + 1

    def unused_keys(self, record: Record, known: frozenset[str]) -> None:
        """Remark on the keys that a reader does not know."""
        for name in record:
            if name not in known:
                self.add(f"key {quoted(name)} is not used")

    def lines(self) -> tuple[str, ...]:
        """One line per remark, with its count and the first place."""
        lines = []
        for text, count in self._count.items():
            first = self._first[text]
            where = "" if not first else f" ({first})" if count == 1 else f" ({count} times, first: {first})"
            lines.append(text + where)
        return tuple(lines)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """How records become rows; see `load` for each field."""

    tokenizer: Any = None
    view: View = "transcript"
    tools: Tools = None
    chat_template: str | None = None


Reader = Callable[[Record, Notes], list[Trajectory]]
"""Turns a record into trajectories. Raises DataError without the place; `load` adds `Notes.place`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A kind of record and its reader."""

    name: str
    wants: str
    """The required keys, for messages."""
    matches: Callable[[Record], bool]
    """Whether a record is of this format."""
    reader: Callable[[ReadSettings], Reader]
    """Creates the reader; called once per `load`, at the first record."""


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place in words, record) for every row of a JSONL, Parquet or Arrow file.

    Raises:
        DataError: no such file, a damaged file, a line that is not a JSON object, a file without rows.
    """
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


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for every line that is not blank.

    Args:
        path: the file; gzip is recognised by its name (`.gz`) or its first bytes.
    """
    path = Path(path)
    rows = number = 0
    try:
        with open(path, "rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if _is_gzipped(path, raw) else raw
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if line.strip():
                    rows += 1
                    yield number, _parse_line(line, f"{path} line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # the last is an OSError
        raise DataError(f"{path}: the gzip stream breaks off after line {number} ({error})") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if rows == 0:
        raise DataError(f"{path}: the file is empty; expected one JSON object per line")


def _is_gzipped(path: Path, raw: IO[bytes]) -> bool:
    found = raw.read(2) == GZIP_MAGIC or path.suffix == ".gz"
    raw.seek(0)
    return found


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON is nested too deeply to be read") from error
    except ValueError as error:
        text = line[:40].decode("utf-8", "replace").strip()
        raise DataError(f"{place}: broken JSON ({error}); the line begins {text!r}. {_ONE_PER_LINE}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON {_JSON_NAMES.get(type(row), 'number')}, expected an object. {_ONE_PER_LINE}")
    return row


_ONE_PER_LINE = "Every line must be one whole JSON object"
_JSON_NAMES = {list: "array", str: "string", bool: "true/false", type(None): "null"}
