"""Memory of a device: the bytes that are free, the bytes that a block of code allocates, and what malloc keeps."""

import ctypes
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU_SHARE, CUDA_SHARE = 0.8, 0.9
"""How much of the free memory a plan may use: predictions err by up to a tenth, and a CPU's memory is shared."""
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a plan may use now: the device's free memory times `CPU_SHARE` or `CUDA_SHARE`.

    CPU: MemAvailable, or what the control group leaves if that is less; None without /proc/meminfo. CUDA: free memory,
    and what PyTorch's allocator has reserved but not allocated.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(CUDA_SHARE * (free + held))
    available = _available()
    if available is None:
        return None
    limits = [left for group in _control_groups() if (left := _left(group)) is not None]
    return int(CPU_SHARE * max(min([available, *limits]), 0))


def _available() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def _control_groups() -> list[Path]:
    """Folders of the control groups that this process is in, innermost first (version 2, then version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            base = _CGROUP / controllers
            inner = base / name.lstrip("/")
            folders += [inner, *[parent for parent in inner.parents if parent.is_relative_to(base)]]
    return folders


def _left(group: Path) -> int | None:
    """The limit of a control group minus its use, without inactive file cache; None if it has no limit."""
    for limit_name, use_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, use = (group / limit_name).read_text().strip(), int((group / use_name).read_text())
            cache = re.search(rf"^{cache_name} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 1 << 60:  # version 1 writes "none" as a huge number
            return None
        return int(limit) - use + (int(cache.group(1)) if cache else 0)
    return None


class AllocatedBytes:
    """Bytes allocated since the block began."""

    now = 0
    """Alive at this moment."""
    peak = 0
    """Most that were alive at once since the block began, or since `restart_peak`."""

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now


class CountStorages(TorchDispatchMode):
    """Counts every storage that an operator makes, while it lives."""

    def __init__(self, meter: AllocatedBytes) -> None:
        super().__init__()
        self._meter = meter
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in given and self.counts(tensor):
                self.add(tensor)
        return out

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a new tensor is counted; a subclass may leave some out."""
        return True

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage, meter, key = tensor.untyped_storage(), self._meter, _key(tensor)
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            meter.now += storage.nbytes()
            meter.peak = max(meter.peak, meter.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._meter.now -= self._alive.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and to keep them. Returns whether that worked.

    Memory that is returned between steps costs page faults at every step on a CPU. This equals setting
    MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ before the start; it is a no-op without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 * 2**20))
    return all(mallopt(which, value) == 1 for which, value in settings)
