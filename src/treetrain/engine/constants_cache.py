"""Measured constants, kept in a file of the user's cache folder so that a model is measured once on a machine."""

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from treetrain.planning.constants import Constants

VARIABLE = "TREETRAIN_CACHE"
"""Names another folder; "off" keeps nothing on disk."""
_VERSION = 1


def folder() -> Path | None:
    """Where constants are kept: $TREETRAIN_CACHE, else treetrain under $XDG_CACHE_HOME or ~/.cache; None if off."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen.lower() == "off":
        return None
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treetrain"
    return base / "constants"


def load(key: dict[str, Any]) -> Constants | None:
    """The constants stored for a key; None where there are none. A file that cannot be read is told about."""
    path = _path(key)
    if path is None or not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None  # another key of the same digest
        return Constants.from_dict(stored["constants"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} holds no measured constants ({error}); they are measured again", stacklevel=2)
        return None


def store(key: dict[str, Any], constants: Constants) -> None:
    """Keep constants for a key. A folder that cannot be written to costs a measurement per run, and is told about."""
    path = _path(key)
    if path is None:
        return
    text = json.dumps({"key": key, "constants": constants.as_dict()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)  # in one step: a reader sees the old file or the new one
    except OSError as error:
        warnings.warn(
            f"measured constants could not be stored ({error}); set {VARIABLE} to a writable folder, or to off",
            stacklevel=2,
        )


def _path(key: dict[str, Any]) -> Path | None:
    where = folder()
    digest = hashlib.sha256(json.dumps([_VERSION, key], sort_keys=True).encode()).hexdigest()[:16]
    return None if where is None else where / f"{digest}.json"
