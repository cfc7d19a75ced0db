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
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.kernels.checks import CHECKED, failure_of, relative_error
from treetrain.kernels.launch import why_no_triton
from treetrain.kernels.merge_tables import Sums, Targets

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
        from treetrain.kernels import merge_kernels  # imports Triton, which not every machine has

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
