"""The processes that share the steps of an engine: how the engine sees them. Here, this process alone.

`parallel/process_group.py` has the processes of a group, and says why they cannot wait for one another for ever.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes of one group, this one among them. This class is a group of one."""

    group: "dist.ProcessGroup | None" = None
    size = data_size = 1
    """Processes; sets of rows that make up a step."""
    rank = data_rank = 0
    """The number of this process; of its rows among the sets of rows."""
    alone = True
    """Whether this is the only process."""
    lost = False
    """Whether this process has left a call that the others wait in, so that they cannot be reached any more."""

    def together(self, call: str) -> AbstractContextManager[None]:
        """A block in which all ranks fail if one does. `call` names it, in errors."""
        return nullcontext()

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank; a collective call within `together`.

        Raises:
            RanksDisagree: another rank failed before this.
        """
        return [value]

    def same(self, settings: "dict[str, object]") -> None:
        """Raise RanksDisagree, on all ranks, unless all have the same; a collective call within `together`."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; a collective call that nothing may fail before."""
        return [value]

    def per_data_rank(self, values: Sequence[T]) -> list[T]:
        """One of the values by rank for each set of rows."""
        return list(values)

    def leave(self, error: BaseException) -> None:
        """Record that this process leaves the others in the middle of a collective call, and tell them why.

        Raises:
            RanksDisagree: the error is that another rank has left.
        """

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of any collective call, if another rank's end has caused it: which rank that is."""

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the ranks; one that no rank has stays None."""
