"""Memory: what is free, what ran out, and how a step starts over in smaller parts."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import nn

from treetrain.core.engine.executor import PassCounts
from treetrain.core.planning.devices import USABLE
from treetrain.core.planning.plan import Plan

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that a plan may use now: the device's free memory times `USABLE`.

    CPU: the system's available memory, or what a control group of this process leaves if that is less. CUDA: free
    memory, and what PyTorch's allocator has reserved but not allocated.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(USABLE["cuda"] * (free + held))
    machine, listing = psutil.virtual_memory(), Path("/proc/self/cgroup")
    free = machine.available
    for group in _control_groups(listing.read_text() if listing.exists() else ""):
        free = min(free, _left(group, free, machine.total))
    return int(USABLE["cpu"] * max(free, 0))


@cache
def _control_groups(listing: str) -> list[Path]:
    """Folders of the control groups in a process's listing (version 2, or the memory groups of version 1)."""
    folders = []
    for line in listing.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            base = _CGROUP / controllers
            inner = base / name.lstrip("/")
            folders += [inner, *[parent for parent in inner.parents if parent.is_relative_to(base)]]
    return folders


def _left(group: Path, free: int, total: int) -> int:
    """Free memory that a control group leaves: its limit minus its use, without inactive file cache."""
    for limit_name, use_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError):  # the files of the other version; a group that may not be read is left out
            limit = (group / limit_name).read_text().strip()
            # Version 2 writes "max" where there is no limit, version 1 a number beyond the memory of any machine.
            if not limit.isdigit() or int(limit) >= total:
                return free
            left = int(limit) - int((group / use_name).read_text())
            if left < free:  # statistics take longest to read
                cached = re.search(rf"^{cache_name} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
                return min(left + int(cached[1] if cached else 0), free)
            return free
    return free


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


def may_pass(error: BaseException) -> bool:
    """Whether an error is one of a moment, such as too little memory or a full disk: no cache may keep it."""
    return is_out_of_memory(error) or isinstance(error, OSError)


def callers_level() -> int:
    """The stack level, seen from the caller, of the first frame that is neither ours nor that of a library below us."""
    ours, level, frame = ("treetrain", "torch", "jaxtyping"), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    return level


class Reductions(Protocol):
    """Gradients that processes reduce; see `Sharing`."""

    @property
    def has_unreduced(self) -> bool: ...
    def drop_unreduced(self) -> None: ...


class Rollback(AbstractContextManager["Rollback"]):
    """Undoes the gradients of a step that fails within the block, or notes on the error that it cannot.

    Args:
        parameters: all that the step may add gradients to.
        sharing: knows of gradients that wait to be reduced over processes, outside of ``.grad``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sharing: Reductions):
        self._parameters, self._sharing = parameters, sharing
        self.obstacle: str | None = None
        """Why gradients cannot be restored, if they cannot."""
        if sharing.has_unreduced:
            self.obstacle = (
                "gradients of earlier calls waited to be reduced (sync=False) and are dropped: begin the step again"
            )
        elif any(p.grad is not None for p in parameters):
            self.obstacle = "gradients of earlier calls lay in .grad"

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.undo()
        if error is not None and self.obstacle is not None:
            error.add_note(f"{self.obstacle}; what this step has added to them is incomplete")

    def undo(self) -> None:
        self._sharing.drop_unreduced()
        if self.obstacle is None:
            for parameter in self._parameters:
                parameter.grad = None


@dataclass
class Try(AbstractContextManager["Try"]):
    """One try of a run; use it as a context manager, which keeps an error of memory to itself."""

    plan: Plan
    counts: PassCounts = field(default_factory=PassCounts)
    error: BaseException | None = None
    """The error that was raised within the block, if memory ran out."""

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: object) -> bool:
        if error is not None and is_out_of_memory(error):
            self.error = error
        return self.error is not None


def tries(
    plan: Plan, smaller: Callable[[int], Plan] | None, device: torch.device, rollback: Rollback | None = None
) -> Iterator[Try]:
    """Yield tries of a run until one does not run out of memory, each with half as many tokens alive. Warns once.

        for attempt in tries(plan, smaller, device):
            with attempt:
                run(attempt.plan, attempt.counts)

    Args:
        smaller: gives the plan of a number of tokens. None allows one try, where other processes wait in its passes.
        rollback: undoes the gradients of a try that fails; None if there are none.

    Raises:
        RuntimeError: the gradients of a failed try lie among those of earlier calls.
    """
    restarts = 0
    most_tokens = 0  # alive in a try that failed
    budget = sys.maxsize
    while True:
        attempt = Try(plan)
        yield attempt
        error = attempt.error
        if error is None:
            break
        if smaller is None:
            raise error
        tokens = attempt.counts.alive or plan.peak_tokens
        # Once a backward has run, ``.grad`` holds a part of the step. It can be dropped only if it holds nothing else.
        if rollback is not None and attempt.counts.backward_begun:
            if rollback.obstacle is not None:
                raise RuntimeError(
                    f"out of memory with {tokens} tokens alive; {rollback.obstacle}, so the step cannot start "
                    "over, and its gradients are incomplete: set them to None (zero_grad) and run the step "
                    f"again with budget={max(tokens // 2, 1)} or less"
                ) from error
            rollback.undo()
        restarts += 1
        most_tokens = max(most_tokens, tokens)
        budget = min(tokens, budget) // 2
        if not budget:
            raise error
        attempt.error = error = None  # its traceback keeps the tensors of the failed try alive
        if device.type == "cuda":
            torch.cuda.empty_cache()
        plan = smaller(budget)
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        warnings.warn(
            f"out of memory with {most_tokens} tokens alive; the step started over in smaller parts {times}. The "
            f"result is exact, but took longer; budget={budget} would have avoided this",
            RuntimeWarning,
            stacklevel=callers_level(),
        )
