"""Trajectories in a memory-mapped Arrow file, for more rows than fit in memory.

The file is written once, from rows that have been read and checked. It has one column per field and is not compressed.
So a row is read directly from the mapped file, and the operating system decides which pages are in memory.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treetrain.data.columns import GIVEN, RowColumns, codes_of, columns_of
from treetrain.data.records import files_of
from treetrain.data.trajectory import PER_TOKEN_FACTS, LazyTrajectories, Trajectory
from treetrain.errors import DataError

BATCH_TOKENS = 1 << 18
"""A record batch ends after about this many tokens, which bounds the memory for writing."""
LABELS = ("group", "pair", "episode", "key", "id")
_VERSION = 2
_ABOUT = b"treetrain"
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32()))]
    + [(name, pa.list_(pa.float64())) for name in PER_TOKEN_FACTS]
    + [("experts", pa.list_(pa.int16())), ("experts_shape", pa.list_(pa.int32()))]
    + [("reward", pa.float64()), ("chosen", pa.bool_())]
    + [(name, pa.string()) for name in LABELS]  # JSON: a label may be a string, a number or a boolean
    # For `RowColumns`, so that batches are planned without reading rows.
    + [("tokens", pa.int64()), ("trained", pa.bool_())]
)


class MappedTrajectories(LazyTrajectories):
    """The trajectories of a file written by `write_trajectories`, each read on access.

    It can be pickled: each DataLoader worker maps the file itself.

    Args:
        path: the Arrow file.

    Raises:
        DataError: the file is missing or incomplete, or another program wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        about = read_about(self.path)
        if about is None:
            raise DataError(f"{path} is no Arrow file of trajectories; give one that tt.load(..., cache=) wrote")
        self.about: dict[str, Any] = about
        """The writer's record: `notes` and `skipped`."""
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
        """Lengths, rewards, groups and so on of all rows, one array each, without reading the rows."""
        table = pa.Table.from_batches(self._batches, _SCHEMA)

        def numbers(name: str, missing: Any, dtype: type) -> NDArray:
            return pc.fill_null(table[name], missing).to_numpy().astype(dtype)

        return RowColumns(
            tokens=numbers("tokens", 0, np.int64),
            trained=numbers("trained", False, np.bool_),
            reward=numbers("reward", np.nan, np.float64),
            given={name: table[name].is_valid().to_numpy() for name in GIVEN},
            **{name: _codes(table[name]) for name in ("group", "pair", "episode", "key")},
        )


def write_trajectories(
    path: str | os.PathLike[str], rows: Iterable[Trajectory], about: Callable[[], dict[str, Any]]
) -> None:
    """Write an Arrow file next to `path` and move it to `path` when it is complete.

    Args:
        path: the file; its folder is created if needed. An existing file is replaced.
        rows: iterated once.
        about: returns JSON data to store with the rows; called after the last row.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
        with os.fdopen(handle, "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for batch in _batches(rows):
                writer.write_batch(batch)
            # The `about` record is with a last, empty batch, since the notes are complete only now.
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


def content_key(paths: Sequence[str | os.PathLike[str]], settings: Any) -> str:
    """A digest of the files' names and content, and of the settings they are read with.

    Raises:
        DataError: a file that cannot be read.
    """
    states = []
    for path in paths:
        try:
            for file in files_of(Path(path)):
                with open(file, "rb") as stream:
                    states.append([str(file), hashlib.file_digest(stream, "sha256").hexdigest()])
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return hashlib.sha256(json.dumps([_VERSION, states, settings], sort_keys=True, default=repr).encode()).hexdigest()


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
    columns |= {"tokens": facts.tokens, "trained": facts.trained}
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
    """Label numbers in the order of their first rows; -1 for none. Labels equal in Python (1, 1.0, True) share one."""
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes = codes_of(json.loads(text) for text in encoded.dictionary.to_pylist())
    found = pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)
    return np.append(codes, -1)[found]
