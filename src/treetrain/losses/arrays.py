"""Facts of the host on their way to a device. Losses import nothing of the engine, so this stands here once more."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor; to a GPU from pinned memory, so that the host does not wait for what it is doing.

    Args:
        dtype: None keeps the array's own.
    """
    tensor = torch.as_tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
