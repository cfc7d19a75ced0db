"""Read files and folders record by record: JSON, Parquet and Arrow, compressed or in a zip archive.

Files may be damaged or hostile. No reader runs code from a file, follows a name out of its folder, or decompresses
without bound, and everything that is left out is an error or a counted remark.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from treetrain.core.errors import DataError, quoted, shortened
from treetrain.logs.killable import ChildError, Killable
from treetrain.logs.records import (
    DECODER,
    Json,
    Notes,
    Record,
    check_containers,
    field,
    has_many_containers,
    objects,
    parse_json,
    without_nulls,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import WriteableBuffer

Found = Iterator[tuple[str, Record | DataError]]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The first bytes of a file say more than its name.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
MAGIC |= {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "zip"}
MAGIC |= {bytes((0x80, protocol)): "pickle" for protocol in range(2, 6)}
SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz", ".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES |= {".eval": "zip", ".zip": "zip"}
PICKLES = dict.fromkeys((".pt", ".pth", ".pkl", ".pickle"), "pickle")
TEXTS = (".jsonl", ".json", ".traj", ".ndjson")
IN_FOLDERS = (*TEXTS, *SUFFIXES)
"""Files with these endings, in any case, are read where a folder is given."""

CHUNK = 1 << 20
LINE_BYTES = 1 << 28
"""A longer line is an error."""
DOCUMENT_BYTES = 1 << 30
"""JSON over several lines is read whole; more than this is an error."""
BLANK_LINES = 1_000_000
"""More blank lines than this, one after the other, are an error."""
TABLE_BYTES = 1 << 32
"""64 rows of Parquet, or a batch of Arrow, that take more memory are an error: run lengths need few bytes in a file."""
BOMB_BYTES = 1 << 26
BOMB_RATIO = 500
"""A compressed file that gives more than `BOMB_BYTES`, and more than this many times its size, is an error."""


def read_records(path: str | os.PathLike[str], notes: Notes | None = None) -> Found:
    """Yield (place in words, record) for every record of a file or folder, and an error in place of one that is broken.

    Args:
        path: JSONL, one JSON file with an array or an object, Parquet, Arrow, or a zip of JSON files, each plain or
            compressed (gzip, zstd, bzip2, xz), recognised by its first bytes; or a folder of such files or of
            `datasets`.
        notes: receives remarks on files that are left out.

    Raises:
        DataError: no such file, a pipe, a damaged file, a file without records, a file that decompresses without bound.
    """
    if not os.fspath(path):
        raise DataError("the path is empty; give a file or a folder")
    given = os.fspath(path)
    path = Path(path)
    notes = notes or Notes()
    empty = True
    try:
        for file in _files_of(path, notes):
            kind, found = _kind(file), None
            for found in _READERS.get(kind, _read_text)(file, kind, notes):
                yield found
            empty = empty and found is None
            if found is None and file != path:
                notes.add("a file has no records", str(file))
    except FileNotFoundError as error:
        raise DataError(f"{error.filename or path}: there is no such file{_elsewhere(given)}") from error
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({shortened(error.strerror or error)})") from error
    if empty:
        raise DataError(f"{path}: there are no records in it")


def _elsewhere(path: str) -> str:
    """Advice on a source that is no file: standard input, an address, or the name of a data set on the hub."""
    if path in ("-", "/dev/stdin"):
        return "; standard input is not read, since a file is read twice: write it to a file"
    if "://" in path:
        kind = "parquet" if path.endswith(".parquet") else "json"
        call = f'datasets.load_dataset("{kind}", data_files={path!r}, split="train")'
    elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and Path(path).suffix not in IN_FOLDERS:
        call = f'datasets.load_dataset({path!r}, split="train")'
    else:
        return ""
    return f"; for data elsewhere write it to a file, or in Python: tt.from_messages({call}, tokenizer=...)"


# Which files


def _files_of(path: Path, notes: Notes) -> list[Path]:
    """The files of a folder in order, or the file itself."""
    if not path.is_dir():
        return [path]
    left: list[Path] = []
    files = _in_folder(path, left)
    named = _listed([str(one.relative_to(path)) for one in left])
    if not files:
        others = f"; it holds {named}" if left else ""
        raise DataError(f"{path}: the folder holds no file that ends in {', '.join(IN_FOLDERS)}{others}")
    if left:
        notes.add(f"{path}: {len(left)} files are not read, since they have other endings: {named}", None)
    return files


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _in_folder(path: Path, left: list[Path]) -> list[Path]:
    """The files to read of a folder and the folders in it; `left` receives the others."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(found.parent for found in path.glob("*/state.json"))
        names = ", ".join(split.name for split in splits)
        raise DataError(
            f"{path} holds the splits {names}; name one of them, e.g. {splits[0]}"
            if splits
            else f"{path}: dataset_dict.json is there, but no split; save the dataset again"
        )
    if (path / "dataset_info.json").exists() and (path / "state.json").exists():  # `datasets.save_to_disk`
        return _of_dataset(path)
    files: list[Path] = []
    for found in sorted(path.iterdir()):
        if found.is_dir() and not found.is_symlink():
            files += _in_folder(found, left)
        elif found.suffix.lower() in IN_FOLDERS:
            _check_link(found, path)
            files.append(found)
        else:
            left.append(found)
    return files


