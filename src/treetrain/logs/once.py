"""Each sampled token trained once, where several rows repeat it.

One row per call, a rewritten context and a sub-agent all repeat answers that were sampled once. As rows, an answer
counts once for every row in which it is trained. `count_once` leaves its weight in the first of them only.

Two entries of rows are one sampled token if everything up to them is equal: ids, `key` and recorded experts. Rows with
an `episode` repeat tokens of their own episode only, since other episodes were sampled by themselves, however equal
they begin. Rows without one are compared with each other.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import DataError, quoted
from treetrain.core.tree.trajectory import GIVEN
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import Int64s, codes_of, sorted_by_prefix

if TYPE_CHECKING:
    from treetrain.logs.records import Notes

Count = Literal["per trajectory", "once"]


def checked_count(count: str) -> Count:
    """Raise ValueError for an unknown value of `count`."""
    if count not in ("per trajectory", "once"):
        raise ValueError(f"count={count!r} is neither 'per trajectory' nor 'once'")
    return count


def count_once(
    rows: Iterable[Trajectory],
    advantages: Sequence[float] | NDArray[np.floating] | None = None,
    notes: "Notes | None" = None,
) -> list[Trajectory]:
    """Leave the weight of every sampled token in the first row that trains it, and make it 0 in later rows.

    A loss that is a sum over tokens, each with its weight, then has each sampled token once. Nothing else of the rows
    changes, so the linear baseline and every trainer train the same.

    Args:
        rows: K rows; "first" is meant in this order.
        advantages: [K], one for all tokens of a row, where they were computed from rewards; None: those of the rows.
        notes: receives a remark on tokens of rows with different rewards, from which advantages may be computed later.

    Raises:
        DataError: a row of a pair, whose log-probability is one number; two rows of one sampled token with different
            facts (advantages, log-probabilities, values, returns).
    """
    rows = list(rows)
    for number, row in enumerate(rows):
        if row.pair is not None:
            named = _name(rows, number)
            raise DataError(f"row {named} is of a pair: pairs compare whole rows, so take count='per trajectory'")
    weights: dict[int, NDArray[np.floating]] = {}
    remarked = set()
    for number, other, at in repeats(rows):
        _check_facts(rows, advantages, other, number, at)
        _check_sets(rows, other, number, at)
        row = rows[number]
        if notes is not None and row.advantages is None and rows[other].reward != row.reward and number not in remarked:
            remarked.add(number)
            notes.place = f"row {number}" if row.id is None else str(row.id)
            notes.add("tokens that count once are in rows of different rewards; they count with the first row's")
        weights.setdefault(number, row.weights.copy())[at] = 0.0
    return [
        row if number not in weights else row.replace(loss_weights=weights[number]) for number, row in enumerate(rows)
    ]


def repeats(rows: Sequence[Trajectory]) -> Iterator[tuple[int, int, Int64s]]:
    """Trained tokens that an earlier row trains: the number of their row and of that one, and their places."""
    for members in _repeating(rows):
        paths = _paths([rows[number] for number in members])
        first = np.full(
            1 + max(int(path.max(initial=-1)) for path in paths), -1, np.int64
        )  # the row that trains a token
        for number, path in zip(members, paths):
            before = first[path]
            trained = rows[number].weights != 0
            again = trained & (before >= 0)
            first[path[trained & ~again]] = number
            for other in np.unique(before[again]).tolist():
                yield number, other, np.flatnonzero(again & (before == other))


def sampled_apart(rows: Sequence[Trajectory]) -> Int64s:
    """int64 [K]: equal numbers for rows whose equal beginnings are the same sampled tokens."""
    return codes_of((row.group, row.episode) if row.episode is not None else () for row in rows)


def _repeating(rows: Sequence[Trajectory]) -> Iterator[list[int]]:
    """Rows that may repeat each other's tokens, in lists of two or more."""
    found: dict[tuple[Hashable, int], list[int]] = {}
    for number, apart in enumerate(sampled_apart(rows).tolist()):
        if rows[number].weights.any():
            found.setdefault((rows[number].key, apart), []).append(number)
    return (members for members in found.values() if len(members) > 1)


def _paths(rows: Sequence[Trajectory]) -> list[Int64s]:
    """For each row [L] numbers of its tokens; two are equal if everything up to the tokens is equal."""
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    words = [row.ids if shape is None else _words(row, shape) for row in rows]
    paths: list[Int64s] = [np.zeros(0, np.int64)] * len(rows)
    before, count = np.zeros(0, np.int64), 0
    for number, shared in sorted_by_prefix(list(range(len(rows))), words.__getitem__):
        length = len(rows[number])
        shared = shared * length // max(words[number].size, 1)  # whole tokens
        before = paths[number] = np.concatenate([before[:shared], np.arange(count, count + length - shared)])
        count += length - shared
    return paths


def _words(row: Trajectory, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """The ids of a row, each followed by the token's experts; -1 for none, as in `build_tree`."""
    experts = np.full((len(row), *shape), -1, np.int16) if row.experts is None else row.experts
    words = np.concatenate([row.ids[:, None], experts.reshape(len(row), -1) + 1], axis=1)
    return words.astype(np.int32).ravel()


def _check_facts(
    rows: Sequence[Trajectory],
    advantages: Sequence[float] | NDArray[np.floating] | None,
    first: int,
    number: int,
    at: Int64s,
) -> None:
    """Raise DataError if two rows that begin alike have different facts at these places."""
    for name in GIVEN:
        pair = []
        for one in (first, number):
            fact = getattr(rows[one], name)
            if advantages is not None and name == "advantages":
                fact = np.full(len(rows[one]), advantages[one])
            pair.append(np.full(len(at), np.nan) if fact is None else fact[at])
        differs = (pair[0] != pair[1]) & ~(np.isnan(pair[0]) & np.isnan(pair[1]))
        if differs.any():
            place = int(differs.argmax())
            values = " and ".join("none" if np.isnan(fact[place]) else f"{fact[place]:g}" for fact in pair)
            raise DataError(
                f"rows {_name(rows, first)} and {_name(rows, number)} both train token {at[place]} of one path, with "
                f"the {name} {values}; count='once' needs one value: give both rows the same, or each its own "
                "`episode` if they were sampled apart, or take count='per trajectory'"
            )


def _check_sets(rows: Sequence[Trajectory], first: int, number: int, at: Int64s) -> None:
    """Raise DataError if two rows that begin alike have different sets of ids at these places."""
    for name in ("sampling_mask", "teacher_topk"):
        for place in at.tolist():
            pair = []
            for one in (first, number):
                sets = getattr(rows[one], name)
                of = None if sets is None else sets.select(np.array([place]))
                logprobs = () if of is None or of.logprobs is None else of.logprobs
                pair.append({} if of is None else dict(zip_longest(of.ids.tolist(), logprobs)))
            if pair[0] != pair[1]:
                raise DataError(
                    f"rows {_name(rows, first)} and {_name(rows, number)} both train token {place} of one path, with "
                    f"the {name} {quoted(pair[0] or None)} and {quoted(pair[1] or None)}; count='once' needs one: "
                    "give both rows the same, or each its own `episode` if they were sampled apart"
                )


def _name(rows: Sequence[Trajectory], number: int) -> str:
    return f"{number}" + ("" if rows[number].id is None else f" ({quoted(rows[number].id)})")
