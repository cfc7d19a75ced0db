"""The processes that share the steps of an engine: how the engine sees them. Here, this process alone.

`extensions/process_group.py` has the processes of a group. Why ranks cannot deadlock there, whatever fails on one:

- Ranks wait for one another in `Ranks.exchange`, in collective operations of passes, and in `Ranks.gather`, where no
  data of one rank can make it fail shortly before (when an engine is made, and averages after a step).
- Every public call runs within `together`. All ranks of a group make the same exchanges in a call, since what decides
  on an exchange (settings, the kind of call) is compared in the first one. `together` ends with one more.
- A rank that fails between two exchanges makes exactly one more: `together` sends its error in place of a value. The
  others, in their next exchange, raise RanksDisagree with it. There is a next one, since `together` ends with one.
- An error that rises on all ranks at once (their settings differ) makes all of them send it: one exchange again.
- An error of the loss in the middle of passes that ranks run together is kept until these passes are over. Any other
  error there ends the group: the process marks it as lost, and the others are told why, or time out. So does an
  interrupt (Ctrl-C) anywhere, since it may come within an exchange.

DataError, ValueError, TypeError and UnsupportedModel rise where they are found, RanksDisagree on all other ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from treetrain.core.engine.extension import Extension
from treetrain.core.hf.capability import Capabilities
from treetrain.core.tree.layout import PackedLayout

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


class Sharing:
    """Says how processes share the steps of an engine. In this class one process has everything to itself.

    `extensions/sharing.py` has processes that share steps, hold the same rows, or each hold a part of the weights.
    """

    ranks = Ranks()
    """The processes whose rows make up a step."""
    same_rows = Ranks()
    """The processes among `ranks` that hold the same rows and run the same plan (context or tensor parallel)."""
    passes_with = Ranks()
    """The processes that run every pass together with this one: they wait for one another in it."""
    collective = False
    """Whether passes are collective calls, in an order that all ranks share: each holds a shard of the weights."""
    divides_parts = 1
    """The number of processes that divide the tokens of every part; their budgets add up."""

    processes_on_host = 1
    """The number of processes that share the memory of this host."""
    may_compile = True
    """Whether layers may run compiled: not where they communicate by hooks."""
    has_own_rows = True
    """Whether other processes of the program may hold other rows (not in tensor parallel)."""

    def check_model(self, capabilities: Capabilities) -> None:
        """Raise UnsupportedModel for a model that these processes cannot divide."""

    def extensions(self, capabilities: Capabilities) -> tuple[list[Extension], list[Extension]]:
        """The extensions of sharing, for a call: those around all others, and those within all others."""
        return [], []

    def agree_on_plan(self, ranks: Ranks, layout: PackedLayout, free: int | None) -> int | None:
        """Return the bytes that a plan of this layout may use, from those that this process has free (None: unknown).

        Processes that run the same plan must have the same layout, and get the same bytes. A collective call of these
        ranks within `Ranks.together`.

        Raises:
            RanksDisagree: on all of these ranks; some that run the same plan have other layouts.
        """
        return free

    def check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise UnsupportedModel if hooks would see a rank's own gradients, before these are averaged."""

    def shards(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters whose gradients come into ``.grad`` from a reduction over processes, not from autograd."""
        return []

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of weights that several ranks hold as a whole, over these ranks."""

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait to be reduced over processes, outside of ``.grad``."""
        return False

    def drop_unreduced(self) -> None:
        """Drop gradients that are not reduced yet: the next reduction would add them to another step."""
