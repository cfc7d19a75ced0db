"""Each sampled token trained once, where several rows repeat it.

One row per call, a rewritten context and a sub-agent all repeat answers that were sampled once. As rows, an answer
counts once for every row in which it is trained. `count_once` leaves its weight in the first of them only.

Two entries of rows are one sampled token if all that their prediction reads is equal: the ids up to them, `key`, and
the images and recorded experts of the tokens before them. Their own experts do not matter; the last token of a record
has none. Rows with an `episode` repeat tokens of their own episode only, since other episodes were sampled by
themselves, however equal they begin. Rows without one are compared with each other.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import DataError, quoted
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.core.tree.trajectory import PER_TOKEN_FACTS
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import Int64s, codes_of

if TYPE_CHECKING:
    from treetrain.logs.records import Notes

Count = Literal["per trajectory", "once"]
ROUNDING = 1.5e-4
"""Log-probabilities, in nats, that differ by no more are one number: two roundings to 4 decimals may be 1e-4 apart."""


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
            facts (loss weights, advantages, values, returns, sets of ids, and log-probabilities that differ by more
            than `ROUNDING`; otherwise those of the first row count).
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


def repeats(rows: Sequence[Trajectory], tree: TokenTree | None = None) -> Iterator[tuple[int, int, Int64s]]:
    """Trained tokens that an earlier row trains: the number of their row and of that one, and a run of their places.

    Args:
        rows: K rows.
        tree: that of these rows, if it is there and `sampled_apart` tells none of them from another.

    Raises:
        DataError: rows whose images or experts do not fit together.
    """
    numbers = np.arange(len(rows))
    if tree is None:
        apart = sampled_apart(rows)
        if not any(row.images or row.experts is not None for row in rows):  # errors of these number the rows
            trained = np.array([row.weights.any() for row in rows], bool)
            numbers = np.flatnonzero(trained & (np.bincount(apart[trained], minlength=len(rows) + 1)[apart] > 1))
        tree = build_tree([rows[number] for number in numbers.tolist()], apart=apart[numbers])
    offsets, token = tree.paths()
    if tree.special:
        # Tokens of one predecessor and one id have one prediction, whatever they carry themselves. No root is trained.
        token = np.unique((tree.parent + 1) << 32 | tree.tokens, return_inverse=True)[1][token]
    at = np.flatnonzero(tree.trained_predictions)
    first = np.zeros(tree.num_tokens, np.int64)
    first[token[at[::-1]]] = at[::-1]  # the last write wins, so the first row is kept
    before = first[token[at]]
    again = before < at
    row, other = (np.searchsorted(offsets, x[again], side="right") - 1 for x in (at, before))
    places = at[again] - offsets[row]
    cuts = np.flatnonzero((np.diff(row) != 0) | (np.diff(other) != 0)) + 1
    starts = np.append(0, cuts)[: len(row)]
    for start, stop in zip(starts.tolist(), [*cuts.tolist(), len(row)]):
        yield int(numbers[row[start]]), int(numbers[other[start]]), places[start:stop]


def sampled_apart(rows: Sequence[Trajectory]) -> Int64s:
    """int64 [K]: equal numbers for rows whose equal beginnings are the same sampled tokens."""
    return codes_of((row.group, row.episode) if row.episode is not None else () for row in rows)


def _check_facts(
    rows: Sequence[Trajectory],
    advantages: Sequence[float] | NDArray[np.floating] | None,
    first: int,
    number: int,
    at: Int64s,
) -> None:
    """Raise DataError if two rows that begin alike have different facts at these places."""
    for name in PER_TOKEN_FACTS:
        given = [rows[one].weights if name == "loss_weights" else getattr(rows[one], name) for one in (first, number)]
        if name == "advantages" and advantages is not None:
            given = [np.full(len(rows[one]), advantages[one]) for one in (first, number)]
        if all(fact is None for fact in given):
            continue
        pair = [np.full(len(at), np.nan) if fact is None else fact[at] for fact in given]
        near = np.abs(pair[0] - pair[1]) <= (ROUNDING if name.endswith("logprobs") else 0)
        differs = ~near & ~(np.isnan(pair[0]) & np.isnan(pair[1]))
        if differs.any():
            place = int(differs.argmax())
            values = " and ".join(_distinct(float(pair[0][place]), float(pair[1][place])))
            raise DataError(
                f"rows {_name(rows, first)} and {_name(rows, number)} both train token {at[place]} of one path, with "
                f"the {name} {values}; count='once' needs one value: give both rows the same, or each its own "
                "`episode` if they were sampled apart, or take count='per trajectory'"
            )


def _distinct(one: float, other: float) -> tuple[str, str]:
    """Two numbers, or NaN for none, with enough digits to see that they differ."""
    short = f"{one:g}" != f"{other:g}"
    shown = ["none" if math.isnan(x) else f"{x:g}" if short else repr(x) for x in (one, other)]
    return shown[0], shown[1]


def _check_sets(rows: Sequence[Trajectory], first: int, number: int, at: Int64s) -> None:
    """Raise DataError if two rows that begin alike have different sets of ids at these places."""
    for name in ("sampling_mask", "teacher_topk"):
        for place in at.tolist() if any(getattr(rows[one], name) is not None for one in (first, number)) else ():
            pair = []
            for one in (first, number):
                sets = getattr(rows[one], name)
                of = None if sets is None else sets.select(np.array([place]))
                logprobs = () if of is None or of.logprobs is None else of.logprobs
                pair.append({} if of is None else dict(zip_longest(of.ids.tolist(), logprobs)))
            # The ids of a sampling mask have no log-probabilities.
            apart = [abs((x or 0) - (pair[1][token] or 0)) for token, x in pair[0].items() if token in pair[1]]
            if pair[0].keys() != pair[1].keys() or max(apart, default=0) > ROUNDING:
                raise DataError(
                    f"rows {_name(rows, first)} and {_name(rows, number)} both train token {place} of one path, with "
                    f"the {name} {quoted(pair[0] or None)} and {quoted(pair[1] or None)}; count='once' needs one: "
                    "give both rows the same, or each its own `episode` if they were sampled apart"
                )


def _name(rows: Sequence[Trajectory], number: int) -> str:
    return f"{number}" + ("" if rows[number].id is None else f" ({quoted(rows[number].id)})")
