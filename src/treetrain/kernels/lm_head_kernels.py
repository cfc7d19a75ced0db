"""Triton kernels of the LM head's softmax: log-sum-exps and entropies in one read, the gradient in one read and write.

Logits keep the dtype of the matrix product; all arithmetic is in float32. The program that owns a logit adds the
gradients of its edges one after another, so no two programs add to one logit and results are bitwise reproducible. The
gradient is rounded once, after all additions.

Shape letters: r rows and e edges of a chunk, V vocabulary.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from treetrain.kernels.launch import launch

BLOCK = 4096
"""Logits that a program loads at once."""
WARPS = 8


@triton.jit
def statistics_kernel(
    logits_ptr, highest_ptr, log_total_ptr, entropy_ptr, stride, vocabulary, factor,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """logits [r, V] -> log-sum-exp ([r], [r]), entropy [r]; grid (r,). Every lane keeps its own running maximum."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    high = tl.zeros([BLOCK], tl.float32) - float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - high) (z - high)
    for start in range(0, vocabulary, BLOCK):
        column = start + lane
        z = tl.load(logits_ptr + row * stride + column, mask=column < vocabulary, other=float("-inf"))
        z = z.to(tl.float32) * factor
        highest = tl.maximum(high, z)
        base = tl.where(highest == float("-inf"), 0.0, highest)  # 0 for a lane without logits so far
        shrink, weight = tl.exp(high - base), tl.exp(z - base)
        if ENTROPY:
            fallen = tl.where(high == float("-inf"), 0.0, high - base)
            below = tl.where(z == float("-inf"), 0.0, z - base)
            weighted = shrink * (weighted + total * fallen) + weight * below
        total = total * shrink + weight
        high = highest
    top = tl.max(high, 0)
    share = tl.exp(high - top)
    whole = tl.sum(total * share, 0)
    tl.store(highest_ptr + row, top)
    tl.store(log_total_ptr + row, tl.log(whole))
    if ENTROPY:  # both terms are at least 0: nothing cancels
        fallen = tl.where(high == float("-inf"), 0.0, high - top)
        tl.store(entropy_ptr + row, tl.log(whole) - tl.sum(share * (weighted + total * fallen), 0) / whole)


@triton.jit
def gradient_kernel(
    logits_ptr, highest_ptr, log_total_ptr, by_row_ptr, entropy_ptr, by_entropy_ptr, first_ptr, target_ptr,
    by_edge_ptr, stride, vocabulary, factor, BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Overwrite logits [r, V] with their gradient; first [r + 1]: where each row's edges start; grid (r, blocks of
    V)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * stride + column
    z = tl.load(at, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * factor
    log_p = (z - tl.load(highest_ptr + row)) - tl.load(log_total_ptr + row)
    p = tl.exp(log_p)
    weight = tl.load(by_row_ptr + row) + tl.zeros([BLOCK], tl.float32)
    if ENTROPY:  # d H / d z_v = -p_v (log p_v + H)
        surprise = tl.where(p > 0, log_p, 0.0) + tl.load(entropy_ptr + row)
        weight += tl.load(by_entropy_ptr + row) * surprise
    grad = -p * weight
    for edge in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        grad += tl.where(column == tl.load(target_ptr + edge), tl.load(by_edge_ptr + edge), 0.0)
    tl.store(at, (grad * factor).to(logits_ptr.dtype.element_ty), mask=column < vocabulary)


def statistics(
    logits: Float[Tensor, "r V"], factor: float, *, entropy: bool
) -> tuple[Float32[Tensor, " r"], Float32[Tensor, " r"], Float32[Tensor, " r"] | None]:
    """Log-sum-exps, as in `lm_head.LogSumExp`, and entropies (or None) of logits times a factor above 0."""
    count, vocabulary = logits.shape
    highest, log_total = logits.new_empty(2, count, dtype=torch.float32)
    entropies = torch.empty_like(highest) if entropy else None
    launch(
        statistics_kernel,
        (count,),
        logits,
        logits,
        highest,
        log_total,
        highest if entropies is None else entropies,
        logits.stride(0),
        vocabulary,
        factor,
        BLOCK=_block(vocabulary),
        ENTROPY=entropy,
        num_warps=WARPS,
    )
    return highest, log_total, entropies


def to_gradient_(
    logits: Float[Tensor, "r V"],
    factor: float,
    lse: tuple[Float[Tensor, " r"], Float[Tensor, " r"]],
    edges: tuple[Int64[Tensor, " e"], Int64[Tensor, " e"]],
    by_edge: Float[Tensor, " e"],
    by_row: Float[Tensor, " r"],
    entropies: Float[Tensor, " r"] | None = None,
    by_entropy: Float[Tensor, " r"] | None = None,
) -> None:
    """Overwrite logits with their gradient.

    Args:
        lse: as `statistics` gives them.
        edges: row of each, ascending, and the predicted token.
        by_edge, by_row, entropies, by_entropy: see `lm_head.ChunkGradients`.
    """
    (row, target), (highest, log_total), (count, vocabulary) = edges, lse, logits.shape
    first = torch.searchsorted(row, torch.arange(count + 1, device=logits.device))
    block = _block(vocabulary)
    launch(
        gradient_kernel,
        (count, triton.cdiv(vocabulary, block)),
        logits,
        logits,
        highest.contiguous(),
        log_total.contiguous(),
        by_row.contiguous(),
        (by_row if entropies is None else entropies).contiguous(),
        (by_row if by_entropy is None else by_entropy).contiguous(),
        first,
        target.contiguous(),
        by_edge.contiguous(),
        logits.stride(0),
        vocabulary,
        factor,
        BLOCK=block,
        ENTROPY=entropies is not None,
        num_warps=WARPS,
    )


def _block(vocabulary: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocabulary))
