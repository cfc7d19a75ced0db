"""One row of a file as it is trained: its text with the trained parts marked, and what was said when it was read."""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.prepared import Decodes


@dataclasses.dataclass
class OneRow:
    """Keeps one row. Pass it to `tt.load` as `collect`; the notes are then on the row's record."""

    number: int
    """The number of the row, counted from 1."""
    apart = True
    """`tt.load` keeps the notes of records apart."""

    def __call__(self, rows: Iterator[Trajectory]) -> list[Trajectory]:
        """The row alone. Raises DataError if there are fewer."""
        count = 0
        for count, row in enumerate(rows, 1):
            if count == self.number:
                return [row]
        raise DataError(f"there is no row {self.number}: the files have {count} rows")


def facts_of(row: Trajectory) -> dict[str, object]:
    """The facts of the whole row that it has, by name."""
    names = ("id", "group", "episode", "reward", "pair", "chosen")
    return {name: value for name in names if (value := getattr(row, name)) is not None}


def notes_on(row: Trajectory) -> list[str]:
    """Facts of the row that its record does not say."""
    rejected = "the answer is rejected (chosen False): the loss sft refuses the row, dpo makes the answer less likely"
    return [rejected] if row.chosen is False else []


def without_folders(value: object) -> str:
    """A fact in which the place of a record has no folders: `.../rows.jsonl line 1`."""
    return re.sub(r"^.*/(?=[^/]+ line \d)", ".../", str(value))


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
