"""An index of the rows of files that do not fit in memory: where each is, and what planning needs to know of it.

Made in one pass, in which every row is read and checked as `load` does it; a few numbers of each are kept.
"""

import dataclasses
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.byte_ranges import FileState, Range, count_lines, lines_of, ranges_of
from treetrain.data.columns import GIVEN, Int64s, StoredColumns, weight_facts
from treetrain.data.digest import DIGEST_BYTES, array_digest, row_digest
from treetrain.data.exchange import Exchange
from treetrain.data.jsonl import empty_file, parse_line
from treetrain.data.labels import NO_LABEL, label_digest
from treetrain.data.notes import Notes
from treetrain.data.prefix_order import PrefixOrder, PrefixSorter, merge_runs
from treetrain.data.row_maker import Format, RowMaker
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Bytes = NDArray[np.uint8]
LABELS = ("group", "pair", "episode")
DIGESTS = (*LABELS, "row", "advantages")
_NUMBERS = {"file": "i", "offset": "q", "line": "q", "call": "i", "tokens": "q", "weight": "d", "reward": "d"}
_NUMBERS |= {"chosen": "b", "flags": "H"}
_FLAGS = ("trained", "negative", "signal", *GIVEN)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """Of K rows, in the order of the files; in the calls view each conversation's calls in their order."""

    files: tuple[FileState, ...]
    file: NDArray[np.int32]
    """[K]: number of the file."""
    offset: Int64s
    """[K]: byte at which the line begins."""
    line: Int64s
    """[K]: number of the line, from 1."""
    call: NDArray[np.int32]
    """[K]: which of the rows of its line, from 0."""
    columns: StoredColumns
    digests: Bytes
    """[K, 16]; see `row_digest`."""
    advantage_digests: Bytes
    """[K, 16]: of the recorded advantages."""
    order: PrefixOrder
    """Of the rows without a group."""
    notes: tuple[str, ...]
    format: Format

    def place(self, number: int) -> str:
        """Where a row is, in words."""
        return f"{self.files[self.file[number]].path} line {self.line[number]}"


class Part(NamedTuple):
    """What one process has found in its share of the files."""

    arrays: dict[str, NDArray]
    notes: Notes
    lines: list[int]
    """Of every file: lines that are not blank."""
    runs: list[Path]


def build_index(paths: Sequence[str], maker: RowMaker, *, folder: Path, exchange: Exchange) -> RowIndex:
    """Read and check all rows of some files, each process its share.

    Args:
        paths: JSONL files, not gzipped, of one format.
        maker: with the format known.
        folder: on a disk that all processes see; made if need be. Sorted tokens are written there (4 bytes per token of
            rows without a group), and deleted afterwards.
        exchange: the processes; all of them call this.

    Raises:
        DataError: naming file and line; RanksDisagree on the other processes.
        OSError: the disk does not take the sorted tokens.
    """
    assert maker.format is not None

    def looked() -> tuple[_Share, tuple[list[int], list[int]]]:
        files = [FileState.of(path) for path in paths]
        sizes = [file.size for file in files]
        ranges, lines = ranges_of(sizes, exchange.rank, exchange.size), [0] * len(paths)
        for part in ranges if exchange.size > 1 else []:
            lines[part.file] = count_lines(paths[part.file], part)
        folder.mkdir(parents=True, exist_ok=True)
        return _Share(files, ranges, Path(tempfile.mkdtemp(dir=folder, prefix="sorting-"))), (sizes, lines)

    share, told = exchange.agree("looking at the data files", looked)
    try:
        _check_sizes(paths, [sizes for sizes, _ in told])
        before = np.sum([lines for _, lines in told[: exchange.rank]] or [[0] * len(paths)], axis=0).tolist()
        parts: list[Part] = exchange.agree("reading the data", lambda: (None, _read_part(paths, share, before, maker)))[
            1
        ]
        base = np.cumsum([0, *(len(part.arrays["tokens"]) for part in parts)]).tolist()
        runs = [(run, start) for part, start in zip(parts, base) for run in part.runs]
        orders = exchange.agree("sorting the rows", lambda: (None, _order(runs, share.scratch, exchange.rank)))[1]
    finally:
        shutil.rmtree(share.scratch, ignore_errors=True)
    for path, lines in zip(paths, np.sum([part.lines for part in parts], axis=0).tolist()):
        if lines == 0:
            raise empty_file(path)
    return _index(share.files, parts, orders[0], maker)


class _Share(NamedTuple):
    """What a process reads, and where it may write."""

    files: list[FileState]
    ranges: list[Range]
    scratch: Path


def _check_sizes(paths: Sequence[str], sizes: list[list[int]]) -> None:
    """All processes must see the same files."""
    for rank, seen in enumerate(sizes):
        for path, one, other in zip(paths, sizes[0], seen):
            if one != other:
                raise DataError(
                    f"{path} has {one} bytes on rank 0 and {other} on rank {rank}; give all processes the same files"
                )


