"""Block sizes of the Triton kernels: one fixed setting for each head size and dtype, for reproducible runs.

Autotuned kernels may sum in another order in the next process. Here the setting is a table lookup. `candidates` lists
the settings of each kernel worth measuring on a new device, and `use` sets them for the process.
"""

import dataclasses
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Block sizes and launch options of one kernel."""

    queries: int
    """Queries in a block; divides the tile."""
    keys: int
    """Keys in a block; divides the tile."""
    warps: int
    stages: int


class Shapes(NamedTuple):
    """The settings of a layer's three kernels."""

    forward: Shape
    query_gradient: Shape
    key_gradient: Shape


_chosen: dict[tuple[int, int], Shapes] = {}


def shapes_for(size: int, dtype: torch.dtype) -> Shapes:
    """The setting for a dtype and head size (the larger of query's and value's)."""
    listed = candidates(size, dtype)
    return _chosen.get((_bucket(size), dtype.itemsize)) or Shapes(*(shapes[0] for shapes in listed.values()))


def use(size: int, dtype: torch.dtype, shapes: Shapes) -> None:
    """Use this setting for a head size and dtype from now on, in this process."""
    _chosen[_bucket(size), dtype.itemsize] = shapes


def candidates(size: int, dtype: torch.dtype) -> dict[str, list[Shape]]:
    """By field of `Shapes`: settings that fit a Hopper multiprocessor (228 KB of shared memory), the default first."""
    table = (_WIDE if dtype.itemsize == 4 else _NARROW)[_bucket(size)]
    return {name: [Shape(*each) for each in listed] for name, listed in zip(Shapes._fields, table)}


def tf32_is_allowed() -> bool:
    """Whether either of PyTorch's settings allows float32 products in less than float32 precision."""
    chosen = torch.backends.cuda.matmul.fp32_precision
    # PyTorch raises if the older setting is read while the newer one says something else.
    return torch.get_float32_matmul_precision() != "highest" if chosen == "none" else chosen != "ieee"


def _bucket(size: int) -> int:
    return next(bucket for bucket in (64, 128, 256) if size <= bucket)


# Registers and shared memory were read off the compiler's report for sm_90 (benchmarks/triton_report.py). With 16 bits
# the first setting of every list spills at most 52 bytes and uses Hopper's wgmma. Its three stages load the data of a
# step while the step before is computed; with two stages the load would only start at the end of that step.
_NARROW = {
    64: (
        [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
        [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 128, 4, 3)],
        [(64, 128, 8, 3), (32, 64, 4, 3), (32, 128, 8, 3), (64, 64, 4, 3)],
    ),
    128: (
        [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
        [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3)],
        [(32, 128, 8, 3), (64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 3), (64, 64, 4, 2)],
    ),
    256: (
        [(128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)],
        [(64, 32, 8, 3), (64, 64, 8, 2), (128, 32, 8, 2)],
        [(32, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2)],
    ),
}
"""16-bit inputs: the settings of each kernel, (queries, keys, warps, stages)."""
_WIDE = {
    64: (
        [(64, 32, 8, 2), (32, 32, 4, 2)],
        [(64, 32, 8, 2), (64, 32, 4, 2)],
        [(32, 32, 8, 2), (32, 64, 8, 2)],
    ),
    128: (
        [(32, 16, 8, 2), (32, 16, 4, 2)],
        [(32, 16, 8, 2), (32, 32, 8, 1)],
        [(16, 32, 8, 2), (32, 32, 8, 1)],
    ),
    256: (
        [(32, 16, 8, 1), (16, 32, 8, 1)],
        [(32, 16, 8, 1), (32, 16, 4, 1)],
        [(16, 32, 8, 1), (16, 32, 4, 1)],
    ),
}
"""Float32 inputs; tensor cores are used only where TF32 is allowed."""
