"""Read files record by record, and the interface of formats.

A format is one function that turns a record of a log into rows of our own two forms: token rows (`input_ids`) and
conversations (`messages`). `load` detects the format, opens the files, makes trajectories of the rows, and adds file
and line to every error.
"""

import dataclasses
import gzip
import io
import json
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, overload

import numpy as np

from treetrain.errors import DataError, quoted, shortened

View = Literal["transcript", "calls"]
Tools = list[dict[str, Any]] | None
NO_TOOLS: Literal["none"] = "none"
"""In place of tools: those of the conversations are left out."""
Record = Mapping[str, Any]

GROUP_KEYS = ("group_id", "group", "task_id")
EPISODE_KEYS = ("episode_id", "episode")
ROW_KEYS = ("reward", "id", "pair", "chosen", "key", *GROUP_KEYS, *EPISODE_KEYS)
"""Facts of a whole row, in token rows and conversations."""
FACT_KEYS = (*ROW_KEYS, "trial")

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The first bytes of a file say more than its name.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "zip"}
MAGIC |= {bytes((0x80, protocol)): "pickle" for protocol in range(2, 6)}
SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet", ".arrow": "arrow", ".eval": "zip", ".zip": "zip"}
IN_FOLDERS = (".jsonl", ".json", ".traj", ".ndjson", *SUFFIXES)
"""Files with these endings are read where a folder is given."""
CHUNK = 1 << 20


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
    tools: Tools | Literal["none"] = None
    chat_template: str | None = None
    train: Literal["all", "last"] = "all"
    images: Literal["refuse", "key"] = "refuse"


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A kind of record."""

    name: str
    wants: str
    """The keys it is recognised by, for messages."""
    matches: Callable[[Record], bool]
    """Whether a record is of this format."""
    convert: Callable[[Record, Notes], Iterable[Record]]
    """Turns a record into token rows and conversations. Raises DataError without the place; `load` adds it."""
    tokens: bool = False
    """Whether all of its rows are token ids already, so that no tokenizer is needed."""


# Fields of records


def look_up(record: Any, path: str) -> Any:
    """The value at a path of keys and list positions, such as `response.choices.0`; None if it is not there."""
    for name in path.split("."):
        if isinstance(record, Mapping):
            record = record.get(name)
        elif isinstance(record, list) and name.isdigit():
            record = record[int(name)] if int(name) < len(record) else None
        else:
            return None
    return record


@overload
def field(record: Any, path: str, kind: type[str]) -> str: ...
@overload
def field(record: Any, path: str, kind: type[list]) -> list[Any]: ...
@overload
def field(record: Any, path: str, kind: type[dict]) -> dict[str, Any]: ...
def field(record: Any, path: str, kind: type) -> Any:
    """The value at `path`, which must be of this kind. JSON text is parsed where a list or an object is expected.

    Raises:
        DataError: names the path, what was expected and what was found.
    """
    value = look_up(record, path)
    try:
        value = value if kind is str else parsed(value, strict=True)
    except DataError as error:
        raise DataError(f"`{path}`: {error}") from error
    if not isinstance(value, kind):
        found = "missing" if value is None else f"{quoted(value)}"
        names = {str: "text", list: "a list", dict: "an object"}
        raise DataError(f"`{path}` is {found}, expected {names[kind]}")
    return value


def objects(record: Any, path: str) -> list[dict[str, Any]]:
    """The list of objects at `path`; an empty list if there is none. Raises DataError for anything else."""
    if look_up(record, path) is None:
        return []
    values = field(record, path, list)
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"`{path}.{number}` is {quoted(value)}, expected an object")
    return values


def parsed(value: Any, *, strict: bool = False) -> Any:
    """Parse text that holds a JSON list or object, as tracing tools store them; other values stay as they are.

    So does JSON in which an object has a key twice, or with `strict` it raises DataError.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        if strict and isinstance(error, DataError):
            raise
        return value


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        DataError: an object that has a key twice, of which Python would keep the last.
        ValueError: broken JSON.
    """
    return _JSON.decode(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        first: dict[str, Any] = {}
        for name, value in pairs:
            if name in first:
                raise DataError(
                    f"an object has the key {quoted(name)} twice, with {quoted(first[name])} and {quoted(value)}; keep "
                    "one of them"
                )
            first[name] = value
    return record


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)


def facts(record: Record, *also: Record) -> dict[str, Any]:
    """The facts of a row that a record has under our names; those of the first record that has them."""
    return {name: one[name] for one in (*also[::-1], record) for name in FACT_KEYS if look_up(one, name) is not None}


def row_facts(row: Record, notes: Notes) -> dict[str, Any]:
    """Facts of the whole row as arguments of `Trajectory`; a row without an id is named by its place."""
    facts = {name: row.get(name) for name in ("reward", "pair", "chosen", "key")}
    facts["id"] = notes.place if row.get("id") is None else row["id"]
    return facts | {"group": first_of(row, *GROUP_KEYS), "episode": first_of(row, *EPISODE_KEYS)}


def first_of(record: Record, *names: str) -> Any:
    """The value of the first of these keys that is present and not null."""
    return next((record[name] for name in names if record.get(name) is not None), None)


# Files


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, Record | DataError]]:
    """Yield (place in words, record) for every record of a file or folder, and an error in place of one that is broken.

    Args:
        path: JSONL, one JSON file with an array or an object, Parquet, Arrow, or a zip of JSON files, each plain or
            compressed (gzip, zstd), recognised by its first bytes; or a folder of such files or of `datasets`.

    Raises:
        DataError: no such file, a damaged file, a file without records.
    """
    path, empty = Path(path), True
    try:
        for file in files_of(path):
            for found in _READERS.get(_kind(file), _read_text)(file):
                empty = False
                yield found
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({shortened(error.strerror or error)})") from error
    if empty:
        raise DataError(f"{path}: the file is empty; expected one JSON object per line")


def files_of(path: Path) -> list[Path]:
    """The files of a folder in order, or the file itself."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(found.name for found in path.iterdir() if found.is_dir())
        raise DataError(f"{path} holds the splits {', '.join(splits)}; name one of them, e.g. {path / splits[0]}")
    if (path / "state.json").exists():  # `datasets.save_to_disk`
        state = parsed((path / "state.json").read_text(encoding="utf-8"))
        return [path / field(entry, "filename", str) for entry in objects(state, "_data_files")]
    files = sorted(found for found in path.rglob("*") if found.is_file() and found.suffix in IN_FOLDERS)
    if not files:
        raise DataError(f"{path}: the folder holds no file that ends in {', '.join(IN_FOLDERS)}")
    return files