def _of_dataset(path: Path) -> list[Path]:
    state = path / "state.json"
    record = _record(state.read_bytes(), "")
    try:
        if isinstance(record, DataError):
            raise record
        names = [field(entry, "filename", str) for entry in objects(record, "_data_files")]
        if not names:
            raise DataError("`_data_files` names no file; save the dataset again")
        for name in names:
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise DataError(f"`_data_files` names {quoted(name)}, which is no file of this folder")
    except DataError as error:
        raise DataError(f"{state}: {error}") from error
    for name in names:
        _check_link(path / name, path)
    return [path / name for name in names]


def _check_link(file: Path, folder: Path) -> None:
    """Raise DataError for a link that leads out of the folder; huggingface_hub's lead to the blobs beside it."""
    if not file.is_symlink():
        return
    inside = [folder.resolve()]
    inside += [parent.parent / "blobs" for parent in folder.resolve().parents if parent.name == "snapshots"]
    if not any(file.resolve().is_relative_to(one) for one in inside):
        raise DataError(
            f"{file} is a link to {quoted(os.readlink(file))}, out of the folder; name its file if it is meant"
        )


def _kind(path: Path) -> str:
    """The key of a reader.

    A pipe gives its content only once, and several readers would share it, so it is refused.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{path}: is a folder, a pipe or a device, which cannot be read twice; write it to a file")
    with open(path, "rb") as file:
        start = file.read(8)
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    found = found or (SUFFIXES | PICKLES).get(path.suffix.lower(), "text")
    if found == "pickle":
        raise _pickle(path)
    return found


def _pickle(path: Path) -> DataError:
    return DataError(
        f"{path}: is a pickle, as torch.save and verl's DataProto.save_to_disk write them. Reading one can run any "
        "code, so it is not read; docs/data.md shows how to write it as Parquet"
    )


def write_file(path: str | os.PathLike[str], text: str | bytes, *, begins: str = "") -> Path:
    """Write a file, or replace one that begins like the text, whole; returns its path.

    Args:
        begins: the first characters of the text. A file without them is another's, and is not replaced.

    Raises:
        DataError: there is a link, a folder, or a file that begins otherwise.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise DataError(f"{path} is a link to {quoted(os.readlink(path))}, which is not written to; give another name")
    if path.exists():
        if not path.is_file():
            raise DataError(f"{path} is no file, and is not written to; give another name")
        with open(path, "rb") as file:
            if (start := file.read(len(begins.encode()))) and start != begins.encode():
                raise DataError(f"{path} is there, and treetrain did not write it; give another name, or delete it")
    temporary = path.with_name(f".{os.getpid()}.{path.name}"[-200:])
    temporary.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", errors="backslashreplace"))
    os.replace(temporary, path)
    return path


