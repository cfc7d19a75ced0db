"""Preference pairs among the rows of a step: exactly one chosen and one rejected row each."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.losses.facts import describe

Int64s = NDArray[np.int64]


class Pairs(NamedTuple):
    """P pairs, in the order of each pair's first row."""

    chosen: Int64s
    """int64 [P]: number of each pair's chosen row."""
    rejected: Int64s
    """int64 [P]"""


def find_pairs(trajectories: Sequence[Trajectory]) -> Pairs:
    """The pairs that have something to train in at least one of their rows.

    Rows without anything to train need no pair.

    Raises:
        DataError: a trained row without a pair; a pair that is not one chosen and one rejected row.
    """
    members: dict[Hashable, tuple[list[int], list[int]]] = {}
    trained: set[Hashable] = set()
    for number, row in enumerate(trajectories):
        has_weight = bool(row.weights.any())
        if row.pair is None:
            if has_weight:
                raise DataError(
                    f"{describe(row, number)} is trained but has no pair; give pair=... and chosen=True or False, or "
                    "loss_weights=0 to keep it as context"
                )
            continue
        if row.chosen is None:
            raise DataError(
                f"{describe(row, number)} of pair {row.pair!r} does not say whether it is chosen; give chosen=True "
                "or chosen=False"
            )
        members.setdefault(row.pair, ([], []))[0 if row.chosen else 1].append(number)
        if has_weight:
            trained.add(row.pair)
    for pair, (chosen, rejected) in members.items():
        if len(chosen) != 1 or len(rejected) != 1:
            raise DataError(_uneven(pair, chosen, rejected, trajectories))
    counted = [rows for pair, rows in members.items() if pair in trained]
    return Pairs(
        np.array([chosen[0] for chosen, _ in counted], np.int64),
        np.array([rejected[0] for _, rejected in counted], np.int64),
    )


def _uneven(pair: Hashable, chosen: list[int], rejected: list[int], trajectories: Sequence[Trajectory]) -> str:
    names = [
        f"{kind} {', '.join(describe(trajectories[number], number) for number in rows) or 'none'}"
        for kind, rows in (("chosen", chosen), ("rejected", rejected))
    ]
    return (
        f"pair {pair!r} has {len(chosen)} chosen and {len(rejected)} rejected rows ({'; '.join(names)}); a pair is "
        "one of each: give other pairs other names, and all rows of a pair in one call"
    )
