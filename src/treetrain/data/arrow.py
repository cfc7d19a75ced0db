"""Trajectories in a memory-mapped Arrow file, for more rows than fit in memory.

The file is written once, from rows that have been read and checked. It has one column per field and is not compressed,
so a row is read directly from the mapped file, and the operating system decides which pages are in memory.

A cache has one such file for every CHUNK records, named by their content and made in several processes if that is asked
for. A chunk whose file is there is not converted again, so a log that has grown, or is read again with the same
settings, costs what is new in it.
"""

import copy
import hashlib
import json
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treetrain.data.columns import GIVEN, RowColumns, codes_of, columns_of
from treetrain.data.trajectory import PER_TOKEN_FACTS, LazyTrajectories, Trajectory
from treetrain.errors import DataError

BATCH_TOKENS = 1 << 18
"""A record batch ends after this many tokens, which bounds the memory for writing."""
CHUNK = 256
"""Records of a file of the cache."""
Convert = Callable[[list[Any]], tuple[list[Trajectory], dict[str, Any]]]
"""Makes rows of records, and JSON data about them. A copy of it, and a pickled one, starts anew."""
LABELS = ("group", "pair", "episode", "key", "id")
_VERSION = 1
_ABOUT = b"treetrain"
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32()))]
    + [(name, pa.list_(pa.float64())) for name in PER_TOKEN_FACTS]
    + [("experts", pa.list_(pa.int16())), ("experts_shape", pa.list_(pa.int32()))]
    + [("reward", pa.float64()), ("chosen", pa.bool_())]
    + [(name, pa.string()) for name in LABELS]  # JSON: a label may be a string, a number or a boolean
    # `RowColumns` needs these: batches are planned from them without reading rows.
    + [("tokens", pa.int64()), ("weight", pa.float64())]
    + [(name, pa.bool_()) for name in ("trained", "negative", "signal")]
)


class MappedTrajectories(LazyTrajectories):
    """The trajectories of a file written by `write_trajectories`, each read on access.

    It can be pickled: each DataLoader worker maps the file itself.

    Args:
        path: the Arrow file.

    Raises:
        DataError: there is no such file, it is incomplete, or another program wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        about = read_about(self.path)
        if about is None:
            raise DataError(f"{path} is no Arrow file of trajectories; give one that tt.load(..., memory_map=) wrote")
        self.about: dict[str, Any] = about
        """The writer's record: `key`, `notes` and `format`."""
        reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, number: int) -> Trajectory:
        """Row 0 to K - 1."""
        return _trajectory(*self._place(number))

    def ids(self, number: int) -> NDArray[np.int32]:
        """Token ids of row 0 to K - 1, a view of the mapped file."""
        batch, place = self._place(number)
        return batch.column("input_ids")[place].values.to_numpy()

    def _place(self, number: int) -> tuple[Any, int]:
        batch = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._batches[batch], number - int(self._starts[batch])

    def __reduce__(self) -> tuple[type["MappedTrajectories"], tuple[Path]]:
        return MappedTrajectories, (self.path,)

    @cached_property
    def columns(self) -> RowColumns:
        """Lengths, weights, groups and so on of all rows, one array each, without reading the rows."""
        table = pa.Table.from_batches(self._batches, _SCHEMA)

        def numbers(name: str, missing: Any, dtype: type) -> NDArray:
            return pc.fill_null(table[name], missing).to_numpy().astype(dtype)

        return RowColumns(
            tokens=numbers("tokens", 0, np.int64),
            weight=numbers("weight", 0.0, np.float64),
            trained=numbers("trained", False, np.bool_),
            negative=numbers("negative", False, np.bool_),
            signal=numbers("signal", False, np.bool_),
            reward=numbers("reward", np.nan, np.float64),
            chosen=pc.fill_null(pc.cast(table["chosen"], pa.int8()), -1).to_numpy(),
            given={name: table[name].is_valid().to_numpy() for name in GIVEN},
            **{name: _codes(table[name]) for name in ("group", "pair", "episode", "key")},
        )


