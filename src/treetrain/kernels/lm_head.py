"""The LM head's kernels of a GPU: the softmax of a chunk by Triton, and products that are added unrounded.

Triton kernels keep the dtype of the matrix product (16 bits for a 16-bit model), read the logits once for log-sum-exps
and entropies, and once more to overwrite them with the gradient. PyTorch computes the softmax on a CPU, with
``TREETRAIN_HEAD=torch``, and for heads that the kernels do not support.
"""

import os
from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.core.head.lm_head import (
    ChunkGradients,
    EdgesOfChunk,
    HeadKernels,
    LogSumExp,
    Moments,
    PlainChunk,
    Scaling,
)
from treetrain.core.hf.capability import LogitMap
from treetrain.kernels.checks import CHECKED, Run, failure_of, relative_error
from treetrain.kernels.launch import why_no_triton

ENVIRONMENT = "TREETRAIN_HEAD"
KERNELS = ("torch", "triton")
"""The values of the environment variable."""


class TritonChunk(PlainChunk):
    """`PlainChunk` by Triton kernels, for 16-bit and float32 logits of a head without bias or cap."""

    def __init__(self, logits: Float[Tensor, "r V"], scaling: Scaling, *, entropy: bool, backward: bool):
        from treetrain.kernels import lm_head_kernels  # imports Triton, which may not be installed

        assert scaling.logit_map.cap is None
        self._kernels = lm_head_kernels
        self._factor = scaling.factor
        self._entropy = entropy
        self._logits = logits
        self._entropies: Tensor | None = None

    def log_sum_exp(self) -> LogSumExp:
        *own, self._entropies = self._kernels.statistics(self._logits, self._factor, entropy=self._entropy)
        self._own = LogSumExp(*own)
        return self._own

    def logprobs(self, lse: LogSumExp, edges: EdgesOfChunk) -> Float[Tensor, " e"]:
        scaled = self._logits[edges].float().mul_(self._factor)
        return scaled.sub_(lse.highest[edges.row]).sub_(lse.log_total[edges.row])

    def moments(self, lse: LogSumExp) -> "Moments":
        return Moments.of(self._logits.float() * self._factor, lse)

    def entropies(self, lse: LogSumExp) -> Float[Tensor, " r"]:
        assert self._entropies is not None, "entropies are found with the log-sum-exps"
        # 0, or the logits of other shares of the vocabulary:
        beyond = (lse.highest - self._own.highest) + (lse.log_total - self._own.log_total)
        return (-beyond).exp() * (self._entropies + beyond)

    def gradient(self, lse: LogSumExp, edges: EdgesOfChunk, gradients: ChunkGradients) -> Float[Tensor, "r V"]:
        self._kernels.to_gradient_(self._logits, self._factor, lse, edges, *gradients)
        return self._logits


def chunk_type(dtype: torch.dtype, device: torch.device, bias: Tensor | None, scaling: Scaling) -> type[PlainChunk]:
    """The softmax class for logits of a dtype on a device: Triton's on a GPU unless the environment variable says
    otherwise; PyTorch's where the kernels do not support the case.

    Raises:
        ValueError: an unknown name, or kernels that are named and cannot run here.
    """
    named = os.environ.get(ENVIRONMENT, "")
    if named not in ("", *KERNELS):
        raise ValueError(f"{ENVIRONMENT}={named}: no kernels have that name; there are {', '.join(KERNELS)}")
    hindrance = why_no_triton(device)
    if named == "triton" and hindrance is not None:
        raise ValueError(f"{ENVIRONMENT}={named} cannot run here: Triton kernels: {hindrance}; unset it, or name torch")
    if hindrance is not None or named == "torch" or (not named and device.type != "cuda"):
        return PlainChunk
    suits = dtype in (torch.bfloat16, torch.float16, torch.float32) and scaling.factor > 0
    return TritonChunk if suits and bias is None and scaling.logit_map.cap is None else PlainChunk


def self_checked(chosen: type[PlainChunk], dtype: torch.dtype, device: torch.device) -> type[PlainChunk]:
    """The chosen class; PyTorch's if Triton's kernels are wrong on this GPU, which is checked before their first use.

    Raises:
        RuntimeError: the environment variable names kernels that are wrong here.
    """
    if chosen is not TritonChunk or device.type not in CHECKED:
        return chosen

    def runs() -> Iterator[Run]:
        for name, logits in _logits_of_check().items():
            yield partial(_errors_of_kernels, name, logits.to(device, dtype))

    failure = failure_of("the LM head's Triton kernel", (str(device),), dtype, runs)
    if failure is not None and os.environ.get(ENVIRONMENT) == "triton":
        raise RuntimeError(f"{ENVIRONMENT}=triton: the kernel {failure}; unset it, or name torch")
    return TritonChunk if failure is None else PlainChunk


