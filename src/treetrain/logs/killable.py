"""Runs code that is not ours in a process of its own, which can be killed.

Chat templates come from files, and may loop, compare or write without end. Nothing stops a thread within one call of C
code, and no bound on what a template may build would be complete. So a template runs in a child of this process, which
an alarm of the system ends after some time, and whose address space is limited. The child is forked: it has the
tokenizer already, and starts in milliseconds. It serves until its owner is gone. It is asked over a pipe: for one call
at a time, which both processes wait for, or for many, which it makes while its owner uses the first of them.

The child only computes text: it never touches what does not survive a fork (threads of OpenMP, a GPU), and collects no
garbage of its owner, whose finalizers may wait for such threads. Python itself clears the states of other threads in a
forked child; where one of them ends a process group of PyTorch, the child waits for ever. It is killed then.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Generic, NoReturn, TypeVar

with contextlib.suppress(ImportError):  # not on Windows
    import resource

Result = TypeVar("Result")
Groups = Sequence[Sequence[tuple[Any, ...]]]
_SIZE = struct.Struct("<Q")
PARALLELISM = "TOKENIZERS_PARALLELISM"
START_SECONDS = 30.0
_STARTED = b"1"


class ChildError(Exception):
    """The error of the function in its process: the name of its class, and its text."""

    @property
    def text(self) -> str:
        """The text alone."""
        return str(self.args[-1])

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


class Killable(Generic[Result]):
    """A function that runs in a process of its own; see the module.

    Args:
        function: its arguments and result are pickled. It is called in a copy of this process as it is at the first
            call, or after a call that was ended.
        memory: bytes of address space that it may take (on Linux).
    """

    def __init__(self, function: Callable[..., Result], memory: int) -> None:
        self._function = function
        self._memory = memory
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def __call__(self, seconds: float, *args: object) -> Result:
        """Call the function.

        Raises:
            TimeoutError: it takes longer than `seconds`; 0 lets it take any time.
            MemoryError: it takes more memory than it may.
            ChildError: it raised something else.
            RuntimeError: the process does not start.
        """
        (answers,) = self.map(seconds, [[args]])
        try:
            if isinstance(answers[0], Exception):
                raise answers[0]
            return answers[0]
        finally:
            del answers  # an error that its frame holds would keep the process until the next garbage collection

    def map(self, seconds: float, groups: Groups) -> Iterator[list[Result | Exception]]:
        """Call the function many times; the process works ahead while the results are used.

        Args:
            seconds: the time of every call.
            groups: arguments of calls whose results are used together.

        Returns:
            for every group its results in order. Where a call fails, its error is the last of them, and the calls of
            the group that follow are not made.
        """
        with self._lock:
            asked = self._ask(seconds, groups)
        return self._mapped(asked, seconds, groups)

    def _mapped(self, asked: "_Asked", seconds: float, groups: Groups) -> Iterator[list[Result | Exception]]:
        for at in range(len(groups)):
            with self._lock:
                if not asked.answers and (asked.child is not self._child or asked.child.owner != os.getpid()):
                    asked = self._ask(seconds, groups[at:])  # the process was ended, or this one is a fork
                while not asked.answers:
                    self._read(asked.child)
                answers = asked.answers.popleft()
            yield answers

    def _ask(self, seconds: float, groups: Groups) -> "_Asked":
        """Send arguments to the process, a new one if there is none."""
        data = pickle.dumps((seconds, groups), pickle.HIGHEST_PROTOCOL)
        # A process that waits until its answers are read does not read.
        while (child := self._child) is not None and child.owner == os.getpid() and child.owes:
            self._read(child)
        if child is None or child.owner != os.getpid():
            child = self._child = _Child(self._function, self._memory)
        asked = _Asked(child)
        child.owes.extend((asked, len(group)) for group in groups)
        with self._ended_by_errors(), contextlib.suppress(BrokenPipeError):  # it has ended, as its answer will say
            child.send(data)
        return asked

    def _read(self, child: "_Child") -> None:
        """Read the answers to the next group that the process owes."""
        asked, count = child.owes.popleft()
        answers: list[Any] = []
        with self._ended_by_errors():
            while len(answers) < count and not (answers and isinstance(answers[-1], Exception)):
                try:
                    answers.append(child.answer())
                except (EOFError, OSError):
                    answers.append(_reason(self._end()))
        asked.answers.append(answers)

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C: the answer is still to come
            self._end()
            raise

    def _end(self) -> int:
        child, self._child = self._child, None
        return 0 if child is None else child.end()


class _Asked:
    """Groups of calls that a process was asked for together."""

    def __init__(self, child: "_Child") -> None:
        self.child = child
        self.answers: deque[list[Any]] = deque()
        """Those that have been read and not used."""


def _reason(ended: int) -> Exception:
    """The error that stands for the answer of a process which a signal has ended."""
    if ended == signal.SIGALRM:
        return TimeoutError()
    if ended == signal.SIGKILL:  # the system had no memory left
        return MemoryError()
    return ChildError("EOFError", f"its process was ended by {signal.Signals(ended).name if ended else 'itself'}")


class _Child:
    def __init__(self, function: Callable[..., Any], memory: int) -> None:
        self.owner = os.getpid()
        self.owes: deque[tuple[_Asked, int]] = deque()
        """The groups of calls whose answers have not been read, with their sizes."""
        reading, self._asks = os.pipe()
        self._answers, writing = os.pipe()
        with _quiet_fork():
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._asks)
            os.close(self._answers)
            _serve(function, memory, reading, writing)
        os.close(reading)
        os.close(writing)
        self._file = open(self._answers, "rb")  # noqa: SIM115  # closed by _end
        self._gone = weakref.finalize(self, _end, self.owner, self._pid, self._asks, self._file)
        start = select.poll()
        start.register(self._answers, select.POLLIN)
        if not start.poll(START_SECONDS * 1000):
            self.end()
            raise RuntimeError(
                f"a process forked from thread {threading.current_thread().name!r} has not started within "
                f"{START_SECONDS:g} s: what other threads hold does not survive a fork; read rows and render chats in "
                "the main thread, or before a process group is made"
            )
        self._file.read(len(_STARTED))

    def send(self, data: bytes) -> None:
        _send(self._asks, data)

    def answer(self) -> Any:
        """The result of the next call, or an exception in place of what it raised."""
        is_value, value = _receive(self._file)
        if is_value:
            return value
        return MemoryError() if value is None else ChildError(*value)

    def end(self) -> int:
        """Kill the process; returns the signal that had ended it, or 0."""
        return self._gone() or 0


def _end(owner: int, pid: int, asks: int, file: IO[bytes]) -> int:
    if owner != os.getpid():
        return 0
    file.close()
    os.close(asks)
    with contextlib.suppress(ProcessLookupError):
        # A process that has ended keeps the signal that ended it.
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return 0


def _serve(function: Callable[..., Any], memory: int, reading: int, writing: int) -> NoReturn:
    """The loop of the child, until nobody asks any more."""
    try:
        gc.freeze()
        os.write(writing, _STARTED)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        if sys.platform.startswith("linux"):
            with open("/proc/self/statm", "rb") as statm:
                most = int(statm.read().split()[0]) * resource.getpagesize() + memory
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min([most, *bounds]), hard))
        with open(reading, "rb") as file:
            while True:
                seconds, groups = _receive(file)
                for group in groups:
                    for args in group:
                        signal.setitimer(signal.ITIMER_REAL, seconds)
                        try:
                            answer = True, function(*args)
                        except MemoryError:
                            answer = False, None
                        except BaseException as error:
                            answer = False, (type(error).__name__, str(error))
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        _send(writing, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
                        if not answer[0]:
                            break
    finally:
        os._exit(0)  # nothing of the parent's is flushed or cleaned up a second time


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python warns of forks beside threads; tokenizers prints that it has, unless its parallelism was set."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = before or "true"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]


def _send(handle: int, data: bytes) -> None:
    view = memoryview(_SIZE.pack(len(data)) + data)
    while view:
        view = view[os.write(handle, view) :]


def _receive(file: IO[bytes]) -> Any:
    header = file.read(_SIZE.size)
    if len(header) < _SIZE.size:
        raise EOFError
    (size,) = _SIZE.unpack(header)
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)
