"""Checks a GPU kernel on small inputs before its first use in a process.

A kernel that is right on one device, driver and library version may fail to compile, raise or be wrong on another. So
the first call of each kind (kernel, device, dtype, sizes) compares it with slow and obvious code: twice, because a race
may spare the first run. A kernel that fails is passed over, with one warning, and the next one takes its place.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from treetrain.core.engine.memory import is_out_of_memory

logger = logging.getLogger(__name__)
CHECKED = {"cuda"}
"""Types of devices on which a kernel is compared with its reference before its first use."""
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative error by dtype; 16-bit dtypes have `LIMIT_16_BITS`, float32 products in TF32 too."""
LIMIT_16_BITS = 3e-2
MOST_NAMED = 8
"""Wrong results that a message names."""
_FAILURES: dict[Hashable, str | None] = {}
"""The result of every check of this process."""


def limit_of(dtype: torch.dtype, *, tf32: bool = False) -> float:
    """The largest relative error of a kernel whose inputs have a dtype."""
    return LIMIT_16_BITS if tf32 else LIMITS.get(dtype, LIMIT_16_BITS)


Run = Callable[[], dict[str, float]]
"""Runs a kernel on one input; relative errors by the name of the result."""


def failure_of(
    kernel: str,
    case: tuple[Hashable, ...],
    dtype: torch.dtype,
    runs: Callable[[], Iterable[Run]],
    *,
    tf32: bool = False,
) -> str | None:
    """Say why a kernel must not be used; None if it is right.

    Args:
        kernel: its name, for messages.
        case: all that the kernel's code depends on; each case is checked once.
        dtype: of the kernel's inputs.
        runs: the kernel on small inputs, each compared with its reference; each is called twice.
        tf32: whether float32 products may be rounded to TF32.

    Raises:
        torch.OutOfMemoryError, MemoryError, RuntimeError: no memory is left for the small inputs, which says nothing
            about the kernel; it is checked again at the next call.
    """
    key = kernel, dtype, tf32, *case
    if key not in _FAILURES:
        started = time.perf_counter()
        reason = _failure(runs, limit_of(dtype, tf32=tf32))
        described = f"{kernel} ({', '.join(map(str, (dtype, *case)))})"
        if reason is None:
            logger.info("%s was compared with its reference in %.1f s", described, time.perf_counter() - started)
        else:
            warnings.warn(
                f"{described} is passed over, since it {reason}. The next kernel that can do its work takes its "
                "place: results are right, steps may be slower. Please report this with the rows of "
                "`python benchmarks/quarter_hour.py --only right --out rows`",
                RuntimeWarning,
                stacklevel=2,
            )
        _FAILURES[key] = reason
    return _FAILURES[key]


def _failure(runs: Callable[[], Iterable[Run]], limit: float) -> str | None:
    wrong: list[str] = []
    try:
        # The caller may be anywhere: without gradients, under autocast, in inference mode, among tensors without data
        # (a model's costs are counted so), where nothing can be compared.
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            for run in runs():
                for again in ("", ", in its second run"):
                    # `not <=` is also true of NaN.
                    wrong += [f"{name} by {error:.1e}{again}" for name, error in run().items() if not error <= limit]
    except Exception as error:  # a compiler, a driver or the kernel itself
        if is_out_of_memory(error):
            raise
        first = (str(error).strip() or "no message").splitlines()[0]
        return f"raised {type(error).__name__}: {first[:160]}"
    if not wrong:
        return None
    more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
    return f"is off in {', '.join(wrong[:MOST_NAMED])}{more} (relative; at most {limit:g})"


def relative_error(found: Tensor | Iterable[Tensor], expected: Tensor | Iterable[Tensor]) -> float:
    """|found - expected| / |expected| in float64, of one tensor or of several together.

    The error is infinite if the expected tensors are 0 and those found are not.
    """
    difference = total = 0.0
    both = ([x] if isinstance(x, Tensor) else x for x in (found, expected))
    for a, b in zip(*both, strict=True):
        wide = b.double()
        difference += float((a.double() - wide).square().sum())
        total += float(wide.square().sum())
    if total == 0:
        return math.inf if difference else 0.0
    return (difference / total) ** 0.5
