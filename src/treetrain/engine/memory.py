"""Out of memory, handled as a plan that was too large.

A forward that does not fit is split and run again by the walk itself. What cannot be run again alone (a backward, one
token that does not fit beside the graphs that are alive) starts the step over under half as large a budget. `Passes`
notes what fitted, so that the budget that is named is one whose every pass is no larger.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from treetrain.planning.plan import Plan

T = TypeVar("T")
Sizes = list[tuple[int, int]]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (whose allocator raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    told = str(error)
    if any(
        words in told for words in ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    ):
        return True
    # The driver's own words, as PyTorch and Triton pass them on; a kernel that asks for too much shared memory is
    # "out of resource".
    return "out of memory" in told and "CUDA" in told


def release_cached(model: nn.Module) -> None:
    """Give memory that the allocator holds on to back to the device."""
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()


class StepOutOfMemory(RuntimeError):
    """Memory ran out where nothing can be run again by itself.

    Args:
        tokens: whose graph was alive.
        begun: whether gradients may have been added, which are incomplete then.
    """

    def __init__(self, tokens: int, *, begun: bool):
        super().__init__(f"out of memory while the graph of {tokens} tokens was alive")
        self.tokens, self.begun = tokens, begun


class out_of_memory_in:
    """Memory that runs out in the block means that the step must start over.

    No generator: from Python 3.12 on, one that raises another error leaves the first in a cycle with its frames, and
    so the graph that did not fit is alive beside the next try until garbage is collected.

    Args:
        made: says what was alive when it is asked, and whether gradients are incomplete.
    """

    def __init__(self, made: Callable[[], StepOutOfMemory]):
        self._made = made

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: Any) -> None:
        if error is not None and is_out_of_memory(error):
            raise self._made() from error


class Passes:
    """What fitted of one try of a step: (tokens of graphs that were alive beside it, tokens of the pass), each.

    Args:
        budget: that the step started over with; None for the first try.
        scored: passes that scored parts without graph before.
        trains: whether parts are to be trained too, be it later.
    """

    def __init__(self, budget: int | None = None, scored: Sizes | None = None, *, trains: bool = True):
        self.budget, self.trains = budget, trains
        self.graph: Sizes = []
        self.published: Sizes = []
        self.scored: Sizes = list(scored or [])
        self.split = 0
        """Tokens of the largest pass that did not fit and was run again in smaller ones."""

    def avoided_by(self, replan: Callable[[int], Plan]) -> int | None:
        """The largest budget found under which no pass is larger than one that fitted; None where there is none."""
        if not self.split and self.budget is not None:
            return self.budget
        return next((budget for budget in self._candidates() if self._fits(replan(budget))), None)

    def _candidates(self) -> Iterator[int]:
        sizes = self.graph or self.published + self.scored
        largest = max((tokens for _, tokens in sizes), default=0)
        alive = max((above + tokens for above, tokens in self.graph), default=0)
        if alive > largest:
            yield alive
        while largest:
            yield largest
            largest //= 2

    def _fits(self, plan: Plan) -> bool:
        graph = np.array(self.graph, np.int64).reshape(-1, 2)
        plain = np.array(self.published + self.scored, np.int64).reshape(-1, 2)
        alive = graph.sum(1)

        def without_graph(sizes: np.ndarray, above: np.ndarray) -> bool:
            beside = _covered(sizes, above, plain[:, 1], plain[:, 0])
            return bool((beside | _covered(sizes, above + sizes, graph[:, 1], alive)).all())

        if self.scored and not without_graph(plan.sizes, np.zeros_like(plan.sizes)):
            return False
        if not self.trains:
            return True
        first = [plan.prefill_parts(number)[0] for number in range(plan.num_prefills)]
        published = np.array([len(plan.prefill_tokens(number)) for number in range(len(first))], np.int64)
        if not self.graph:  # nothing is known of them yet
            return without_graph(published, np.zeros_like(published))
        beside = (plan.alive - plan.sizes)[first]
        return without_graph(published, beside) and bool(_covered(plan.sizes, plan.alive, graph[:, 1], alive).all())


def _covered(size: np.ndarray, other: np.ndarray, had_size: np.ndarray, had_other: np.ndarray) -> np.ndarray:
    """bool: for which pairs there is one among those had that is at least as large in both."""
    if not len(had_size):
        return np.zeros(len(size), bool)
    order = np.argsort(had_size)
    most = np.maximum.accumulate(had_other[order][::-1])[::-1]
    at = np.searchsorted(had_size[order], size)
    return (at < len(most)) & (most[np.minimum(at, len(most) - 1)] >= other)


def within_memory(
    model: nn.Module,
    plan: Plan,
    run: Callable[[Plan, Passes], T],
    replan: Callable[[int], Plan],
    *,
    scored: Sizes | None = None,
    trains: bool = True,
) -> tuple[T, Plan, Passes]:
    """Run a plan; where memory runs out, a plan of half as many tokens alive, and so on; told in one warning.

    Args:
        run: raises StepOutOfMemory, with everything as it was before, where it must start over.
        replan: the plan under a budget of tokens.
        scored, trains: see `Passes`.

    Returns:
        what `run` gave, the plan that it was given, and its passes.
    """
    passes, restarts, largest = Passes(None, scored, trains=trains), 0, 0
    while True:
        try:
            result = run(plan, passes)
            break
        except StepOutOfMemory as error:
            tokens, largest, restarts = error.tokens, max(largest, error.tokens), restarts + 1
            cause = error.__cause__ if tokens <= 1 else None
        # Outside the handler, so that nothing holds on to what the try had made.
        if cause is not None:
            raise cause
        release_cached(model)
        passes = Passes(tokens // 2, scored, trains=trains)
        plan = replan(tokens // 2)
    if restarts or passes.split:
        _tell(restarts, largest, passes, replan)
    return result, plan, passes


def _tell(restarts: int, largest: int, passes: Passes, replan: Callable[[int], Plan]) -> None:
    told = []
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        told.append(
            f"while the graph of {largest} tokens was alive, and the step started over in smaller parts {times}"
        )
    if passes.split:
        told.append(f"in a forward over {passes.split} tokens (they were run again in smaller parts)")
    budget = passes.avoided_by(replan)
    advice = "no budget is known to avoid this" if budget is None else f"budget={budget} would have avoided this"
    warnings.warn(
        f"out of memory {'; and '.join(told)}. The result is exact, but took longer; {advice}",
        RuntimeWarning,
        stacklevel=_users_level(),
    )


def _users_level() -> int:
    """The stack level, seen from the caller, of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("treetrain", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def why_not_again(parameters: Iterable[nn.Parameter], waiting: Sized = ()) -> str | None:
    """Why a step could not start over after a part of these gradients was added; None where it can.

    Args:
        waiting: gradients of sharded weights that are not reduced yet.
    """
    if len(waiting):
        return "gradients of earlier calls waited to be reduced (sync=False) and are dropped: begin the step again"
    if any(p.grad is not None for p in parameters):
        return "gradients of earlier calls lay in .grad"
    return None


def cannot_start_over(error: StepOutOfMemory, reason: str) -> RuntimeError:
    """What to raise where gradients are lost."""
    return RuntimeError(
        f"{error}; {reason}, so the step cannot start over, and its gradients are incomplete: set them to None "
        f"(zero_grad) and run the step again with budget={max(error.tokens // 2, 1)} or less"
    )
