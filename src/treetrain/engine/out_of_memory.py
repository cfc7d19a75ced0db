"""Handles out of memory: the step starts over with a plan of half as many tokens alive."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from treetrain.planning.plan import Plan

T = TypeVar("T")


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


class PassCounts:
    """Counts the passes of one try of a step."""

    def __init__(self) -> None:
        self.parts = 0
        """Parts that ran forward with graph."""
        self.tokens_without_graph = 0


def within_memory(
    model: nn.Module, plan: Plan, run: Callable[[Plan, PassCounts], T], replan: Callable[[int], Plan]
) -> tuple[T, Plan, PassCounts]:
    """Run a plan; while memory runs out, retry with half as many tokens alive. Warns once.

    Args:
        run: raises StepOutOfMemory, with everything restored, if it must start over.
        replan: makes the plan under a budget of tokens.

    Returns:
        what `run` returned, the plan that it was given, and its passes.
    """
    counts, restarts, most, budget = PassCounts(), 0, 0, sys.maxsize
    while True:
        try:
            result = run(plan, counts)
            break
        except StepOutOfMemory as error:
            restarts, most, budget = restarts + 1, max(most, error.tokens), min(error.tokens, budget) // 2
            cause = None if budget else error.__cause__
        # Outside the handler, so that nothing keeps the tensors of the failed try alive.
        if cause is not None:
            raise cause
        if next(model.parameters()).device.type == "cuda":
            torch.cuda.empty_cache()
        counts, plan = PassCounts(), replan(budget)
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        warnings.warn(
            f"out of memory with {most} tokens alive; the step started over in smaller parts {times}. The result is "
            f"exact, but took longer; budget={budget} would have avoided this",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )
    return result, plan, counts


def _callers_level() -> int:
    """The stack level, seen from the caller, of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("treetrain", "torch"):
        level, frame = level + 1, frame.f_back
    return level
