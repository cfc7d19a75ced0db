"""Block sizes of the Triton kernels: one setting for each kind of input, so that a run is the same every time.

Kernels that tune themselves at their first call may sum in another order on the next start. Here the setting is a table
lookup; `candidates` lists what is worth measuring on a new device, and `use` takes the fastest for the process.
"""

import dataclasses
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How one kernel is cut up."""

    queries: int
    """Queries of a block; divides the tile."""
    keys: int
    """Keys of a block; divides the tile."""
    warps: int
    stages: int


class Shapes(NamedTuple):
    """The kernels of a layer."""

    forward: Shape
    query_gradient: Shape
    key_gradient: Shape


_chosen: dict[tuple[int, int], Shapes] = {}


def shapes_for(size: int, dtype: torch.dtype) -> Shapes:
    """The setting for a head size (the larger of query's and value's) and dtype."""
    return _chosen.get((_bucket(size), dtype.itemsize)) or candidates(size, dtype)[0]


def use(size: int, dtype: torch.dtype, shapes: Shapes) -> None:
    """Take a setting for this kind of input from now on, in this process."""
    _chosen[_bucket(size), dtype.itemsize] = shapes


def candidates(size: int, dtype: torch.dtype) -> list[Shapes]:
    """Settings that fit a Hopper multiprocessor (228 KB of shared memory), the default first."""
    return _WIDE[_bucket(size)] if dtype.itemsize == 4 else _NARROW[_bucket(size)]


def tf32_is_allowed() -> bool:
    """Whether the program lets float32 be multiplied with less than its precision, by either of PyTorch's settings."""
    chosen = torch.backends.cuda.matmul.fp32_precision
    # Asking the older setting where the newer one says something else is an error.
    return torch.get_float32_matmul_precision() != "highest" if chosen == "none" else chosen != "ieee"


def _bucket(size: int) -> int:
    return next(bucket for bucket in (64, 128, 256) if size <= bucket)


# Registers and shared memory of each were read off the compiler's report for sm_90 (benchmarks/triton_report.py). With
# 16 bits the first of every list spills next to nothing (52 bytes at most), has Hopper's own products (wgmma), and what
# a step needs is on its way while the one before is computed: with two stages it would be asked for at that one's end.
_NARROW = {
    64: [
        Shapes(Shape(128, 128, 8, 3), Shape(128, 64, 8, 3), Shape(64, 128, 8, 3)),
        Shapes(Shape(128, 64, 4, 3), Shape(64, 64, 4, 3), Shape(32, 64, 4, 3)),
        Shapes(Shape(128, 64, 8, 3), Shape(128, 128, 8, 3), Shape(32, 128, 8, 3)),
    ],
    128: [
        Shapes(Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(32, 128, 8, 3)),
        Shapes(Shape(128, 128, 8, 2), Shape(128, 32, 8, 3), Shape(64, 128, 8, 3)),
        Shapes(Shape(64, 64, 4, 3), Shape(64, 64, 4, 3), Shape(64, 128, 8, 2)),
    ],
    256: [
        Shapes(Shape(128, 32, 8, 3), Shape(64, 32, 8, 3), Shape(32, 64, 8, 3)),
        Shapes(Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 64, 8, 2)),
        Shapes(Shape(64, 32, 4, 3), Shape(128, 32, 8, 2), Shape(32, 64, 8, 2)),
    ],
}
"""16-bit inputs."""
_WIDE = {
    64: [
        Shapes(Shape(64, 32, 8, 2), Shape(64, 32, 8, 2), Shape(32, 32, 8, 2)),
        Shapes(Shape(32, 32, 4, 2), Shape(64, 32, 4, 2), Shape(32, 64, 8, 2)),
    ],
    128: [
        Shapes(Shape(32, 16, 8, 2), Shape(32, 16, 8, 2), Shape(16, 32, 8, 2)),
        Shapes(Shape(32, 16, 4, 2), Shape(32, 32, 8, 1), Shape(32, 32, 8, 1)),
    ],
    256: [
        Shapes(Shape(32, 16, 8, 1), Shape(32, 16, 8, 1), Shape(16, 32, 8, 1)),
        Shapes(Shape(16, 32, 8, 1), Shape(32, 16, 4, 1), Shape(16, 32, 4, 1)),
    ],
}
"""Float32 inputs, multiplied without tensor cores unless less than float32's precision is allowed."""