def _logits_of_check() -> dict[str, Float[Tensor, "5 V"]]:
    """Gaussian logits, and those that real models have: far from 0, with one token above all others, all equal."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(5, 5000, generator=generator)
    sure = logits.clone()
    sure[1:4:2, 36] = 80.0  # not in all rows: beside an entropy of 1e-30 any rounding is large
    return {"": logits, "large logits": logits + 300, "sure rows": sure, "equal logits": torch.zeros_like(logits)}


def _errors_of_kernels(case: str, logits: Float[Tensor, "5 V"]) -> dict[str, float]:
    """Relative errors of `TritonChunk` on a few rows, against `PlainChunk` in float64."""
    generator, device = torch.Generator().manual_seed(1), logits.device
    by_edge, by_entropy = (torch.randn(n, generator=generator).to(device) for n in (7, 5))
    edges = EdgesOfChunk(*torch.tensor([[0, 1, 1, 1, 3, 4, 4], [5, 0, 36, 4999, 36, 2, 2]], device=device))
    results = []
    for kind, given in ((TritonChunk, logits.clone()), (PlainChunk, logits.double())):
        chunk = kind(given, Scaling(LogitMap(), 0.7), entropy=True, backward=True)
        lse = chunk.log_sum_exp()
        logprobs, entropies = chunk.logprobs(lse, edges), chunk.entropies(lse)
        by_row = by_edge.new_zeros(5).index_add_(0, edges.row, by_edge)
        gradients = ChunkGradients(*(x.to(lse.highest.dtype) for x in (by_edge, by_row, entropies, by_entropy)))
        results.append((sum(lse), logprobs, entropies, chunk.gradient(lse, edges, gradients)))
    names = ("log-sum-exps", "log-probabilities", "entropies", "the gradient of logits")
    end = f" ({case})" if case else ""
    return {f"{name}{end}": relative_error(*pair) for name, pair in zip(names, zip(*results))}


class DeviceHeadKernels(HeadKernels):
    """The kernels of this module, each compared with its reference before a GPU uses it."""

    @property
    def setting(self) -> str | None:
        return os.environ.get(ENVIRONMENT)

    def chunk_type(
        self, dtype: torch.dtype, device: torch.device, bias: Tensor | None, scaling: Scaling
    ) -> type[PlainChunk]:
        chosen = chunk_type(dtype, device, bias, scaling)
        return chosen if chosen is PlainChunk else self_checked(chosen, dtype, device)

    def logit_bytes(self, dtype: torch.dtype, device: torch.device, bias: Tensor | None, scaling: Scaling) -> int:
        """See `HeadKernels`. Under Triton's kernels the logits become their gradient."""
        if chunk_type(dtype, device, bias, scaling) is TritonChunk:
            return dtype.itemsize
        return super().logit_bytes(dtype, device, bias, scaling)

    def add_product(self, total: Float[Tensor, "V D"], left: Float[Tensor, "V r"], right: Float[Tensor, "r D"]) -> None:
        """See `HeadKernels`. A GPU adds a 16-bit product to a float32 total before it is rounded."""
        narrow = left.dtype != total.dtype and total.device.type == "cuda"
        if narrow and _adds_unrounded(left.dtype, total.dtype, total.device):
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            super().add_product(total, left, right)


def _adds_unrounded(dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch adds a product of 16-bit factors to a wider total, in place, without rounding it."""
    if device.type not in CHECKED:
        return True

    def errors() -> dict[str, float]:
        return _errors_of_addmm(dtype, wide, device)

    # In the limit of the total's dtype, which a rounded product misses.
    failure = failure_of(
        "addmm with out_dtype, of the LM head,", (str(device), f"factors {dtype}"), wide, lambda: [errors]
    )
    return failure is None


def _errors_of_addmm(dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> dict[str, float]:
    """The relative errors of a total after two additions, laid out as `_LinearHead` has them."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, factor in (("", 1.0), (" of large gradients", 1000.0)):
        total = torch.zeros(1003, 64, dtype=wide, device=device)
        expected = total.double()
        for count in (37, 200):
            left = (factor * torch.randn(count, 1003, generator=generator)).to(device, dtype)
            right = torch.randn(count, 64, generator=generator).to(device, dtype)
            torch.addmm(total, left.t(), right, out_dtype=wide, out=total)
            expected += left.double().t() @ right.double()
        found[f"the sum{name}"] = relative_error(total, expected)
    return found
