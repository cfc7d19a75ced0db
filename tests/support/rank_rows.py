"""What a process reads of rows that stay in their files, for tests over real processes."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from treetrain.data import lazy_rows
from treetrain.data.digest import rows_digest
from treetrain.data.lazy_rows import LazyRows, RowStore
from treetrain.data.row_index import build_index
from treetrain.data.row_maker import RowMaker
from treetrain.engine.ranks import Ranks
from treetrain.errors import DataError, RanksDisagree
from treetrain.train.batches import plan_batches


class Seen(NamedTuple):
    """By one process."""

    steps: list[list[int]]
    """Row numbers of an epoch."""
    ids: list[list[list[int]]]
    """Token ids of the rows of every step."""
    digest: str
    notes: tuple[str, ...]
    read: list[tuple[str, int]]
    """Lines that it read itself for its steps."""


def steps_on_rank(group: Any, files: list[str], folder: str) -> "Seen | Exception":
    """An epoch; or the error that ends it, as it is raised here."""
    ranks, maker, read = Ranks(group), RowMaker(format="tokens"), []
    original = lazy_rows.line_at

    def line_at(path: str, offset: int) -> bytes:
        read.append((path, offset))
        return original(path, offset)

    try:
        index = build_index(files, maker, folder=Path(folder), exchange=ranks)
    except (DataError, RanksDisagree) as error:
        return error
    rows = LazyRows.all_of(RowStore(index, maker, ranks))
    with mock.patch.object(lazy_rows, "line_at", line_at):
        steps = [numbers.tolist() for numbers in plan_batches(rows, tokens_per_step=80, seed=3).epoch(1)]
        ids = [[row.ids.tolist() for row in rows.take(numbers)] for numbers in steps]
    return Seen(steps, ids, rows_digest(rows), index.notes, read)
