"""The next step's rows and trees, made on the host while a GPU still works on the step before."""

from collections.abc import Callable

from treetrain.train.accumulate import Call
from treetrain.train.updates import Update


class Ahead:
    """Keeps the calls of one coming step. No part of a run's state: what is not there is made when its step begins.

    Args:
        make: reads the rows of a step and builds their trees; gives the same whenever it is called.
    """

    def __init__(self, make: Callable[[Update], list[Call]]) -> None:
        self._make = make
        self._kept: tuple[tuple[int, int, int], list[Call]] | None = None

    def build(self, update: Update) -> None:
        """Make the calls of a step that is to come. What goes wrong is left to the step: it meets it again."""
        self.drop()
        try:
            self._kept = _name(update), self._make(update)
        except Exception:
            self._kept = None

    def take(self, update: Update) -> list[Call] | None:
        """The calls of a step that begins; None where they were not made."""
        kept = self._kept
        self.drop()
        return kept[1] if kept is not None and kept[0] == _name(update) else None

    def drop(self) -> None:
        """Forget what was made."""
        self._kept = None


def _name(update: Update) -> tuple[int, int, int]:
    """What tells a step from all others of a run."""
    return update.batch, update.number, update.minibatch
