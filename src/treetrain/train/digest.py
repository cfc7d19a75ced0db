"""What rows are, as a few bytes: to tell that a run goes on with other rows."""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from treetrain.data.trajectory import PER_TOKEN_FACTS, Trajectory

_FACTS = ("ids", "experts", *PER_TOKEN_FACTS, "reward", "group", "pair", "chosen", "key", "episode")


def rows_digest(rows: Sequence[Trajectory]) -> str:
    """SHA-256 of every fact of all rows in their order, but of their ids, which tell the files that they are from."""
    digest = hashlib.sha256()
    for row in rows:
        for name in _FACTS:
            digest.update(_bytes(getattr(row, name)))
    return digest.hexdigest()


def _bytes(fact: np.ndarray | Hashable) -> bytes:
    if isinstance(fact, np.ndarray):
        return repr((fact.dtype.str, fact.shape)).encode() + np.ascontiguousarray(fact).tobytes()
    if isinstance(fact, int | float) and float(fact).is_integer():
        return repr(int(fact)).encode()  # 1, 1.0 and True are one label
    return repr(fact).encode()
