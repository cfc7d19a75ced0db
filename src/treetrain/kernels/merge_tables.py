"""Where the rows of pieces go in a running result: tables that all layers of a forest share; see `merging.py`.

Shape letters: N rows of the running result, t of them changed by a piece of p rows, M rows of float32 sums, H heads of
size D.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from treetrain.core.device_arrays import to_device


class Targets(NamedTuple):
    """The rows of a running result that a piece is added to."""

    tokens: Int64[Tensor, " t"]
    """Ascending and distinct."""
    offsets: Int32[Tensor, " t+1"] | None
    """Where each token's entries in `copies` start; None if the piece has one row for each token, in order."""
    copies: Int32[Tensor, " p"] | None
    """Rows of the piece, grouped by token."""
    source: Int32[Tensor, " t"] | None
    """The row of the float32 sums that holds a token's sum so far; -1: the running result does. None: it always
    does."""
    target: Int32[Tensor, " t"] | None
    """The row of the float32 sums that takes a token's new sum; -1: the running result does."""


class Sums(NamedTuple):
    """The targets of the pieces of one running result, in the order in which the pieces are added."""

    rows: int
    """M; tokens that take part in several pieces have a row."""
    targets: list[Targets]

    @classmethod
    def of(cls, pieces: Sequence[Int64[np.ndarray, " _"]], count: int, device: torch.device) -> "Sums":
        """The targets of pieces with these tokens in their rows; a token may have several rows in a piece.

        Args:
            count: N.
        """
        grouped = [_grouped(tokens) for tokens in pieces]
        times = np.bincount(np.concatenate([tokens for tokens, *_ in grouped]), minlength=count) if grouped else []
        several = np.asarray(times) > 1
        row = np.where(several, np.cumsum(several) - 1, -1)
        added, targets = np.zeros(count, np.int64), []
        for tokens, offsets, copies in grouped:
            narrow = [] if offsets is None else [offsets, copies]
            if several.any():
                narrow.append(np.where(added[tokens] > 0, row[tokens], -1))
                added[tokens] += 1
                narrow.append(np.where(added[tokens] < times[tokens], row[tokens], -1))
            there = to_device([x.astype(np.int32) for x in narrow], device) if narrow else []
            groups = (None, None) if offsets is None else there[:2]
            beside = there[-2:] if several.any() else (None, None)
            targets.append(Targets(to_device([tokens], device)[0], *groups, *beside))
        return cls(int(several.sum()), targets)

    def beside(self, running: Float[Tensor, "N H D"]) -> Float[Tensor, "_ H D"] | None:
        """Make the float32 rows beside a running result; None if its own dtype holds sums, or no row needs them."""
        wide = torch.promote_types(running.dtype, torch.float32)
        if not self.rows or running.dtype == wide:
            return None
        # The last row takes what PyTorch's functions have no other place for.
        return running.new_empty((self.rows + 1, *running.shape[1:]), dtype=wide)


def _grouped(tokens: Int64[np.ndarray, " p"]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Distinct tokens, and where each one's rows of the piece are."""
    if (np.diff(tokens) > 0).all():
        return tokens, None, None
    copies = np.argsort(tokens, kind="stable")
    distinct, counts = np.unique(tokens, return_counts=True)
    return distinct, np.concatenate([[0], np.cumsum(counts)]), copies
