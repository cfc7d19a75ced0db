"""How hypothesis runs here: the same examples every time, no deadline (the machine may be busy)."""

import zlib
from collections.abc import Callable

from hypothesis import HealthCheck, seed, settings


def seeded(name: str) -> Callable:
    """Examples of their own for one case of a test: a derandomized test draws the same ones for all its cases."""
    return seed(zlib.crc32(name.encode()))


def runs(examples: int, *, derandomize: bool = True) -> settings:
    """Settings for a number of examples; cases that are `seeded` must not be derandomized."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