def _order(runs: list[tuple[Path, int]], scratch: Path, rank: int) -> PrefixOrder | None:
    """By the first process alone: all others wait."""
    return merge_runs(runs, scratch) if rank == 0 else None


def _read_part(paths: Sequence[str], share: _Share, before: list[int], maker: RowMaker) -> Part:
    notes, lines, collected = Notes(), [0] * len(paths), _Collected(share.scratch)
    for part in share.ranges:
        path = paths[part.file]
        for number, (offset, line) in enumerate(lines_of(path, part), before[part.file] + 1):
            if not line.strip():
                continue
            lines[part.file] += 1
            place = f"{path} line {number}"
            for call, row in enumerate(maker.make(parse_line(line, place), place, notes)):
                collected.add(row, file=part.file, offset=offset, line=number, call=call)
    return Part(collected.arrays(), notes, lines, collected.sorter.close())


class _Collected:
    """Columns that grow row by row, in little more memory than they have in the end."""

    def __init__(self, scratch: Path) -> None:
        self._numbers = {name: array(code) for name, code in _NUMBERS.items()}
        self._digests = {name: bytearray() for name in DIGESTS}
        self.sorter = PrefixSorter(scratch)

    def add(self, row: Trajectory, **where: int) -> None:
        weight, trained, negative = weight_facts(row)
        flags = {"trained": trained, "negative": negative}
        flags["signal"] = row.advantages is not None and bool(row.advantages.any())
        flags |= {name: getattr(row, name) is not None for name in GIVEN}
        values: dict[str, Any] = where | {
            "tokens": len(row),
            "weight": weight,
            "reward": np.nan if row.reward is None else row.reward,
            "chosen": -1 if row.chosen is None else int(row.chosen),
            "flags": sum(flags[name] << bit for bit, name in enumerate(_FLAGS)),
        }
        if row.group is None:
            self.sorter.add(row, len(self._numbers["tokens"]))
        for name, value in values.items():
            self._numbers[name].append(value)
        for name in LABELS:
            self._digests[name] += label_digest(getattr(row, name))
        self._digests["row"] += row_digest(row)
        self._digests["advantages"] += array_digest(row.advantages)

    def arrays(self) -> dict[str, NDArray]:
        numbers = {name: np.array(values) for name, values in self._numbers.items()}
        digests = {name: np.frombuffer(values, np.uint8) for name, values in self._digests.items() if values}
        digests = {name: digests.get(name, np.zeros(0, np.uint8)) for name in DIGESTS}
        return numbers | {name: values.reshape(-1, DIGEST_BYTES) for name, values in digests.items()}


def _index(files: list[FileState], parts: list[Part], order: PrefixOrder, maker: RowMaker) -> RowIndex:
    found = {name: np.concatenate([part.arrays[name] for part in parts]) for name in (*_NUMBERS, *DIGESTS)}
    flags = {name: (found["flags"] >> bit & 1).astype(bool) for bit, name in enumerate(_FLAGS)}
    columns = StoredColumns(
        tokens=found["tokens"],
        weight=found["weight"],
        trained=flags["trained"],
        negative=flags["negative"],
        signal=flags["signal"],
        reward=found["reward"],
        chosen=found["chosen"],
        given={name: flags[name] for name in GIVEN},
        **{name: _codes(found[name]) for name in LABELS},
    )
    notes = Notes()
    for part in parts:
        notes.join(part.notes)
    notes.add_all(maker.remarks())
    assert maker.format is not None
    return RowIndex(
        files=tuple(files),
        file=found["file"].astype(np.int32),
        offset=found["offset"],
        line=found["line"],
        call=found["call"].astype(np.int32),
        columns=columns,
        digests=found["row"],
        advantage_digests=found["advantages"],
        order=order,
        notes=notes.lines(),
        format=maker.format,
    )


def _codes(digests: Bytes) -> Int64s:
    """Equal numbers for equal digests, in the order in which they come first; -1 for no label."""
    if not len(digests):
        return np.zeros(0, np.int64)
    words = np.ascontiguousarray(digests).view([("a", "<u8"), ("b", "<u8")]).reshape(-1)
    there = (digests != np.frombuffer(NO_LABEL, np.uint8)).any(axis=1)
    codes = np.full(len(digests), -1, np.int64)
    _, first, number = np.unique(words[there], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    codes[there] = rank[number.reshape(-1)]
    return codes


def lines_between(index: RowIndex, numbers: Int64s) -> Iterator[tuple[int, int, Int64s]]:
    """(file, byte, those of the rows that it has) of every line that rows are made of, in the order of the files."""
    numbers = np.unique(numbers)
    starts = np.flatnonzero(np.diff(index.offset[numbers], prepend=-1) | np.diff(index.file[numbers], prepend=-1))
    for rows in np.split(numbers, starts[1:]):
        yield int(index.file[rows[0]]), int(index.offset[rows[0]]), rows