# JSON


class _TooMuch(Exception):
    """A stream gives more than is read; the message says what."""


class _Decompressed(io.RawIOBase):
    """The bytes that a compressed stream gives, up to the bounds on bombs.

    Args:
        stream: gives decompressed bytes.
        compressed: size of the file in bytes.
        before: bytes that earlier members of the file gave.
    """

    def __init__(self, stream: Any, compressed: int, before: int = 0) -> None:
        self.stream = stream
        self.compressed = compressed
        self.given = before

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        count = self.stream.readinto(buffer)
        self.given += count
        if self.given > max(BOMB_BYTES, BOMB_RATIO * self.compressed):
            raise _TooMuch(
                f"{self.compressed:,} bytes decompress to more than {self.given:,}; if they are meant to, decompress "
                "the file first"
            )
        return count


def _zstd(path: Path) -> "pa.NativeFile":
    import pyarrow as pa

    return pa.input_stream(str(path), compression="zstd")


_OPEN: dict[str, Callable[[Path], Any]] = {"gzip": gzip.open, "zstd": _zstd, "bzip2": bz2.open, "xz": lzma.open}


def _read_text(path: Path, kind: str, notes: Notes) -> Found:
    if kind == "text":
        with open(path, "rb") as stream:
            yield from _texts(stream, str(path))
    else:
        with _OPEN[kind](path) as stream:
            bounded = _Decompressed(stream, path.stat().st_size)
            yield from _texts(io.BufferedReader(bounded, CHUNK), str(path))


