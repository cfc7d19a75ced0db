"""Copies NumPy arrays to a device without blocking the host, and reads and writes rows."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Convert arrays of one dtype to tensors: without a copy on a CPU, else as views of one tensor.

    Copies to a GPU start from pinned memory, so the host does not wait for the device.
    """
    assert arrays and all(a.dtype == arrays[0].dtype for a in arrays)
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    # Every array starts at a multiple of 16 entries, so that pointers have the same alignment in every call.
    lengths = [-(-a.size // 16) * 16 for a in arrays]
    pinned = device.type == "cuda"
    whole = torch.empty(sum(lengths), dtype=torch.from_numpy(arrays[0].reshape(-1)[:0]).dtype, pin_memory=pinned)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    for start, array in zip(starts, arrays):
        whole[start : start + array.size] = torch.from_numpy(np.ascontiguousarray(array)).reshape(-1)
    there = whole.to(device, non_blocking=True)
    return [there[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays)]


def on_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Convert one array to a tensor; without a copy on a CPU if the dtype is the same.

    A copy to a GPU starts from pinned memory, so the host does not wait for the device.

    Args:
        dtype: None keeps the array's dtype.
    """
    tensor = torch.as_tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


Rows = slice | Int64[Tensor, " rows"]
"""Rows of a tensor: a slice where they are consecutive, else indices."""


def rows_on(device: torch.device, rows: Int64[np.ndarray, " rows"]) -> Rows:
    """A slice if the rows are consecutive, else a tensor of indices on the device."""
    if len(rows) == 0:
        return slice(0, 0)
    if len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return on_device(rows, device)


def take_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows of a tensor; a view if they are consecutive."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put_rows(tensor: Tensor, rows: Rows, source: Tensor) -> None:
    """Write rows of a tensor, in its dtype."""
    if isinstance(rows, slice):
        tensor[rows] = source
    else:
        tensor.index_copy_(0, rows, source.to(tensor.dtype))


def add_rows(tensor: Tensor, rows: Rows, source: Tensor) -> None:
    """Add to rows of a tensor, in its dtype; a row may occur several times."""
    if isinstance(rows, slice):
        tensor[rows] += source
    else:
        tensor.index_add_(0, rows, source.to(tensor.dtype))
