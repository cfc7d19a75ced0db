"""Arrays of the host, sent to a device in copies that nothing waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays, all of one dtype, as tensors of their shapes: themselves on a CPU, else parts of one.

    To a GPU they go from pinned memory, so that the host does not wait for what the device is doing.
    """
    assert arrays and all(a.dtype == arrays[0].dtype for a in arrays)
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    # Every part begins at a multiple of 16 entries, so that kernels find pointers aligned alike in every call.
    lengths = [-(-a.size // 16) * 16 for a in arrays]
    pinned = device.type == "cuda"
    whole = torch.empty(sum(lengths), dtype=torch.from_numpy(arrays[0].reshape(-1)[:0]).dtype, pin_memory=pinned)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    for start, array in zip(starts, arrays):
        whole[start : start + array.size] = torch.from_numpy(np.ascontiguousarray(array)).reshape(-1)
    there = whole.to(device, non_blocking=True)
    return [there[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays)]


def on_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """One array as a tensor of its shape; on a CPU of the same dtype the array itself.

    To a GPU it goes from pinned memory, so that the host does not wait for what the device is doing.

    Args:
        dtype: None keeps the array's own.
    """
    tensor = torch.as_tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