def write_trajectories(
    path: str | os.PathLike[str], rows: Iterable[Trajectory], about: Callable[[], dict[str, Any]]
) -> None:
    """Write an Arrow file next to `path` and move it to `path` when it is complete.

    Args:
        path: the file; its folder is created if needed. An existing file of trajectories is replaced.
        rows: iterated once.
        about: returns JSON data to store with the rows; called after the last row.

    Raises:
        DataError: the file cannot be written, or `path` is a file of another kind.
    """
    path = Path(path)
    if path.exists() and read_about(path) is None:
        raise DataError(f"{path} exists and is no Arrow file of trajectories; it is not overwritten: name another file")
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
        with os.fdopen(handle, "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for batch in _batches(rows):
                writer.write_batch(batch)
            # The last batch is empty and holds the record, since the notes are complete only now.
            writer.write_batch(_batch([]), {_ABOUT: json.dumps(about()).encode()})
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: the rows cannot be written there ({error.strerror or error}); make room") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def read_about(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The `about` record of `write_trajectories`; None if there is no complete file of this kind."""
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.num_record_batches == 0 or reader.schema != _SCHEMA:
                return None
            _, recorded = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
            return json.loads(recorded[_ABOUT]) if recorded is not None and _ABOUT in recorded else None
    except (OSError, ValueError):  # pyarrow's ArrowInvalid is a ValueError
        return None


def files_key(paths: Sequence[str | os.PathLike[str]], **settings: Any) -> str:
    """A digest of the files' state (name, size, modification time) and of the settings they are read with.

    Raises:
        DataError: a file that cannot be read.
    """
    states = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        states.append([str(path), os.path.abspath(path), found.st_size, found.st_mtime_ns])
    text = json.dumps([_VERSION, states, settings], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _batches(rows: Iterable[Trajectory]) -> Iterator[Any]:
    pending: list[Trajectory] = []
    tokens = 0
    for row in rows:
        pending.append(row)
        tokens += len(row) + 1
        if tokens >= BATCH_TOKENS:
            yield _batch(pending)
            pending, tokens = [], 0
    if pending:
        yield _batch(pending)


def _batch(rows: list[Trajectory]) -> Any:
    facts = columns_of(rows)
    columns: dict[str, Any] = {"input_ids": [row.ids for row in rows]}
    columns |= {name: [getattr(row, name) for row in rows] for name in (*PER_TOKEN_FACTS, "reward", "chosen")}
    columns["experts"] = [None if row.experts is None else row.experts.ravel() for row in rows]
    columns["experts_shape"] = [None if row.experts is None else row.experts.shape[1:] for row in rows]
    for name in LABELS:
        labels = [getattr(row, name) for row in rows]
        columns[name] = [None if label is None else json.dumps(label) for label in labels]
    columns |= {name: getattr(facts, name) for name in ("tokens", "weight", "trained", "negative", "signal")}
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)


def _trajectory(batch: Any, number: int) -> Trajectory:
    facts: dict[str, Any] = {}
    for name in (*PER_TOKEN_FACTS, "experts", "experts_shape", "input_ids"):
        value = batch.column(name)[number]
        facts[name] = value.values.to_numpy() if value.is_valid else None
    ids, shape = facts.pop("input_ids"), facts.pop("experts_shape")
    if shape is not None:
        facts["experts"] = facts["experts"].reshape(len(ids), *shape)
    facts |= {name: batch.column(name)[number].as_py() for name in ("reward", "chosen")}
    for name in LABELS:
        text = batch.column(name)[number].as_py()
        facts[name] = None if text is None else json.loads(text)
    return Trajectory(ids, **facts)


def _codes(column: Any) -> NDArray[np.int64]:
    """Equal numbers for labels that are equal in Python (1, 1.0 and True are), in the order of their first rows."""
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes = codes_of(json.loads(text) for text in encoded.dictionary.to_pylist())
    found = pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)
    return np.append(codes, -1)[found]


# The cache


def converted(
    records: Iterable[Any], convert: Convert, settings: Any, folder: str | os.PathLike[str] | None, processes: int
) -> Iterator[MappedTrajectories]:
    """Yield the rows of every CHUNK records, in order, with what `convert` says about them.

    Args:
        records: (place, record) each; at most a few chunks are in memory.
        convert: may be called in other processes.
        settings: what the rows depend on besides the records; plain data.
        folder: where the files stay; None: they are removed at the end.
        processes: 1 converts in this process.
    """
    here = copy.copy(convert)
    remaining, waiting = iter(records), deque[tuple[Path, Future[None] | None]]()
    with ExitStack() as stack:
        kept = Path(folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="treetrain-")))
        pool = None
        if processes > 1:
            # Not forked: the tokenizer has threads.
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, spawn, _start, (convert,)))
        while True:
            while len(waiting) < 2 * processes and (chunk := list(islice(remaining, CHUNK))):
                text = json.dumps([settings, chunk], sort_keys=True, default=repr)
                path = kept / f"{hashlib.sha256(text.encode(errors='replace')).hexdigest()}.arrow"
                if read_about(path) is not None:
                    waiting.append((path, None))
                elif pool is None:
                    _write(path, chunk, here)
                    waiting.append((path, None))
                else:
                    waiting.append((path, pool.submit(_write_there, path, chunk)))
            if not waiting:
                return
            path, future = waiting.popleft()
            if future is not None:
                future.result()
            yield MappedTrajectories(path)


def _write(path: Path, chunk: list[Any], convert: Convert) -> None:
    rows, about = convert(chunk)
    write_trajectories(path, rows, lambda: about)


_CONVERT: list[Convert] = []
"""In a worker: what it was started with."""


def _start(convert: Convert) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    _CONVERT[:] = [convert]


def _write_there(path: Path, chunk: list[Any]) -> None:
    _write(path, chunk, _CONVERT[0])
