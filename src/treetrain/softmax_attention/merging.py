"""Merges pieces of attention by log-sum-exp, and adds up the gradients of pieces, reading and writing a row once.

A *piece* is the result of one attention call: rows for some queries, or gradients for some keys. The running result has
the dtype of the pieces and is changed in place. A row is rounded once: while further pieces of it follow, its sum is
kept in float32, in a few rows beside the running result. Most rows have one piece more, so these rows are few.

The functions below are the same arithmetic in PyTorch. On a GPU the kernels of `merge_kernels.py` take their place,
which move a third of the bytes or less, once they have been compared with these. The kernels have no atomics: the same
pieces give the same bits.

Shape letters: N rows of the running result, t of them changed by a piece of p rows, M rows of float32 sums, H heads of
size D.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from treetrain.device_arrays import CHECKED, to_device, why_no_triton
from treetrain.kernel_checks import failure_of, relative_error


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


Merge = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Targets], None]
Add = Callable[[Tensor, Tensor | None, Tensor, Targets], None]


class Merging(NamedTuple):
    """The two operations; see `merge_` and `add_`."""

    merge_: Merge
    add_: Add


def merge_(
    out: Float[Tensor, "N H D"],
    lse: Float[Tensor, "H N"],
    sums: Float[Tensor, "_ H D"] | None,
    piece: Float[Tensor, "t H D"],
    piece_lse: Float[Tensor, "H t"],
    to: Targets,
) -> None:
    """Merge attention over further keys into `out` and `lse`.

    Args:
        sums: `Sums.beside` of the output.
        to: the queries of the piece, one row each.
    """
    assert to.copies is None
    before, after = lse.index_select(1, to.tokens), piece_lse.to(lse.dtype)
    total = torch.logaddexp(before, after)
    merged = _so_far(out, sums, to) * _per_row(before - total)
    merged += piece.to(merged.dtype) * _per_row(after - total)
    _keep(out, sums, to, merged)
    lse.index_copy_(1, to.tokens, total)


def add_(total: Float[Tensor, "N H D"], sums: Float[Tensor, "_ H D"] | None, piece: Tensor, to: Targets) -> None:
    """Add the rows of a piece [p, H, D] to `total`."""
    so_far = _so_far(total, sums, to)
    if to.offsets is None or to.copies is None:
        so_far += piece.to(so_far.dtype)
    else:
        place = torch.arange(len(piece), device=piece.device, dtype=torch.int32)
        owner = torch.searchsorted(to.offsets, place, right=True) - 1
        so_far.index_add_(0, owner, piece.index_select(0, to.copies).to(so_far.dtype))
    _keep(total, sums, to, so_far)


def _so_far(running: Float[Tensor, "N H D"], sums: Float[Tensor, "_ H D"] | None, to: Targets) -> Tensor:
    taken = running.index_select(0, to.tokens).to(torch.promote_types(running.dtype, torch.float32))
    if sums is None or to.source is None:
        return taken
    beside = sums.index_select(0, to.source.clamp(min=0))
    return torch.where((to.source >= 0)[:, None, None], beside, taken)


def _keep(running: Float[Tensor, "N H D"], sums: Float[Tensor, "_ H D"] | None, to: Targets, values: Tensor) -> None:
    running.index_copy_(0, to.tokens, values.to(running.dtype))
    if sums is not None and to.target is not None:
        last = len(sums) - 1
        sums.index_copy_(0, torch.where(to.target >= 0, to.target, last).long(), values)


def _per_row(log_weights: Float[Tensor, "H n"]) -> Float[Tensor, "n H 1"]:
    return log_weights.exp().t().unsqueeze(-1)


PLAIN = Merging(merge_, add_)


def merging(like: Float[Tensor, "N H D"]) -> Merging:
    """The operations for a running result: Triton's on a GPU where they are right, else PyTorch's."""
    return _chosen(*like.shape[1:], like.dtype, like.device)


@functools.cache
def _chosen(heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Merging:
    if device.type not in CHECKED or why_no_triton(device) is not None:
        return PLAIN

    def kernels() -> Merging:
        from treetrain.softmax_attention import merge_kernels  # imports Triton, which not every machine has

        return Merging(merge_kernels.merge_, merge_kernels.add_)

    case = str(device), f"heads {heads}", f"size {size}"
    name = "the merging of attention pieces"
    failure = failure_of(name, case, dtype, lambda: [lambda: errors_of(kernels(), heads, size, dtype, device)])
    return PLAIN if failure else kernels()


def errors_of(kernels: Merging, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative errors of merges and additions, against PyTorch's in float64.

    Rows have one, several and no pieces; a piece has several rows for a token; log-sum-exps are far apart, as those of
    large keys are.
    """
    generator, count = torch.Generator().manual_seed(0), 300

    def drawn(*shape: int) -> Tensor:  # on the CPU: the device's own random state belongs to the user's run
        return torch.randn(shape, generator=generator)

    places = [np.arange(9, 250), np.arange(200, 210), np.r_[3, 205, 299]]
    queries, found = Sums.of(places, count, device), {}
    start, start_lse = drawn(count, heads, size).to(dtype), 30 * drawn(heads, count)
    pieces = [(drawn(len(at), heads, size).to(dtype), 30 * drawn(heads, len(at))) for at in places]
    results = []
    for operations, kind in ((kernels, dtype), (PLAIN, torch.float64)):
        lse_kind = torch.promote_types(kind, torch.float32)
        out, lse = start.to(device, kind, copy=True), start_lse.to(device, lse_kind, copy=True)
        sums = queries.beside(out)
        for (piece, piece_lse), to in zip(pieces, queries.targets):
            operations.merge_(out, lse, sums, piece.to(device, kind), piece_lse.to(device, lse_kind), to)
        results.append((out, lse))
    found |= {name: relative_error(*pair) for name, pair in zip(("the output", "log-sum-exps"), zip(*results))}

    rows = [np.r_[np.arange(250), np.arange(180), np.arange(7)], np.r_[np.arange(40, 60), np.arange(50, 90)]]
    keys = Sums.of(rows, count, device)
    added, results = [drawn(len(at), heads, size).to(dtype) for at in rows], []
    for operations, kind in ((kernels, dtype), (PLAIN, torch.float64)):
        total = start.to(device, kind, copy=True)
        sums = keys.beside(total)
        for piece, to in zip(added, keys.targets):
            operations.add_(total, sums, piece.to(device, kind), to)
        results.append(total)
    return found | {"the gradients": relative_error(*results)}
