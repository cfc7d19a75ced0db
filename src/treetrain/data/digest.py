"""What rows are, as a few bytes: to tell that a file has changed, or that a run goes on with other rows."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treetrain.data.labels import label_digest
from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory

DIGEST_BYTES = 16
NO_ARRAY = bytes(DIGEST_BYTES)
"""Of a fact that is not there."""
_ARRAYS = ("ids", "experts", *(name for name in PER_TOKEN_FACTS if name != "advantages"))
_LABELS = ("reward", "group", "pair", "chosen", "key", "episode")


def row_digest(row: Trajectory) -> bytes:
    """16 bytes of every fact of a row but its advantages; not of its id, which tells the file that it is from."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in _ARRAYS:
        digest.update(array_digest(getattr(row, name)))
    for name in _LABELS:
        digest.update(label_digest(getattr(row, name)))
    return digest.digest()


def array_digest(values: NDArray | None) -> bytes:
    """16 bytes of an array, zeros for None."""
    if values is None:
        return NO_ARRAY
    head = repr((values.dtype.str, values.shape)).encode()
    return hashlib.blake2b(head + np.ascontiguousarray(values).tobytes(), digest_size=DIGEST_BYTES).digest()


def rows_digest(rows: Sequence[Trajectory]) -> str:
    """SHA-256 of all rows in their order; the same whether they are in memory or not."""
    own = getattr(rows, "digests", None)
    pairs = ((row_digest(row), array_digest(row.advantages)) for row in rows) if own is None else own()
    digest = hashlib.sha256()
    for one, advantages in pairs:
        digest.update(one + advantages)
    return digest.hexdigest()
