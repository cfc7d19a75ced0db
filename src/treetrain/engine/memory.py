"""What running out of memory looks like."""

import torch
from torch import nn


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (whose allocator raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def release_cached(model: nn.Module) -> None:
    """Give memory that the allocator holds on to back to the device."""
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()
