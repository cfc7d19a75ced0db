"""One row of a file as it is trained: its text with the trained parts marked, and what was said when it was read."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.inspection.prepared import Decodes


@dataclasses.dataclass
class OneRow:
    """Keeps one row. Pass it to `tt.load` as `collect`; the notes are then on the row's record."""

    number: int
    """Of the row, counted from 1."""
    apart = True
    """`tt.load` keeps the notes of records apart."""

    def __call__(self, rows: Iterator[Trajectory]) -> list[Trajectory]:
        """The row alone. Raises DataError if there are fewer."""
        count = 0
        for count, row in enumerate(rows, 1):
            if count == self.number:
                return [row]
        raise DataError(f"there is no row {self.number}: the files have {count} rows")


def runs_of(row: Trajectory, tokenizer: Decodes | None) -> list[tuple[str, float]]:
    """The row as pieces of text, or of token ids, and the loss weight of each.

    Args:
        row: L tokens; the first has no weight, since nothing predicts it.
        tokenizer: anything with `decode`; None writes ids.
    """
    weights = row.weights
    cuts = np.flatnonzero(np.diff(weights)) + 1
    runs = np.split(row.ids, cuts) if len(row) else []
    starts = [0, *cuts.tolist()]
    return [
        (" ".join(map(str, run.tolist())) if tokenizer is None else tokenizer.decode(run.tolist()), float(weights[at]))
        for run, at in zip(runs, starts)
    ]
