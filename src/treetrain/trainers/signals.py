"""Ctrl-C and SIGTERM during training: they are noted, and the run decides at the end of a step what to do."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
SAME_PRESS_SECONDS = 2.0
"""Within this time a second Ctrl-C is the same one: torchrun passes it on to processes that already have it."""


class Interrupted(SystemExit):
    """A run that Ctrl-C or SIGTERM stopped. A script that does not catch it ends with the exit code of that signal.

    Args:
        message: what was done, where the checkpoint is, and how to go on.
        number: the signal.
        checkpoint: the folder to go on from.
    """

    def __init__(self, message: str, number: int, checkpoint: Path) -> None:
        super().__init__(128 + number)  # what shells expect: 130 after Ctrl-C, 143 after SIGTERM
        self.message, self.number, self.checkpoint = message, number, checkpoint

    def __str__(self) -> str:
        return self.message


class NotedSignal:
    """The first Ctrl-C or SIGTERM that this process got, and whether the run has acted on it."""

    number = 0
    """The signal; 0 while there is none."""
    acted = False


@contextmanager
def noted_signals() -> Iterator[NotedSignal]:
    """Note Ctrl-C and SIGTERM inside the block instead of dying. A second Ctrl-C is a KeyboardInterrupt at once.

    A signal that nobody acted on is raised again at the end. One that the process ignores stays ignored. Outside the
    main thread signals cannot be handled, and are not.
    """
    noted, noted_at = NotedSignal(), 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted_at
        if not noted.number:
            noted.number, noted_at = number, time.monotonic()
            text = f"\n{NAMES[signal.Signals(number)]}: stopping after this step (Ctrl-C again: at once)\n"
            os.write(2, text.encode())  # not print, which may be in the middle of a line
        elif number == signal.SIGINT and time.monotonic() - noted_at > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in NAMES}
        before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if noted.number and not noted.acted:
        signal.raise_signal(noted.number)