def _kind(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(8)
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    return found or SUFFIXES.get(path.suffix, "text")


def _read_text(path: Path, kind: str = "text") -> Iterator[tuple[str, Record | DataError]]:
    """JSONL; or JSON values over several lines, which are read whole."""

    def opened() -> Any:
        if kind == "gzip":
            return gzip.open(path, "rb")
        if kind == "zstd":
            import pyarrow as pa

            return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))  # type: ignore[arg-type]
        return open(path, "rb")

    at = [0]
    try:
        with opened() as stream:
            one_per_line = _is_jsonl(stream)
        if not one_per_line:
            with opened() as stream:
                content = stream.read()
            try:
                yield from _documents(content, path)
                return
            except _NoDocument:
                pass
        with opened() as stream:
            yield from _lines(stream, path, at)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip stream breaks off after line {at[0]} ({error})") from error


def _is_jsonl(stream: IO[bytes]) -> bool:
    """Whether the first or second line that is not blank is an object; a line that begins with [ is not read whole."""
    lines = (line for line in iter(lambda: stream.readline(CHUNK), b"") if line.strip())
    first = next(lines, b"{}").removeprefix(BYTE_ORDER_MARK).lstrip()
    if not first.startswith(b"{") or _is_object(first + (b"" if first.endswith(b"\n") else stream.readline())):
        return not first.startswith(b"[")
    return _is_object(next(lines, b""))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _lines(stream: IO[bytes], path: Path, at: list[int]) -> Iterator[tuple[str, Record | DataError]]:
    for number, line in enumerate(stream, 1):
        at[0] = number
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield f"{path} line {number}", _record(line, "Every line must be one whole JSON object")


def _record(data: bytes, hint: str) -> Record | DataError:
    """The object that the text of a line or a file is, or what is wrong with it."""
    try:
        return _object(parse_json(data.decode("utf-8")), hint)
    except DataError as error:
        return error
    except UnicodeDecodeError as error:
        return DataError(f"byte {error.start} is not UTF-8; save the file as UTF-8")
    except RecursionError:
        return DataError("JSON is nested too deeply to be read")
    except ValueError as error:
        begins = data[:40].decode("utf-8", "replace").strip()
        return DataError(f"broken JSON ({error}); the text begins {begins!r}. {hint}")


class _NoDocument(Exception):
    """The text does not begin with a JSON array or object."""


