"""Counts of models that all processes of a test run share: counting a small model takes longer than its step."""

import contextlib
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

FOLDER = "TREETRAIN_TESTS_COUNTS"
"""The variable that says where they are."""
CACHES = ("treetrain.models.costs", "treetrain.models.encoder_memory")
"""Modules with counts by what they depend on."""
PATIENCE = 5.0
"""Seconds to wait for a process that has begun the same count, as the ranks of a group do at one time."""


class SharedCounts(dict):
    """The library's own cache, with what other processes have counted behind it.

    A class of transformers is known by its name; all others are counted in every process.
    """

    def __init__(self, folder: Path, given: dict[Hashable, Any]) -> None:
        super().__init__(given)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and (file := self._file(key)) is not None and self._is_counted(file):
            super().__setitem__(key, pickle.loads(file.read_bytes()))
        return super().__contains__(key)

    def __setitem__(self, key: Hashable, counts: Any) -> None:
        super().__setitem__(key, counts)
        if (file := self._file(key)) is not None:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(counts))
            part.replace(file)

    @staticmethod
    def _is_counted(file: Path) -> bool:
        """Whether another process has counted it, or did so while this one waited; else this one is to count it."""
        with contextlib.suppress(FileExistsError):
            file.with_suffix(".begun").touch(exist_ok=False)
            return False
        end = time.monotonic() + PATIENCE
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return file.exists()

    def _file(self, key: Any) -> Path | None:
        kind, *others = key if isinstance(key[0], type) else (*key[0], *key[1:])
        if kind.__module__.startswith("torch.distributed.fsdp"):  # a class that FSDP2 makes of a model's own
            kind = kind.__mro__[2]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not name.startswith("transformers.models."):
            return None
        return self._folder / hashlib.sha256(repr((name, others)).encode()).hexdigest()


def share() -> None:
    """Share counts from now on, as soon as the library can count and if a folder is named."""
    folder = os.environ.get(FOLDER)
    for name in CACHES:
        module: Any = sys.modules.get(name)
        if folder and module is not None and type(module._COUNTED) is dict:
            module._COUNTED = SharedCounts(Path(folder, name), module._COUNTED)
