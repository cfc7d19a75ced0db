"""A bound on the time that other people's Python code takes, in any thread.

Chat templates come from files and may loop without end. Only an exception in their own thread ends them: Python has no
way to stop a thread, and signals reach the main thread only. A second thread looks at the clock and raises it. The
exception arrives between two instructions of Python code, so a long call of C code is ended after it returns.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
_LOCK = threading.Lock()
_ends: dict[int, float] = {}
"""Thread -> when its call must have ended, for the calls that run now."""
_watcher: list[threading.Thread] = []
"""The thread that looks at the clock; it ends when it finds no call, and does not survive a fork."""
_INTERVAL = 0.1
"""Seconds between two looks at the clock."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return `call()`.

    Raises:
        TimeoutError: it takes longer than `seconds`.
    """
    thread = threading.get_ident()
    with _LOCK:
        if not (_watcher and _watcher[0].is_alive()):
            _watcher[:] = [threading.Thread(target=_watch, daemon=True, name="treetrain-time-limit")]
            _watcher[0].start()
        _ends[thread] = time.monotonic() + seconds
    try:
        return call()
    finally:
        _forget(thread)


def _forget(thread: int) -> None:
    while True:
        try:
            with _LOCK:
                _ends.pop(thread, None)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)  # one that has not arrived
                return
        except TimeoutError:
            pass  # it has arrived here; the call is over


def _watch() -> None:
    while True:
        time.sleep(_INTERVAL)
        with _LOCK:
            if not _ends:
                _watcher.clear()
                return
            for thread, end in _ends.items():
                if time.monotonic() > end:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
