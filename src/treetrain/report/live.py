"""The page of a run that is going on: written again now and then, and once more at its end."""

import time
from pathlib import Path
from typing import Any

from treetrain.report.page import PAGE_FILE, run_page, write_page
from treetrain.report.records import STOPS, read_run

EVERY_SECONDS = 10.0
SHARE = 0.02
"""Of a run's time that its page may take."""


class LivePage:
    """An observer, `Trainer(config, observers=[LivePage()])`, that keeps `report.html` in the run's folder up to date.

    It is written when the first step is done and again at most every ten seconds, less often where building it
    takes longer than a fiftieth of the time, and at the end whatever that was.

    Args:
        every_seconds: the least time between two pages.
        name: of the file.
    """

    def __init__(self, *, every_seconds: float = EVERY_SECONDS, name: str = PAGE_FILE) -> None:
        self._every, self._name = every_seconds, name
        self._folder = Path()
        self._next = 0.0
        self._stale = False

    def open(self, folder: Path) -> None:
        """Nothing is written before the run has done something."""
        self._folder = folder

    def record(self, record: Any) -> None:
        """A page where one is due."""
        kind = record.get("kind")
        self._stale = self._stale or kind == "train" or kind in STOPS
        if self._stale and (kind in STOPS or time.monotonic() >= self._next):
            self._write()

    def close(self) -> None:
        """The last records, where no page shows them yet."""
        if self._stale:
            self._write()

    def _write(self) -> None:
        started = time.monotonic()
        write_page(run_page(read_run(self._folder)), self._folder / self._name)
        self._stale = False
        taken = time.monotonic() - started
        self._next = started + max(self._every, taken / SHARE)
