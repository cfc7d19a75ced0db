"""The files of a checkpoint: its manifest, the rename that makes it one, and which older ones may go."""

import errno
import hashlib
import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from treetrain.core.errors import quoted, shortened
from treetrain.logs.columns import Json
from treetrain.trainers.run_folder import FolderRefused, delete, is_own

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 26
"""Bytes. A larger file was not written by treetrain, and is not read."""
CONTENTS: dict[str, type] = {"order": int, "step": int, "ranks": int, "step_size": str, "files": dict, "facts": dict}
"""The entries of a manifest and their types."""


class TornCheckpoint(ValueError):
    """A checkpoint that differs from what was written. The message names the file and what differs."""


class CheckpointNotWritten(OSError):
    """A checkpoint that could not be written. No part of it is left, and older ones are unchanged."""


def hashes(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """Sync the files of a folder to the disk and return their SHA-256; each rank does a share of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[rank::ranks]
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in paths}


def commit(temporary: Path, folder: Path, contents: Mapping[str, Json], *, overwrites: bool = False) -> None:
    """Write the manifest of a checkpoint, and move it into the output folder.

    An older checkpoint of the same name (torn, or of an abandoned run) is deleted after that. If it holds files that
    treetrain did not write, it is renamed instead.

    Raises:
        FolderRefused: this name is taken by something that treetrain has not written, and `overwrites` is False.
    """
    order = 1 + max((order for order in newest_first(folder).values() if order < math.inf), default=0)
    contents = {"order": order, **contents}
    text = json.dumps({"contents": contents, "sha256": _digest(contents)}, indent=1)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [temporary / MANIFEST, *temporary.rglob("*/"), temporary, temporary.parent]:
        _sync(path)
    place, before = folder / temporary.name, folder / f"{temporary.name}-before-{order}"
    if replaces := os.path.lexists(place):  # a kill between the renames leaves `before`
        if not (is_own(place) or overwrites):
            raise FolderRefused(f"{place} was not written by treetrain: move it away")
        os.rename(place, before)
    os.rename(temporary, place)
    _sync(folder)
    if replaces and holds_only_ours(before):
        delete([before], temporary.parent)
    elif replaces:
        kept = folder / f"kept-{before.name}"
        os.rename(before, kept)
        warnings.warn(f"{kept} was {place}, and holds more than treetrain wrote: look at it", RuntimeWarning, 2)


def read_manifest(checkpoint: Path) -> dict[str, Json]:
    """The contents of a checkpoint's manifest. Raises TornCheckpoint where it is missing, altered or incomplete."""
    try:
        _regular(checkpoint / MANIFEST, LARGEST_MANIFEST)
        stored = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        contents = stored["contents"]
        if stored["sha256"] != _digest(contents):
            raise ValueError("its SHA-256 is another")
        for name, kind in CONTENTS.items():
            if type(contents.get(name)) is not kind:
                raise ValueError(f"its entry {name!r} is {shortened(contents.get(name), 40)}: another version wrote it")
        for name in contents["files"]:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"it lists {shortened(name, 40)}, which is not in the folder")
        return contents
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TornCheckpoint(
            f"{checkpoint}: {MANIFEST} is missing or altered ({shortened(error)}); plain transformers writes none"
        ) from error


def check_files(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest, each rank a share of them.

    Raises:
        TornCheckpoint: a file is missing, altered, or no file at all.
        FolderRefused: there are more files than were written. Some might be loaded.
    """
    files = read_manifest(checkpoint)["files"]
    if more := [name for name in _not_ours(checkpoint) if not Path(name).name.startswith(".")]:
        raise FolderRefused(f"{checkpoint} holds {quoted(more[0])}, which a checkpoint does not: move it away")
    for name, written in sorted(files.items())[rank::ranks]:
        try:
            _regular(checkpoint / name)
            digest = _sha256(checkpoint / name)
        except OSError as error:  # missing or unreadable
            digest = f"of no file ({error})"
        if digest != written:
            raise TornCheckpoint(f"{checkpoint}: {name} has SHA-256 {digest}, {written} was written")


def newest_first(folder: Path) -> dict[Path, float]:
    """The checkpoints of a folder with their order of writing, in the order in which resuming tries them.

    The newest is the last one written. It may not have the highest step: a run that resumes from an older checkpoint,
    or starts again in the same folder, writes lower steps later. Checkpoints without a readable manifest come first,
    with order infinity, so that resuming warns about them.
    """
    orders: dict[Path, float] = {}
    for path in folder.glob("checkpoint-*"):
        orders[path] = math.inf
        with suppress(TornCheckpoint):
            orders[path] = read_manifest(path)["order"]
    return dict(sorted(orders.items(), key=lambda item: item[1], reverse=True))


def rotate(folder: Path, limit: int | None, best: str | None, working: Path) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the newest, the best, or one with files of others."""
    if not limit or limit < 1:
        return
    newest = [path for path, order in newest_first(folder).items() if order < math.inf]
    older = [path for path in newest[1:] if path.name != Path(best or "").name]
    delete([path for path in older[max(0, limit - (len(newest) - len(older))) :] if holds_only_ours(path)], working)


def holds_only_ours(checkpoint: Path) -> bool:
    """Whether a checkpoint was written by treetrain, with all that is in it."""
    try:
        return is_own(checkpoint) and not _not_ours(checkpoint)
    except TornCheckpoint:
        return False


def _not_ours(checkpoint: Path) -> list[str]:
    """Names of what is in a checkpoint and not in its manifest. Folders that hold nothing else are not named."""
    written = {MANIFEST, *read_manifest(checkpoint)["files"]}
    folders = {parent.as_posix() for name in written for parent in PurePosixPath(name).parents}
    names = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*"))
    return sorted(name for name in names if name not in written and name not in folders)


def _regular(path: Path, largest: float = math.inf) -> None:
    """Raise OSError unless this is a file: opening a pipe would wait for ever, and links lead elsewhere."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is no regular file")
    if status.st_size > largest:
        raise OSError(f"{path.name} has {status.st_size} bytes")


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    _sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(contents: Json) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
