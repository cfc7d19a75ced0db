"""Bytes of the tensors that come and go inside a block of code.

On a CPU every operator's outputs are seen by a dispatch mode and counted while their storage lives, in backward too;
what an operator takes for itself while it runs is not seen. On CUDA the allocator keeps the same books.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(Protocol):
    """Bytes allocated since the block began."""

    @property
    def now(self) -> int:
        """Alive at this moment."""
        ...

    @property
    def peak(self) -> int:
        """Most that were alive at once since the block began, or since `restart_peak`."""
        ...

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        ...


@contextmanager
def live_bytes(device: torch.device) -> Iterator[Meter]:
    """Measure the block on a device."""
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    with _Storages() as meter:
        yield meter


class _CudaMeter:
    def __init__(self, device: torch.device):
        self._device = device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _Storages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, int] = {}

    def restart_peak(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in given:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
