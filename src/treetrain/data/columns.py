"""What planning needs to know of all rows, as one array per fact: of rows in memory, or of a memory-mapped file.

K = rows.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GIVEN = tuple(name for name in PER_TOKEN_FACTS if name != "loss_weights")
"""Facts of which the columns say who has them."""


class ListColumns:
    """Of rows in memory, as `StoredColumns` has them; each column is made when it is first asked for."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = rows

    @cached_property
    def tokens(self) -> Int64s:
        return self._numbers(map(len, self._rows), np.int64)

    @cached_property
    def _weights(self) -> tuple[Floats, Bools, Bools]:
        found = [weight_facts(row) for row in self._rows]
        weight, trained, negative = zip(*found) if found else ((), (), ())
        return np.array(weight, np.float64), np.array(trained, bool), np.array(negative, bool)

    @property
    def weight(self) -> Floats:
        return self._weights[0]

    @property
    def trained(self) -> Bools:
        return self._weights[1]

    @property
    def negative(self) -> Bools:
        return self._weights[2]

    @cached_property
    def signal(self) -> Bools:
        return self._numbers((row.advantages is not None and row.advantages.any() for row in self._rows), np.bool_)

    @cached_property
    def reward(self) -> Floats:
        return self._numbers((np.nan if row.reward is None else row.reward for row in self._rows), np.float64)

    @cached_property
    def chosen(self) -> NDArray[np.int8]:
        return self._numbers((-1 if row.chosen is None else row.chosen for row in self._rows), np.int8)

    @cached_property
    def given(self) -> dict[str, Bools]:
        return {name: self._numbers((getattr(row, name) is not None for row in self._rows), np.bool_) for name in GIVEN}

    @cached_property
    def group(self) -> Int64s:
        return codes_of(row.group for row in self._rows)

    @cached_property
    def pair(self) -> Int64s:
        return codes_of(row.pair for row in self._rows)

    @cached_property
    def episode(self) -> Int64s:
        return codes_of(row.episode for row in self._rows)

    @cached_property
    def key(self) -> Int64s:
        return codes_of(row.key for row in self._rows)

    def _numbers(self, values: Iterable[object], dtype: type) -> NDArray:
        return np.fromiter(values, dtype, len(self._rows))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredColumns:
    """Of rows that are not in memory."""

    tokens: Int64s
    """int64 [K]: length of each row."""
    weight: Floats
    """[K]: sum of the loss weights, entry 0 excluded."""
    trained: Bools
    """[K]: whether any token has a loss weight."""
    negative: Bools
    """[K]: whether a loss weight is below 0."""
    signal: Bools
    """[K]: whether an advantage is not 0."""
    reward: Floats
    """[K]: NaN where there is none."""
    chosen: NDArray[np.int8]
    """[K]: 1, 0, or -1 where it is not said."""
    given: dict[str, Bools]
    """By the names of `GIVEN`, [K]: whether the row has the fact."""
    group: Int64s
    """int64 [K]: equal numbers for equal groups, in the order of their first rows; -1 for none."""
    pair: Int64s
    """As `group`."""
    episode: Int64s
    """As `group`."""
    key: Int64s
    """As `group`."""


RowColumns = ListColumns | StoredColumns


def columns_of(rows: Sequence[Trajectory]) -> RowColumns:
    """The columns of rows: their own where they have them (`MappedTrajectories.columns`), else found one by one."""
    own = getattr(rows, "columns", None)
    return ListColumns(rows) if own is None else own


def weight_facts(row: Trajectory) -> tuple[float, bool, bool]:
    """Of a row's loss weights, entry 0 excluded: their sum, whether one is not 0, whether one is below 0."""
    weights = row.weights
    return float(weights.sum()), bool(weights.any()), bool(weights.size and weights.min() < 0)


def codes_of(labels: Iterable[Hashable]) -> Int64s:
    """Equal numbers for equal labels, counted in the order in which they come first; -1 for None."""
    known: dict[Hashable, int] = {}
    return np.array([-1 if label is None else known.setdefault(label, len(known)) for label in labels], np.int64)