def _texts(stream: io.BufferedReader, name: str) -> Found:
    """The records of JSONL, or of JSON values over several lines, which are read whole.

    It is JSONL if the first or second line that is not blank is an object, or if the text begins with no { or [.
    """
    number, lines = 0, _lines(stream, name)
    try:
        # An array may be one line of any length.
        array = stream.peek(CHUNK).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        head: list[tuple[int, bytes]] = []
        for number, line in islice(lines, 0 if array else 2):
            head.append((number, line))
        begins = b"".join(line.lstrip()[:1] for _, line in head[:1])
        if array or begins == b"[" or (begins == b"{" and not any(_is_object(line) for _, line in head)):
            text = b""
            for place, line in head:
                text += b"\n" * (place - 1 - text.count(b"\n")) + line
            text += stream.read(max(DOCUMENT_BYTES + 1 - len(text), 0))
            if len(text) > DOCUMENT_BYTES:
                raise _TooMuch(f"JSON over several lines has more than {DOCUMENT_BYTES:,} bytes; write JSONL")
            if (yield from _documents(text, name)):
                return
            head[:] = _lines(io.BytesIO(text), name)
        for number, line in chain(head, lines):
            yield f"{name} line {number}", _record(line, "Every line must be one whole JSON object")
    except _TooMuch as error:
        raise DataError(f"{name} line {number + 1}: {error}") from error
    except (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise DataError(f"{name}: breaks off after line {number} ({shortened(error)})") from error


def _lines(stream: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers from 1."""
    number = blank = 0
    try:
        while line := stream.readline(LINE_BYTES + 1):
            blank = 0 if line.strip() else blank + 1
            if len(line) > LINE_BYTES:
                raise _TooMuch(f"the line has more than {LINE_BYTES:,} bytes; write one record per line")
            if blank > BLANK_LINES:
                raise _TooMuch(f"more than {BLANK_LINES:,} blank lines one after the other")
            number += 1
            if not blank:
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except _TooMuch as error:
        raise DataError(f"{name} line {number + 1}: {error}") from error


def _is_object(line: bytes) -> bool:
    try:
        text = line.decode("utf-8")
        if has_many_containers(text):
            check_containers(text)
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


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


_BLANK = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_END, _END_OF_ARRAY = re.compile(r"[ \t\r\n]*\Z"), re.compile(r"[ \t\r\n]*\][ \t\r\n]*\Z")


def _documents(content: bytes, name: str) -> Generator[tuple[str, Record | DataError], None, bool]:
    """The elements of a JSON array, or JSON objects one after the other, over any number of lines.

    Returns whether there were any; the first value may be broken, or the text not be UTF-8.
    """
    number = at = counted = 0
    line, array = 1, content.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
    try:
        text = content.decode("utf-8-sig")
        large = has_many_containers(text)
        at = text.index("[") + 1 if array else 0
        while not (_END_OF_ARRAY if array else _END).match(text, at):
            between = (_COMMA if array and number else _BLANK).match(text, at)
            if between is None:
                raise ValueError("expected ',', or ']' at the end of the text")
            if large:
                check_containers(text, between.end())
            value, at = _raw_decode(text, between.end())
            line, counted = line + text.count("\n", counted, between.end()), between.end()
            number += 1
            place = f"{name} line {line}" + (f" element {number}" if array else "")
            try:
                yield place, _object(value, "Every element must be a JSON object")
            except DataError as error:
                yield place, error
    except DataError as error:
        line += text.count("\n", counted, at)
        raise DataError(f"{name} line {line}: {error}") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        if number == 0:
            return False
        raise DataError(f"{name}: broken JSON after line {line} ({shortened(error)})") from error
    return True


def _raw_decode(text: str, start: int) -> tuple[Json | DataError, int]:
    """The value that begins at `start`, or the error about a key that it has twice; and its end."""
    try:
        return DECODER.raw_decode(text, start)
    except DataError as error:
        return error, json.JSONDecoder().raw_decode(text, start)[1]


def _object(value: Json | DataError, hint: str) -> dict[str, Json]:
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        names = {list: "array", str: "string", bool: "true/false", type(None): "null"}
        raise DataError(f"a JSON {names.get(type(value), 'number')}, expected an object. {hint}")
    return value


# Archives, tables, pickles


def _read_zip(path: Path, kind: str, notes: Notes) -> Found:
    """The members of an archive that are JSON or JSONL; of an Inspect log (`.eval`) the samples."""
    given = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for member in _members(path, archive, notes):
                with archive.open(member) as stream:
                    bounded = _Decompressed(stream, path.stat().st_size, given)
                    yield from _texts(io.BufferedReader(bounded, CHUNK), f"{path} member {member.filename}")
                    given = bounded.given
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: the zip archive cannot be read ({shortened(error)})") from error


def _members(path: Path, archive: zipfile.ZipFile, notes: Notes) -> list[zipfile.ZipInfo]:
    """The members to read; a remark counts the others, except in a log of Inspect, which has known ones."""
    files = [member for member in archive.infolist() if member.filename and not member.is_dir()]
    names = {member.filename for member in files}
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):  # written by torch.save
        raise _pickle(path)
    texts = [member for member in files if member.filename.lower().endswith(TEXTS)]
    texts = [member for member in texts if not member.filename.startswith("__MACOSX/")]
    if "header.json" in names or any(name.startswith("_journal/") for name in names):
        return [member for member in texts if member.filename.startswith("samples/")]
    others = [member.filename for member in files if member not in texts]
    named = _listed(others)
    if not texts:
        raise DataError(f"{path}: no member ends in {', '.join(TEXTS)}; the archive holds {named or 'no file'}")
    if others:
        notes.add(f"{path}: {len(others)} members are not read, since they have other endings: {named}", None)
    return texts


def _read_table(path: Path, kind: str, notes: Notes) -> Found:
    """The rows of a Parquet or Arrow file (the file and the stream form), which a process of its own reads."""
    import pyarrow.parquet  # noqa: F401  # before the fork, so that the next file has it too

    number = 0
    given = 0
    size = path.stat().st_size
    read: Killable[tuple[list[str], list[Any], int] | None] = Killable(
        partial(next, _table(path, kind), None), TABLE_BYTES
    )
    try:
        while (found := read(0)) is not None:
            names, rows, count = found
            given += count
            if given > max(BOMB_BYTES, BOMB_RATIO * size):
                raise DataError(f"{size:,} bytes decompress to more than {given:,}; write smaller files")
            for row in rows:
                number += 1
                yield f"{path} row {number}", without_nulls(dict(zip(names, row)))
    except MemoryError as error:
        raise DataError(f"{path}: the rows after {number} take more than {TABLE_BYTES:,} bytes; write JSONL") from error
    except (DataError, ChildError) as error:
        said = shortened(error.text if isinstance(error, ChildError) else error)
        raise DataError(f"{path}: cannot be read as {kind} after row {number} ({said})") from error


def _table(path: Path, kind: str) -> Iterator[tuple[list[str], list[Any], int]]:
    """Names of columns, the values of at most 64 rows, and their bytes as Arrow's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Threads do not survive a fork, and their stacks count as memory.
    alone = pa.ipc.IpcReadOptions(use_threads=False)
    # Not memory-mapped: a file that another program cuts off would end the process.
    with pa.OSFile(str(path)) as source:
        if kind == "parquet":
            parquet = pq.ParquetFile(source)
            schema, batches = parquet.schema_arrow, parquet.iter_batches(64, use_threads=False)
        else:
            try:
                reader = pa.ipc.open_file(source, options=alone)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pa.ArrowInvalid:
                source.seek(0)
                batches = reader = pa.ipc.open_stream(source, options=alone)
            schema = reader.schema
        _check_columns(schema.names)
        for batch in batches:
            batch.validate(full=True)
            columns = [(name, _readable(name, column)) for name, column in zip(schema.names, batch.columns)]
            for begin in range(0, batch.num_rows, 64):
                yield schema.names, *_rows(columns, begin)


def _check_columns(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"the column {quoted(twice)} is there twice; keep one of them")


def _readable(name: str, column: "pa.Array") -> "pa.Array":
    """The column with dates and times as the integers that they are stored as.

    Python has no dates after the year 9999, no nanoseconds and not all time zones.
    """
    import pyarrow as pa

    try:
        plain = _without_times(column.type)
        return column if plain == column.type else column.cast(plain)
    except pa.ArrowException as error:
        raise DataError(f"column {quoted(name)} of type {column.type} ({shortened(error)})") from error


def _without_times(kind: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    if pa.types.is_run_end_encoded(kind):
        raise DataError(f"{kind} has no bound on its length; write it decoded")
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        _check_columns([one.name for one in fields])
        return pa.struct([one.with_type(_without_times(one.type)) for one in fields])
    for test, made in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if test(kind):
            return made(kind.value_field.with_type(_without_times(kind.value_type)))
    return kind


def _rows(columns: "list[tuple[str, pa.Array]]", begin: int) -> tuple[list[tuple[object, ...]], int]:
    """64 rows of a batch as Python values, and their bytes as Arrow's."""
    values, count = [], 0
    for name, column in columns:
        try:
            part = column.slice(begin, 64)
            part = part.dictionary_decode() if hasattr(part, "dictionary_decode") else part
            values.append(part.to_pylist())
            count += part.nbytes
        except MemoryError:
            raise
        except Exception as error:  # types that Python does not have
            raise DataError(f"column {quoted(name)} of type {column.type} ({shortened(error)})") from error
    return list(zip(*values)), count


_READERS: dict[str, Callable[[Path, str, Notes], Found]] = {
    "zip": _read_zip,
    "parquet": _read_table,
    "arrow": _read_table,
}
"""Readers by kind; all other kinds are texts."""
