"""What a step is made of: whole groups (else whole trees), so that rows which share a prefix meet in one step.

Nothing here knows how a step is executed, so tree and linear runs of one seed see the same steps; nor where rows are,
in memory or in files: steps are planned from their columns alone.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.trainers.groups import RowGroups as Units
from treetrain.trainers.groups import make_groups as make_units

__all__ = ["BatchPlan", "Units", "make_units", "plan_batches", "sample_units", "split_units"]

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Which rows every step of a run holds; the same for every execution, found again from the seed alone."""

    units: Units
    """Row numbers of every unit."""
    unit_tokens: Int64s
    """Flat tokens of every unit."""
    tokens_per_step: int
    """Flat tokens a step is filled up to."""
    seed: int

    def epoch(self, number: int, *, shuffle: bool = True) -> list[Int64s]:
        """Row numbers of every step of one pass over the data (from 0). Every row is in exactly one step."""
        order = np.arange(len(self.units))
        if shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(order)
        starts: list[int] = [0]
        filled = 0
        for place, size in enumerate(self.unit_tokens[order].tolist()):
            if filled and filled + size > self.tokens_per_step:
                starts.append(place)
                filled = 0
            filled += size
        # Rows in the order of the file: the order within a step must not depend on the shuffle.
        return [np.sort(self.units.rows_of(units)) for units in np.split(order, starts[1:])]

    def unit_of_rows(self) -> Int64s:
        """The unit of every row."""
        return self.units.unit_of_rows()

    def steps_per_epoch(self, number: int = 0) -> int:
        """Steps of one pass; passes may differ by a few, since units fill steps in another order."""
        return len(self.epoch(number))

    def total_steps(self, epochs: int) -> int:
        """Steps of so many passes."""
        return sum(self.steps_per_epoch(number) for number in range(epochs))

    def steps(self, total: int, *, skip: int = 0) -> Iterator[tuple[int, Int64s]]:
        """(epoch, row numbers) of the first `total` steps, passing over the data as often as that takes.

        Args:
            skip: so many of them are left out at the beginning: they were taken before.
        """
        epoch = given = 0
        while given < total:
            for rows in self.epoch(epoch)[: total - given]:
                given += 1
                if given > skip:
                    yield epoch, rows
            epoch += 1


def plan_batches(trajectories: Sequence[Trajectory], *, tokens_per_step: int, seed: int = 0) -> BatchPlan:
    """Group rows into units and plan the steps.

    Args:
        trajectories: all rows of the run, in memory or not.
        tokens_per_step: flat tokens a step is filled up to; a larger unit becomes a step of its own.
        seed: of the shuffle.

    Raises:
        DataError: no row has anything to train.
    """
    units = make_units(trajectories, tokens_per_step=tokens_per_step)
    columns = columns_of(trajectories)
    units = _join_untrained(units, columns.trained)
    return BatchPlan(units, units.sums(columns.tokens), tokens_per_step, seed)


def sample_units(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """The first rows of a file, whole units of them, up to `count` rows.

    Returns:
        The rows, and whether a unit had to be cut because the first alone has more rows than that. Pairs stay
        whole even then: where the first rows are of one, there may be more than `count`.
    """
    chosen: list[Int64s] = []
    taken = 0
    for unit in make_units(trajectories):
        if taken + len(unit) <= count:
            chosen.append(unit)
            taken += len(unit)
        elif not chosen:
            return [trajectories[number] for number in _first_pairs(trajectories, unit, count).tolist()], True
    return [trajectories[number] for number in np.sort(np.concatenate(chosen)).tolist()], False


def _first_pairs(trajectories: Sequence[Trajectory], unit: Int64s, count: int) -> Int64s:
    """The first rows of a unit, whole pairs of them, up to `count` rows but at least one row or pair."""
    pieces: dict[Hashable, list[int]] = {}
    for number in unit.tolist():
        pair = trajectories[number].pair
        pieces.setdefault(("row", number) if pair is None else ("pair", pair), []).append(number)
    first, *rest = pieces.values()
    taken = list(first)
    for piece in rest:
        if len(taken) + len(piece) <= count:
            taken += piece
    return np.sort(np.array(taken, np.int64))


def split_units(
    trajectories: Sequence[Trajectory], fraction: float, *, seed: int, tokens_per_step: int | None = None
) -> tuple[Int64s, Int64s]:
    """Row numbers of (kept, held out), ascending: at least one unit each, whole units, drawn by the seed.

    Raises:
        DataError: there is only one unit, so nothing can be held out without tearing it apart.
    """
    if fraction == 0:
        return np.arange(len(trajectories)), np.zeros(0, np.int64)
    units = make_units(trajectories, tokens_per_step=tokens_per_step)
    if len(units) < 2:
        raise DataError(
            f"eval_fraction is {fraction}, but the {len(trajectories)} rows are one group or tree, which is never torn "
            "apart; give eval_data, a file of its own"
        )
    count = min(max(round(fraction * len(units)), 1), len(units) - 1)
    drawn = np.random.default_rng([seed, len(units)]).permutation(len(units))[:count]
    held = np.zeros(len(trajectories), bool)
    held[units.rows_of(drawn)] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _join_untrained(units: Units, trained: NDArray[np.bool_]) -> Units:
    """Rows without anything to train go with the first unit that has something: no step may be without."""
    busy = units.sums(trained.astype(np.int64)) > 0
    if not busy.any():
        raise DataError(
            f"nothing to train: no token of the {len(trained)} rows has a loss weight; "
            "conversations need assistant messages, token rows labels or a loss_mask that is not all 0"
        )
    if busy.all():
        return units
    # The busy units in their order; the first of them takes in the others.
    number = np.where(busy, np.cumsum(busy) - 1, 0)
    return Units.of_labels(number[units.unit_of_rows()])