def _documents(content: bytes, path: Path) -> Iterator[tuple[str, Record | DataError]]:
    """The elements of a JSON array, or JSON objects one after the other, over any number of lines."""
    number, line, at, start = 0, 1, 0, 0
    try:
        text = content.decode("utf-8-sig")

        def skip(start: int) -> int:
            """The place of the next character that is no white space."""
            found = _BLANK.match(text, start)
            return found.end() if found else start

        start = skip(0)
        array = text.startswith("[", start)
        start = skip(start + array)
        while start < len(text) or array:
            if array and number:
                if not text.startswith((",", "]"), start):
                    raise ValueError("expected ',' or ']'")
                start = skip(start + 1) if text[start] == "," else start
            if array and text.startswith("]", start):
                if skip(start + 1) < len(text):
                    raise ValueError("more text after the end of the array")
                return
            value, end = _raw_decode(text, start)
            line, at = line + text.count("\n", at, start), start
            number += 1
            start = skip(end)
            place = f"{path} line {line}" + (f" element {number}" if array else "")
            try:
                yield place, _object(value, "Every element must be a JSON object")
            except DataError as error:
                yield place, error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        if number == 0:
            raise _NoDocument from error
        raise DataError(f"{path}: broken JSON after line {line} ({shortened(error)})") from error


_BLANK = re.compile(r"[ \t\r\n]*")


def _raw_decode(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, or the error about a key that it has twice; and its end."""
    try:
        return _JSON.raw_decode(text, start)
    except DataError as error:
        return error, json.JSONDecoder().raw_decode(text, start)[1]


def _object(value: Any, hint: str) -> dict[str, Any]:
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        names = {list: "array", str: "string", bool: "true/false", type(None): "null"}
        raise DataError(f"a JSON {names.get(type(value), 'number')}, expected an object. {hint}")
    return value


def _read_zip(path: Path) -> Iterator[tuple[str, Record | DataError]]:
    """Every JSON file of an archive is a record; of an Inspect log (`.eval`) the samples."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".json")]
            for name in [name for name in names if name.startswith("samples/")] or names:
                content = archive.read(name).removeprefix(BYTE_ORDER_MARK)
                yield f"{path} member {name}", _record(content, "Every file must be one JSON object")
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, RuntimeError) as error:
        raise DataError(f"{path}: the zip archive cannot be read ({shortened(error)})") from error


def _read_table(path: Path) -> Iterator[tuple[str, Record | DataError]]:
    """The rows of a Parquet or Arrow file (the file and the stream form)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        if _kind(path) == "parquet":
            batches: Iterable[Any] = pq.ParquetFile(path).iter_batches(batch_size=64)
        else:
            source = pa.memory_map(str(path))
            try:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pa.ArrowInvalid:
                batches = pa.ipc.open_stream(source)
        for batch in batches:
            for begin in range(0, batch.num_rows, 64):
                for row in batch.slice(begin, 64).to_pylist():
                    number += 1
                    yield f"{path} row {number}", without_nulls(row)
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read as {_kind(path)} ({shortened(error)})") from error


def without_nulls(value: Any) -> Any:
    """Drop null entries of objects: a table's columns give every object every key that any row has."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list) and isinstance(next((entry for entry in value if entry is not None), None), dict | list):
        return [without_nulls(entry) for entry in value]
    return value


class _DataProto:
    """The state of a pickled `verl.protocol.DataProto`."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads the arrays of a pickled DataProto. Nothing else is imported or called, so a pickle cannot run code."""

    known: ClassVar[dict[tuple[str, str], Any]] = {
        ("verl.protocol", "DataProto"): _DataProto,
        ("torch", "Size"): tuple,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }
    for core in ("core", "_core"):  # numpy's functions that make arrays, under their names in numpy 1 and 2
        known[f"numpy.{core}.multiarray", "_reconstruct"] = np.zeros(0).__reduce__()[0]
        known[f"numpy.{core}.multiarray", "scalar"] = np.float64(0).__reduce__()[0]
        known[f"numpy.{core}.numeric", "_frombuffer"] = np.zeros(1).__reduce_ex__(5)[0]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise DataError(f"the pickle holds {module}.{name}, which is not read: pickles can run code; write JSONL")
        return self.known[module, name]


def _read_dataproto(path: Path) -> Iterator[tuple[str, Record | DataError]]:
    """`DataProto.save_to_disk` of verl, one record with the batch as arrays."""
    try:
        with open(path, "rb") as file:
            batch, others, _ = _Unpickler(file).load().state
        if isinstance(batch, bytes):
            raise DataError(
                "the batch is stored by torch.save, which is not read: save it with VERL_DATAPROTO_SERIALIZATION_METHOD"
                "=numpy, or pass DataProto.load_from_disk(...) to tt.from_messages([...])"
            )
        arrays = {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in batch[2].items()}
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path}: is no DataProto of verl ({type(error).__name__}: {shortened(error)})") from error
    yield str(path), {"batch": arrays, "non_tensor_batch": others}


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Record | DataError]]]] = {
    "gzip": lambda path: _read_text(path, "gzip"),
    "zstd": lambda path: _read_text(path, "zstd"),
    "parquet": _read_table,
    "arrow": _read_table,
    "zip": _read_zip,
    "pickle": _read_dataproto,
}
