"""Counts of models that all processes of a test run share: counting a small model takes longer than its step."""

import hashlib
import os
import pickle
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

FOLDER = "TREETRAIN_TESTS_COUNTS"
"""The variable that says where they are."""


class SharedCounts(dict):
    """The library's own cache, with what other processes have counted behind it.

    A class of transformers is known by its name; all others are counted in every process.
    """

    def __init__(self, folder: Path, given: dict[Hashable, Any]) -> None:
        super().__init__(given)
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and (file := self._file(key)) is not None and file.exists():
            super().__setitem__(key, pickle.loads(file.read_bytes()))
        return super().__contains__(key)

    def __setitem__(self, key: Hashable, counts: Any) -> None:
        super().__setitem__(key, counts)
        if (file := self._file(key)) is not None:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(counts))
            part.replace(file)

    def _file(self, key: Any) -> Path | None:
        kind, *others = key
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not name.startswith("transformers.models."):
            return None
        return self._folder / hashlib.sha256(repr((name, others)).encode()).hexdigest()


def share() -> None:
    """Share counts from now on, as soon as the library can count and if a folder is named."""
    costs, folder = sys.modules.get("treetrain.engine.costs"), os.environ.get(FOLDER)
    if costs is not None and folder and type(costs._COUNTED) is dict:
        costs._COUNTED = SharedCounts(Path(folder), costs._COUNTED)  # type: ignore[attr-defined]
