"""Block sizes of the Triton attention kernels worth measuring on a new device, the default first."""

import torch

from treetrain.kernels.triton_attention import Shape, Shapes, shapes_for

# (queries, keys, warps, stages) of the three kernels, by largest head size and bytes per number. All fit a Hopper
# multiprocessor (228 KB of shared memory).
_OTHERS = {
    (64, 2): (
        [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
        [(64, 64, 4, 3), (128, 128, 8, 3), (64, 128, 4, 3)],
        [(32, 64, 4, 3), (32, 128, 8, 3), (64, 64, 4, 3)],
    ),
    (128, 2): (
        [(128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
        [(128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3)],
        [(64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 3), (64, 64, 4, 2)],
    ),
    (256, 2): (
        [(128, 64, 8, 2), (64, 32, 4, 3)],
        [(64, 64, 8, 2), (128, 32, 8, 2)],
        [(64, 64, 8, 2), (32, 64, 8, 2)],
    ),
    (64, 4): (
        [(32, 32, 4, 2)],
        [(64, 32, 4, 2)],
        [(32, 64, 8, 2)],
    ),
    (128, 4): (
        [(32, 16, 4, 2)],
        [(32, 32, 8, 1)],
        [(32, 32, 8, 1)],
    ),
    (256, 4): (
        [(16, 32, 8, 1)],
        [(32, 16, 4, 1)],
        [(16, 32, 4, 1)],
    ),
}


def candidates(size: int, dtype: torch.dtype) -> dict[str, list[Shape]]:
    """The settings by field of `Shapes`."""
    largest = next(largest for largest in (64, 128, 256) if size <= largest)
    others = zip(Shapes._fields, shapes_for(size, dtype), _OTHERS[largest, dtype.itemsize])
    return {name: [default, *(Shape(*each) for each in listed)] for name, default, listed in others}
