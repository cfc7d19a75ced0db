"""Recorded experts as frameworks hand them on, with zeros where nothing was recorded."""

import numpy as np
from jaxtyping import Int64, Integer

from treetrain.core.errors import DataError


def without_fill(experts: Integer[np.ndarray, "L P k"], name: str, instead: str) -> Int64[np.ndarray, "L P k"]:
    """Recorded experts with -1 where none were recorded: there the model's router chooses.

    A record may be shorter than its row, miss tokens, or hold -1 (255 once it has become 8 bits without a sign). The k
    experts of a token differ, so equal numbers are not a record, and a tail of zeros is not expert 0.

    Args:
        name: of the record, for the error.
        instead: says how to do without it.

    Raises:
        DataError: one expert per token, where 0 may be an expert or no record.
    """
    if experts.shape[-1] < 2:
        raise DataError(
            f"{name} has one expert per token, and holds 0 where none was recorded, which cannot be told from expert "
            f"0; {instead}"
        )
    wide = experts.astype(np.int64)
    ordered = np.sort(wide, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdims=True)
    return np.where(twice | (wide < 0).any(-1, keepdims=True), -1, wide)
