"""Rows that stay in their files until they are asked for: as many as do not fit in memory."""

import dataclasses
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from treetrain.data.byte_ranges import line_at
from treetrain.data.columns import Floats, Int64s, StoredColumns
from treetrain.data.digest import array_digest, row_digest
from treetrain.data.exchange import Exchange
from treetrain.data.jsonl import parse_line
from treetrain.data.notes import Notes
from treetrain.data.prefix_order import PrefixOrder
from treetrain.data.row_index import RowIndex, lines_between
from treetrain.data.row_maker import RowMaker
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

KEPT_TOKENS = 1 << 20
"""Rows that were asked for last are kept up to so many tokens."""


class RowStore:
    """The rows of an index, read when they are asked for.

    Args:
        index: of the files.
        maker: as the index was made with.
        exchange: the processes that ask for the same rows.
    """

    def __init__(self, index: RowIndex, maker: RowMaker, exchange: Exchange) -> None:
        self.index, self._maker, self._exchange = index, maker, exchange
        self._kept: OrderedDict[int, Trajectory] = OrderedDict()
        self._kept_tokens = 0

    def fetch(self, numbers: list[int]) -> list[Trajectory]:
        """Some rows, on all processes; each reads a disjoint share of the lines.

        All processes must ask for the same rows in the same order, since what is kept decides what is read.

        Raises:
            DataError: a file that has changed; RanksDisagree where another process could not read its share, or asks
                for other rows.
        """
        missing = np.array([number for number in dict.fromkeys(numbers) if number not in self._kept], np.int64)
        read: dict[int, Trajectory] = {}
        if len(missing):
            # Named by the rows that are asked for, so that processes which have lost step are told.
            what = f"reading {len(missing)} rows (check {zlib.crc32(missing.tobytes()):08x})"
            shares = self._exchange.agree(what, lambda: (None, self._share(missing)))[1]
            for share in shares:
                read |= share
        rows = [read[number] if number in read else self._kept[number] for number in numbers]
        for number, row in zip(numbers, rows, strict=True):
            self._keep(number, row)
        return rows

    def read(self, number: int) -> Trajectory:
        """One row, by this process alone."""
        kept = self._kept.get(number)
        return self._read(np.array([number], np.int64))[number] if kept is None else kept

    def _share(self, numbers: Int64s) -> dict[int, Trajectory]:
        """This process's share: lines, about equal tokens for each process."""
        lines = list(lines_between(self.index, numbers))
        tokens = [int(self.index.columns.tokens[rows].sum()) + 1 for _, _, rows in lines]
        middle = np.cumsum(tokens) - np.array(tokens) / 2
        owner = np.floor(middle * self._exchange.size / sum(tokens)).astype(int).tolist()
        own = [rows for (_, _, rows), rank in zip(lines, owner, strict=True) if rank == self._exchange.rank]
        return self._read(np.concatenate(own)) if own else {}

    def _read(self, numbers: Int64s) -> dict[int, Trajectory]:
        found: dict[int, Trajectory] = {}
        for file in np.unique(self.index.file[numbers]).tolist():
            self.index.files[file].check()
        for file, offset, rows in lines_between(self.index, numbers):
            place = self.index.place(int(rows[0]))
            line = line_at(self.index.files[file].path, offset)
            made = self._maker.make(parse_line(line, place), place, Notes())
            for number in rows.tolist():
                call = int(self.index.call[number])
                if call >= len(made) or not self._is_same(made[call], number):
                    raise DataError(
                        f"{place}: the row is not the one that was read before: the file, the tokenizer or the chat "
                        "template has changed; leave them alone, and begin again"
                    )
                found[number] = made[call]
        return found

    def _is_same(self, row: Trajectory, number: int) -> bool:
        index = self.index
        same = row_digest(row) == index.digests[number].tobytes()
        return same and array_digest(row.advantages) == index.advantage_digests[number].tobytes()

    def _keep(self, number: int, row: Trajectory) -> None:
        if number in self._kept:
            self._kept.move_to_end(number)
            return
        self._kept[number] = row
        self._kept_tokens += len(row)
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_tokens -= len(oldest)


class LazyRows(Sequence[Trajectory]):
    """Some rows of a store. `rows[number]` reads one; steps use `take`, which processes share.

    Args:
        store: has them.
        numbers: int64 [K] of the rows in the store, ascending.
        advantages: [K], one for all tokens of a row; None: those of the files.
    """

    def __init__(self, store: RowStore, numbers: Int64s, advantages: Floats | None = None) -> None:
        self._store, self._numbers, self._advantages = store, numbers, advantages
        self.columns: StoredColumns = self._columns()
        """Facts of all rows, one array each."""

    @classmethod
    def all_of(cls, store: RowStore) -> "LazyRows":
        """All rows of a store."""
        return cls(store, np.arange(len(store.index.file)))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Trajectory: ...

    @overload
    def __getitem__(self, number: slice) -> "LazyRows": ...

    def __getitem__(self, number: int | slice) -> "Trajectory | LazyRows":
        if isinstance(number, slice):
            return self.subset(np.arange(len(self))[number])
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self._finished(self._store.read(int(self._numbers[number])), number)

    def take(self, numbers: Iterable[int]) -> list[Trajectory]:
        """Rows in the order asked for. All processes that share the store must ask for the same ones.

        Raises: see `RowStore.fetch`.
        """
        wanted = np.fromiter(numbers, np.int64)
        rows = self._store.fetch(self._numbers[wanted].tolist())
        return [self._finished(row, number) for row, number in zip(rows, wanted.tolist(), strict=True)]

    def subset(self, numbers: Int64s) -> "LazyRows":
        """Some of the rows, given ascending."""
        advantages = None if self._advantages is None else self._advantages[numbers]
        return LazyRows(self._store, self._numbers[numbers], advantages)

    def with_advantages(self, advantages: Floats) -> "LazyRows":
        """The same rows, each with one advantage for all of its tokens, [K]."""
        return LazyRows(self._store, self._numbers, advantages)

    def place(self, number: int) -> str:
        """File and line of a row."""
        return self._store.index.place(int(self._numbers[number]))

    @property
    def prefix_order(self) -> PrefixOrder:
        """Of the rows without a group."""
        return self._store.index.order.of(self._numbers, len(self._store.index.file))

    def digests(self) -> Iterator[tuple[bytes, bytes]]:
        """Of every row; see `treetrain.data.digest`."""
        index = self._store.index
        for number, own in enumerate(self._numbers.tolist()):
            advantages = index.advantage_digests[own].tobytes()
            if self._advantages is not None:
                length = int(index.columns.tokens[own])
                advantages = array_digest(np.full(length, self._advantages[number]))
            yield index.digests[own].tobytes(), advantages

    def _finished(self, row: Trajectory, number: int) -> Trajectory:
        return row if self._advantages is None else row.replace(advantages=float(self._advantages[number]))

    def _columns(self) -> StoredColumns:
        columns = self._store.index.columns.of(self._numbers)
        if self._advantages is None:
            return columns
        given = columns.given | {"advantages": np.ones(len(self), bool)}
        return dataclasses.replace(columns, signal=(self._advantages != 0) & (columns.tokens > 0), given=given)


def take(rows: Sequence[Trajectory], numbers: Iterable[int]) -> list[Trajectory]:
    """Some rows in the order asked for; of `LazyRows` over several processes all of them must ask for the same ones."""
    return rows.take(numbers) if isinstance(rows, LazyRows) else [rows[number] for number in numbers]
