"""What reading needs of the processes that share it. The engine's `Ranks` are such; so is a process by itself."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Exchange(Protocol):
    """The processes of one group, this one among them."""

    rank: int
    size: int

    def agree(self, what: str, make: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Make something on every process: this one's own, and what each tells the others, by rank.

        What fails on one process fails on all; so do calls that differ in `what`.
        """
        ...


class Alone:
    """A process by itself."""

    rank, size = 0, 1

    def agree(self, what: str, make: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """See `Exchange.agree`."""
        made, told = make()
        return made, [told]
