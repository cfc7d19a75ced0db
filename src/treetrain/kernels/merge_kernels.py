"""Triton kernels that merge pieces of attention and add up gradients; `merging.py` has the same in PyTorch.

A program owns some rows of one head of the running result. It reads them and their pieces, adds in float32, and writes
them. So no two programs write the same memory, and a row's copies are added in one order.

Shape letters: N rows of the running result, t of them changed by a piece of p rows, H heads of size D.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from treetrain.kernels.launch import launch
from treetrain.kernels.merge_tables import Targets

WARPS = 4
LENGTHS = ["rows", "count"]
"""Arguments that differ from call to call; the compiler must not specialize on their values."""


def block_rows(size: int) -> int:
    """Rows of a program for heads of a size: larger ones would take most registers of a multiprocessor."""
    return 32 if size <= 128 else 16


@triton.jit
def _so_far(running_ptr, sums_ptr, source_ptr, at, kept, row, inside, column, STRIDE: tl.constexpr,
            SUMS: tl.constexpr):  # fmt: skip
    """The rows so far in float32, from the running result or from the float32 sums."""
    if SUMS:
        source = tl.load(source_ptr + row, mask=inside, other=-1)
        beside = source[:, None].to(tl.int64) * STRIDE + column[None, :]
        held = source[:, None] >= 0
        narrow = tl.load(running_ptr + at, mask=kept & ~held, other=0.0).to(tl.float32)
        return narrow + tl.load(sums_ptr + beside, mask=kept & held, other=0.0)
    else:
        return tl.load(running_ptr + at, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _keep(running_ptr, sums_ptr, target_ptr, values, at, kept, row, inside, column, STRIDE: tl.constexpr,
          SUMS: tl.constexpr):  # fmt: skip
    if SUMS:
        target = tl.load(target_ptr + row, mask=inside, other=-1)
        beside = target[:, None].to(tl.int64) * STRIDE + column[None, :]
        held = target[:, None] >= 0
        tl.store(sums_ptr + beside, values, mask=kept & held)
        tl.store(running_ptr + at, values.to(running_ptr.dtype.element_ty), mask=kept & ~held)
    else:
        tl.store(running_ptr + at, values.to(running_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    out_ptr, sums_ptr, piece_ptr, lse_ptr, piece_lse_ptr, token_ptr, source_ptr, target_ptr, rows, count,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """out [N, H, D] and lse [H, N] with a piece [t, H, D], [H, t] merged; grid (blocks of t, H)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    kept = inside[:, None] & (column[None, :] < SIZE)
    token = tl.load(token_ptr + row, mask=inside, other=0)
    at = token[:, None] * (HEADS * SIZE) + head * SIZE + column[None, :]
    before = tl.load(lse_ptr + head.to(tl.int64) * count + token, mask=inside, other=0.0)
    after = tl.load(piece_lse_ptr + head.to(tl.int64) * rows + row, mask=inside, other=0.0)
    high = tl.maximum(before, after)
    first, second = tl.exp(before - high), tl.exp(after - high)
    whole = first + second
    so_far = _so_far(
        out_ptr, sums_ptr + head * SIZE, source_ptr, at, kept, row, inside, column, HEADS * SIZE, SUMS
    )  # fmt: skip
    piece_at = row[:, None].to(tl.int64) * (HEADS * SIZE) + head * SIZE + column[None, :]
    piece = tl.load(piece_ptr + piece_at, mask=kept, other=0.0).to(tl.float32)
    merged = so_far * (first / whole)[:, None] + piece * (second / whole)[:, None]
    _keep(
        out_ptr, sums_ptr + head * SIZE, target_ptr, merged, at, kept, row, inside, column, HEADS * SIZE, SUMS
    )  # fmt: skip
    tl.store(lse_ptr + head.to(tl.int64) * count + token, high + tl.log(whole), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def add_kernel(
    total_ptr, sums_ptr, piece_ptr, token_ptr, offset_ptr, copy_ptr, source_ptr, target_ptr, rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, SUMS: tl.constexpr,
    SEVERAL: tl.constexpr,
):  # fmt: skip
    """total [N, H, D] plus a piece [p, H, D]; SEVERAL: tokens may have more than one row in it; grid (blocks of t,
    H)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    kept = inside[:, None] & (column[None, :] < SIZE)
    token = tl.load(token_ptr + row, mask=inside, other=0)
    at = token[:, None] * (HEADS * SIZE) + head * SIZE + column[None, :]
    so_far = _so_far(
        total_ptr, sums_ptr + head * SIZE, source_ptr, at, kept, row, inside, column, HEADS * SIZE, SUMS
    )  # fmt: skip
    piece_ptr += head * SIZE
    if SEVERAL:
        begin = tl.load(offset_ptr + row, mask=inside, other=0)
        times = tl.load(offset_ptr + row + 1, mask=inside, other=0) - begin
        for number in range(tl.max(times, 0)):
            some = inside & (number < times)
            copy = tl.load(copy_ptr + begin + number, mask=some, other=0)
            piece_at = copy[:, None].to(tl.int64) * (HEADS * SIZE) + column[None, :]
            so_far += tl.load(piece_ptr + piece_at, mask=kept & some[:, None], other=0.0).to(tl.float32)
    else:
        piece_at = row[:, None].to(tl.int64) * (HEADS * SIZE) + column[None, :]
        so_far += tl.load(piece_ptr + piece_at, mask=kept, other=0.0).to(tl.float32)
    _keep(
        total_ptr, sums_ptr + head * SIZE, target_ptr, so_far, at, kept, row, inside, column, HEADS * SIZE, SUMS
    )  # fmt: skip


def merge_(
    out: Float[Tensor, "N H D"],
    lse: Float[Tensor, "H N"],
    sums: Float[Tensor, "_ H D"] | None,
    piece: Float[Tensor, "t H D"],
    piece_lse: Float[Tensor, "H t"],
    to: Targets,
) -> None:
    """See `merging.merge_`."""
    assert to.copies is None and out.is_contiguous() and lse.is_contiguous()
    assert piece_lse.dtype == lse.dtype == torch.float32
    rows = len(piece)
    tensors = out, _or(sums, out), piece.contiguous(), lse, piece_lse.contiguous(), to.tokens
    beside = _beside(sums, to)
    _launch(merge_kernel, out, rows, *tensors, *beside[0], rows, lse.shape[1], SUMS=beside[1])


def add_(total: Float[Tensor, "N H D"], sums: Float[Tensor, "_ H D"] | None, piece: Tensor, to: Targets) -> None:
    """See `merging.add_`."""
    assert total.is_contiguous()
    rows, several = len(to.tokens), to.offsets is not None
    tensors = total, _or(sums, total), piece.contiguous(), to.tokens
    groups = (to.offsets, to.copies) if several else (to.tokens, to.tokens)  # not read without copies
    beside = _beside(sums, to)
    _launch(add_kernel, total, rows, *tensors, *groups, *beside[0], rows, SUMS=beside[1], SEVERAL=several)


def _or(sums: Tensor | None, running: Tensor) -> Tensor:
    return running if sums is None else sums


def _beside(sums: Tensor | None, to: Targets) -> tuple[tuple[Tensor, Tensor], bool]:
    """Tables of the float32 sums, and whether there are any; without, tensors that the kernels do not read."""
    if sums is None or to.source is None or to.target is None:
        return (to.tokens, to.tokens), False
    return (to.source, to.target), True


def _launch(kernel: Any, like: Tensor, rows: int, *arguments: Any, **options: bool) -> None:
    heads, size = like.shape[1:]
    if rows:
        grid = triton.cdiv(rows, block_rows(size)), heads
        constants = {"HEADS": heads, "SIZE": size, "BLOCK_ROWS": block_rows(size)}
        constants["BLOCK_D"] = triton.next_power_of_2(size)
        launch(kernel, grid, like, *arguments, num_warps=WARPS, **constants, **options)
