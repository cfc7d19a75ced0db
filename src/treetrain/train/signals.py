"""Ctrl-C and SIGTERM: the step that runs is finished, what is done is saved, and the run says how to go on."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(KeyboardInterrupt):
    """A run that was stopped from outside; its message says what was done and what is saved.

    Args:
        message: the same.
        number: the signal.
        resumable: a checkpoint is there to go on from.
    """

    def __init__(self, message: str, *, number: int = signal.SIGINT, resumable: bool = False) -> None:
        super().__init__(message)
        self.number, self.resumable = number, resumable

    def with_advice(self, command: str) -> "Interrupted":
        """The same with the command that goes on, if there is something to go on from."""
        if not self.resumable:
            return self
        return Interrupted(f"{self}; go on with: {command}", number=self.number, resumable=True)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop."""

    number: int | None = None
    """The signal; None as long as nobody has."""


@contextmanager
def stop_requests(*, say: bool = True) -> Iterator[StopRequest]:
    """Note the first Ctrl-C or SIGTERM inside the block instead of dying; a second Ctrl-C is a KeyboardInterrupt.

    SIGTERM may come any number of times, since schedulers send it to a process and to its group. A signal that the
    process was started to ignore stays ignored. Outside the main thread signals cannot be handled, and are not.

    Args:
        say: tell on stderr that the step is finished first.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.number is None:
            request.number = number
            if say:  # straight to the file: a console may be in the middle of a line
                what = f"\n{_NAMES[signal.Signals(number)]}: stopping after this step (Ctrl-C again: at once)\n"
                os.write(2, what.encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _NAMES}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
