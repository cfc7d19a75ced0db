"""Memory: the bytes that are free, those that a block of code allocates, and smaller plans if it runs out."""

import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
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
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None


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


class CountStorages(TorchDispatchMode):
    """Counts every storage that an operator makes in the block, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive at this moment."""
        self.peak = 0
        """Most bytes that were alive at once; set it to `now` to start again."""
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
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def expandable_segments() -> None:
    """Let the CUDA allocator grow its segments from now on, unless the user's environment configures the allocator.

    Parts differ in size, so blocks of fixed segments would rarely fit the next part.
    """
    if torch.cuda.is_available() and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyright: ignore[reportAttributeAccessIssue]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (whose allocator raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    allocators = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    # The driver says "out of memory", and PyTorch and Triton name CUDA beside it. A kernel that asks for too much
    # shared memory is "out of resource".
    return any(name in message for name in allocators) or ("out of memory" in message and "CUDA" in message)


class StepOutOfMemory(RuntimeError):
    """Memory ran out in a step.

    Args:
        tokens: tokens that were being computed, or whose graph was alive.
        backward_begun: whether a backward had started, so that gradients may be incomplete.
    """

    def __init__(self, tokens: int, *, backward_begun: bool):
        super().__init__(f"out of memory with {tokens} tokens alive")
        self.tokens, self.backward_begun = tokens, backward_begun


class out_of_memory_in:
    """Raises StepOutOfMemory in place of any error of an allocator in the block.

    This is a class, not a generator: from Python 3.12 on, a generator that raises another error leaves the first in a
    reference cycle with its frames. The graph that did not fit would stay alive during the next try.

    Args:
        make: creates the error.
    """

    def __init__(self, make: Callable[[], StepOutOfMemory]):
        self._make = make

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: Any) -> None:
        if error is not None and is_out_of_memory(error):
            raise self._make() from error


@dataclass
class PassCounts:
    """Counts the passes of one try of a step."""

    parts: int = 0
    """Parts that ran forward with graph."""
    tokens_without_graph: int = 0
    attention: Counter[str] = field(default_factory=Counter)
    """Attention calls of forwards, by backend."""


def callers_level() -> int:
    """The stack level, seen from the caller, of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("treetrain", "torch"):
        level, frame = level + 1, frame.f_back
    return level
