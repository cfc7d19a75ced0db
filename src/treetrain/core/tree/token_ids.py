"""Token ids, and sets of them: those that a sampler kept, or a teacher's most likely ones."""

from array import array as builtin_array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numpy.typing import ArrayLike, NDArray

from treetrain.core.errors import DataError, quoted, shortened

MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
MOST_LOGPROB = 0.01  # of recorded ones: probabilities that were normalised in bfloat16 are up to 1.008


def checked_ids(ids: ArrayLike) -> Int32[np.ndarray, " L"]:
    """Token ids as an array of their own. Raises DataError for anything else than a flat list of whole numbers."""
    if isinstance(ids, list):
        try:
            array = np.frombuffer(builtin_array("i", ids), np.int32)  # three times as fast as numpy
        except (TypeError, OverflowError):
            pass
        else:
            if array.min(initial=2) > 1:  # else there may be a negative number, true or false
                return array
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise DataError(f"ids are no flat list ({shortened(error)}); give one list of numbers per row") from error
    if array.ndim != 1:
        raise DataError(f"ids have shape {array.shape}, expected [L]; give one trajectory per row")
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        given = ids if isinstance(ids, list | tuple) else array.tolist()
        wrong = next((each for each in given if not isinstance(each, int | np.integer) or isinstance(each, bool)), None)
        if wrong is None:  # more than 64 bits
            raise DataError(f"ids hold {quoted(max(map(str, given), key=len))}; token ids are 0 to {MAX_TOKEN_ID}")
        raise DataError(f"ids hold {quoted(wrong)}, a {type(wrong).__name__}; token ids are whole numbers")
    if array.min() < 0 or (array.dtype != np.int32 and array.max() > MAX_TOKEN_ID):
        at = int(((array < 0) | (array > MAX_TOKEN_ID)).argmax())
        what = "negative" if array[at] < 0 else f"above {MAX_TOKEN_ID}"
        raise DataError(f"ids[{at}] = {array[at]} is {what}; token ids are 0 to {MAX_TOKEN_ID}")
    if isinstance(ids, list | tuple) and (at := first_bool(ids, array)) is not None:
        raise DataError(f"ids[{at}] is {ids[at]}, expected a whole number")
    return np.array(array, np.int32, order="C")


def first_bool(values: Sequence[object], numbers: NDArray[np.number]) -> int | None:
    """The place of the first True or False among values that numpy has read as these numbers, 1 and 0."""
    return next((at for at in np.flatnonzero(numbers < 2).tolist() if isinstance(values[at], bool | np.bool_)), None)


