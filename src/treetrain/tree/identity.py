"""Tokens that are the same computation: equal ids that went to equal experts, by one number for each such pair."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.tree.assemble import Int32s, Int64s


class Identities(NamedTuple):
    """Rows with their tokens renamed, and what the names stand for."""

    rows: list[bytes]
    """Every row as the bytes of its tokens' int32 names."""
    tokens: Int32s
    """int32 [names]: the token id of each name."""
    experts: NDArray[np.int16]
    """int16 [names, layers, k]: the recorded experts of each name, -1 where there are none."""


def identities(rows: Sequence[Trajectory | None], blobs: list[bytes]) -> Identities:
    """Name the tokens of rows of which some have recorded experts.

    Args:
        blobs: every row as the bytes of its int32 ids.

    Raises:
        DataError: experts of another shape than those of an earlier row.
    """
    shape = _one_shape(rows)
    ids = np.frombuffer(b"".join(blobs), np.int32)
    length = [len(blob) >> 2 for blob in blobs]
    choices = np.full((len(ids), *shape), -1, np.int16)
    start = 0
    for row, size in zip(rows, length):
        if row is not None and row.experts is not None:
            choices[start : start + size] = row.experts
        start += size
    first, names = _distinct(ids, choices.reshape(len(ids), -1))
    renamed, starts = names.astype(np.int32).tobytes(), np.cumsum([0, *length])
    pieces = [renamed[4 * a : 4 * b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())]
    return Identities(pieces, ids[first], choices[first])


def _one_shape(rows: Sequence[Trajectory | None]) -> tuple[int, int]:
    found: tuple[int, tuple[int, int]] | None = None
    for number, row in enumerate(rows):
        if row is None or row.experts is None or not len(row):
            continue
        shape = (row.experts.shape[1], row.experts.shape[2])
        if found is not None and shape != found[1]:
            raise DataError(
                f"row {number}: experts have {shape[0]} layers of {shape[1]}, those of row {found[0]} {found[1][0]} of "
                f"{found[1][1]}; all rows of a batch are routed by one model"
            )
        found = found or (number, shape)
    return (0, 0) if found is None else found[1]


def _distinct(ids: Int32s, choices: NDArray[np.int16]) -> tuple[Int64s, Int64s]:
    """(where each distinct (id, experts) stands first, which of them each token is).

    By a hash of 64 bits, which is checked afterwards: sorting the experts themselves takes much longer.
    """
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 1 << 62, choices.shape[1] + 1, dtype=np.int64) * 2 + 1
    with np.errstate(over="ignore"):
        hashed = ids.astype(np.int64) * factors[0]
        for column in range(choices.shape[1]):
            hashed += choices[:, column].astype(np.int64) * factors[column + 1]
    _, first, names = np.unique(hashed, return_index=True, return_inverse=True)
    if (ids[first[names]] == ids).all() and (choices[first[names]] == choices).all():
        return first, names
    whole = np.concatenate([ids[:, None], choices], axis=1, dtype=np.int32)
    _, first, names = np.unique(whole, axis=0, return_index=True, return_inverse=True)
    return first, names.reshape(-1)
