"""What a run writes down: one JSON object per line, on disk as soon as it is known."""

import json
import math
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from treetrain.train.sinks import Observer, Observers

if TYPE_CHECKING:
    import torch

METRICS_FILE = "metrics.jsonl"


LASTING = ("train", "interrupted", "end")
"""Kinds of record that show that a run did something."""


class MetricsFile:
    """Appends records to `metrics.jsonl`; each is flushed at once, so that a run that dies keeps what it did.

    What a full disk does not take is kept and written with a later record, so that training goes on meanwhile.

    Until a run has done something (a step, or an end of any kind) its records stand in a file beside it: a run that
    fails before leaves nothing behind, and an earlier run's metrics as they were. An error that ends the run becomes
    the last record, `{"kind": "failed"}`.

    Args:
        folder: of the run.
        observers: are given every record after it is on disk. One that raises is left out from then on, with a warning.
        before: a file of the records that come first, those of a run that is resumed; observers have had them.
    """

    def __init__(self, folder: Path, observers: Sequence[Observer] = (), *, before: Path | None = None) -> None:
        self._path, self._draft = folder / METRICS_FILE, folder / f"{METRICS_FILE}.draft"
        if before is not None:
            shutil.copyfile(before, self._draft)
        self._file = self._draft.open("wb" if before is None else "ab", buffering=0)
        self._pending = b""
        self._observers = Observers(observers, folder)

    def write(self, record: dict[str, Any]) -> None:
        """One line. Numbers that JSON cannot hold (NaN, infinity) become null."""
        record = _plain(record)
        told = bool(self._pending)
        self._pending += (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            self.flush()
        except OSError as error:
            if not told:
                what = f"{self._path} cannot be written ({error.strerror}); its records are kept until it can"
                warnings.warn(what, RuntimeWarning, stacklevel=3)
        if record.get("kind") in LASTING and self._draft.exists():
            self._draft.replace(self._path)
        self._observers.record(record)

    @property
    def path(self) -> Path:
        """Where the records are now."""
        return self._draft if self._draft.exists() else self._path

    def flush(self) -> None:
        """Bring every record to the file. Raises OSError where the disk does not take them."""
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not self._draft.exists():
                self.write({"kind": "failed", "error": f"{type(error).__name__}: {error}", "time": time.time()})
            if error is None:
                self.flush()
        finally:
            self._file.close()
            self._draft.unlink(missing_ok=True)
            self._observers.close()


class NoMetrics:
    """In place of a `MetricsFile` on the ranks that write nothing down."""

    def write(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    @property
    def path(self) -> Path:
        """Raises: there is no file."""
        raise AssertionError("the first rank alone has a metrics file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def peak_memory_bytes(device: "torch.device") -> int:
    """Most memory the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