@dataclass(frozen=True, slots=True, eq=False)
class IdSets:
    """A set of token ids for each of L places; an empty one stands for none."""

    starts: Int64[np.ndarray, " L_plus_1"]
    """Set t is ids[starts[t] : starts[t + 1]]."""
    ids: Int32[np.ndarray, " n"]
    logprobs: Float64[np.ndarray, " n"] | None = None
    """Recorded log-probabilities of the ids, in nats."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> Int64[np.ndarray, " L"]:
        """The number of ids in each set."""
        return np.diff(self.starts)

    @property
    def places(self) -> Int64[np.ndarray, " n"]:
        """The place that each id belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    def entries(self, places: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " m"]:
        """Indices of the ids at some places."""
        counts = self.counts[places]
        return np.arange(int(counts.sum())) + np.repeat(self.starts[places] - np.cumsum(counts) + counts, counts)

    def select(self, places: Int64[np.ndarray, " k"]) -> "IdSets":
        """The sets of some places."""
        at, starts = self.entries(places), np.concatenate([[0], np.cumsum(self.counts[places])])
        return IdSets(starts, self.ids[at], None if self.logprobs is None else self.logprobs[at])

    @classmethod
    def joined(cls, rows: Sequence["IdSets | None"], lengths: Sequence[int]) -> "IdSets":
        """The sets of all rows, one after the other; None stands for a row of its length without sets."""
        given = [cls(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0)), *(x for x in rows if x is not None)]
        counts = [np.zeros(n, np.int64) if row is None else row.counts for row, n in zip(rows, lengths)]
        logprobs = [row.logprobs for row in given if row.logprobs is not None]
        return cls(
            np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])),
            np.concatenate([row.ids for row in given]),
            np.concatenate(logprobs) if len(logprobs) == len(given) else None,
        )

    @classmethod
    def of(cls, value: Any, name: str, length: int) -> "IdSets":
        """Read sets of ids.

        Args:
            value: a list of ids for each of `length` places, None where there is no set; or an array [length, k], in
                which -1 fills up smaller sets. A pair of such ids and log-probabilities has both.
            name: of the value, for messages.

        Raises:
            DataError: anything else, an empty set, an id that is there twice, a log-probability above 0.
        """
        if isinstance(value, IdSets) and len(value) == length:
            return value
        ids, logprobs = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        there = np.asarray(ids) != -1 if getattr(ids, "ndim", 1) == 2 else None
        lists = _lists(ids, name, length, there)
        try:
            flat = checked_ids([*chain.from_iterable(one for one in lists if one is not None)])
        except (DataError, TypeError):
            for at, one in enumerate(lists):  # the place of the wrong one
                try:
                    checked_ids([] if one is None else one)
                except DataError as error:
                    raise DataError(f"{name}[{at}]: {error}") from None
            raise
        sets = cls(np.cumsum([0, *(0 if one is None else len(one) for one in lists)]), flat)
        pairs = np.sort(sets.places << 32 | flat)
        if (again := pairs[1:] == pairs[:-1]).any():
            at, twice = divmod(int(pairs[again.argmax()]), 1 << 32)
            raise DataError(f"{name}[{at}] has the id {twice} twice; give every id of a set once")
        return sets if logprobs is None else cls(sets.starts, flat, sets._recorded(logprobs, name, there))

    def _recorded(self, logprobs: Any, name: str, there: NDArray[np.bool_] | None) -> Float64[np.ndarray, " n"]:
        """Recorded log-probabilities of the ids, checked."""
        lists = _lists(logprobs, f"{name}: log-probabilities", len(self), there)
        try:
            flat = np.fromiter(chain.from_iterable(one for one in lists if one is not None), np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{name}: log-probabilities are no lists of numbers ({shortened(error)})") from error
        for at, (one, count) in enumerate(zip(lists, self.counts.tolist())):
            if (0 if one is None else len(one)) != count:
                raise DataError(f"{name}[{at}] has {count} ids and {0 if one is None else len(one)} log-probabilities")
        if (wrong := ~(np.isfinite(flat) & (flat <= MOST_LOGPROB))).any():
            at = int(wrong.argmax())
            raise DataError(
                f"{name}[{self.places[at]}]: id {self.ids[at]} has the log-probability {flat[at]:g}; give finite "
                f"numbers in nats, at most 0 (to {MOST_LOGPROB:g}, for rounding)"
            )
        return flat

    def beginning_with(self, tokens: Int32[np.ndarray, " L"], name: str) -> "IdSets":
        """The same sets, each beginning with the row's own token; raises DataError for one that lacks it."""
        places = self.places
        own = self.ids == tokens[places]
        lacks = (np.bincount(places[own], minlength=len(self)) == 0) & (self.counts > 0)
        if lacks.any():
            at = int(lacks.argmax())
            raise DataError(
                f"{name}[{at}] is {quoted(self.select(np.array([at])).ids.tolist())}, without the row's token "
                f"{tokens[at]} there, which cannot be sampled from it; give None for tokens that were not sampled"
            )
        return IdSets(self.starts, self.ids[np.lexsort((~own, places))])


def _lists(value: Any, name: str, length: int, there: NDArray[np.bool_] | None) -> list[Any]:
    """A list for each place, or None; of an array only the entries that are there."""
    if there is not None and getattr(value, "shape", ()) == there.shape:
        value = [[x for x, has in zip(*row) if has] or None for row in zip(value.tolist(), there.tolist())]
    lists = [x.tolist() if hasattr(x, "tolist") else x for x in value] if hasattr(value, "__len__") else None
    if lists is None or len(lists) != length:
        given = quoted(value) if lists is None else f"{len(lists)} entries"
        raise DataError(f"{name} has {given} for {length} tokens; give a list of ids for each, or None for no set")
    for at, one in enumerate(lists):
        if one is not None and (isinstance(one, str) or not hasattr(one, "__len__") or not len(one)):
            raise DataError(f"{name}[{at}] is {quoted(one)}; give a list that is not empty, or None for no set")
    return lists
