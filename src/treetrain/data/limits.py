"""Bounds on the time and the memory that other people's code and files take.

Chat templates come from files and may loop without end. Only an exception in their own thread ends them: Python has no
way to stop a thread, and signals reach the main thread only. A second thread looks at the clock and sends it. The
exception arrives between two instructions of Python code, so a long call of C code is ended after it returns.

An exception that was sent must arrive. Withdrawing it (`PyThreadState_SetAsyncExc` without one) leaves a flag of the
interpreter set: all code runs slower from then on, and under a debugger CPython 3.11 loops at the next call for ever.
"""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

with contextlib.suppress(ImportError):  # not on Windows
    import resource

Result = TypeVar("Result")
_LOCK = threading.Lock()
_MEMORY_LOCK = threading.Lock()
"""Held while the limit of the process is lower, so that another thread does not take it for the user's own."""
_ends: dict[int, float] = {}
"""Thread -> when its call must have ended, for the calls that run now."""
_sent: set[int] = set()
"""Threads whose exception was sent and has not arrived."""
_watcher: list[threading.Thread] = []
"""The thread that looks at the clock; it ends when it finds no call, and does not survive a fork."""
_INTERVAL = 0.1
"""Seconds between two looks at the clock."""


class _Expired(TimeoutError):
    """The exception that the watcher sends; a call may raise a TimeoutError of its own."""


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
        _sent.discard(thread)
        _ends[thread] = time.monotonic() + seconds
    try:
        return call()
    except _Expired:
        _sent.discard(thread)
        raise
    finally:
        _forget(thread)


def _forget(thread: int) -> None:
    """End the watch; an exception that is on its way arrives here."""
    try:
        with _LOCK:
            _ends.pop(thread, None)
        while thread in _sent:
            time.sleep(0)
    except _Expired:
        _sent.discard(thread)


def _watch() -> None:
    while True:
        time.sleep(_INTERVAL)
        with _LOCK:
            if not _ends:
                _watcher.clear()
                return
            for thread in [thread for thread, end in _ends.items() if time.monotonic() > end]:
                del _ends[thread]  # one exception for each call
                _sent.add(thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Expired))


def within_memory(limit: int, call: Callable[[], Result]) -> Result:
    """Return `call()`. On Linux, the process may take `limit` more bytes of address space meanwhile, in all threads.

    Raises:
        MemoryError: it takes more.
    """
    if not sys.platform.startswith("linux"):
        return call()
    with _MEMORY_LOCK:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", "rb") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + limit
        bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([most, *bounds]), hard))
        try:
            return call()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
