"""Lines of a JSON Lines file, plain or gzipped, each with its number."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from treetrain.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of every line that is not blank.

    Args:
        path: the file; gzip is recognised by its name (`.gz`) or its first bytes.

    Raises:
        DataError: no such file, a damaged gzip stream, a line that is no JSON object, a file with no rows.
    """
    path = Path(path)
    rows = 0
    for number, line in _numbered_lines(path):
        if line.strip():
            rows += 1
            yield number, _parse_line(line, f"{path} line {number}")
    if rows == 0:
        raise DataError(f"{path}: the file is empty; expected one JSON object per line")


def _is_gzipped(path: Path, raw: IO[bytes]) -> bool:
    found = raw.read(2) == GZIP_MAGIC or path.suffix == ".gz"
    raw.seek(0)
    return found


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with open(path, "rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if _is_gzipped(path, raw) else raw
            for number, line in enumerate(lines, 1):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # the last is an OSError
        raise DataError(f"{path}: the gzip stream breaks off after line {number} ({error})") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    """The object of one line. Raises DataError, naming `place`."""
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
