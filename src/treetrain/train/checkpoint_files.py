"""Checkpoints as folders on disk: whole or not there at all, recognised when torn, and never in the way of a new one.

`checkpoints/step-00000120` appears by one rename, when every file in it and its manifest are on the disk. The manifest
holds the size and SHA-256 of every file, and its own, so that what a disk, a copy or an editor did is seen.
"""

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
WRITING, DELETING = ".writing-", ".deleting-"
"""Prefixes of folders that a killed run may leave behind."""
WHOLE, SHARDED = 1, 2
"""Formats: written by one process, or by several ranks."""
HASHING_THREADS = 4
"""Of a checkpoint that is checked; a rank's own files are hashed one after the other."""
_NAME = re.compile(r"step-(\d{8,})")


class TornCheckpoint(ValueError):
    """A checkpoint that is not what was written; the message says what is wrong with it."""


class CheckpointNotWritten(OSError):
    """A checkpoint that could not be written; nothing of it is left, and older ones are as they were."""


class Checkpoint(NamedTuple):
    """A checkpoint that is whole."""

    path: Path
    step: int
    facts: dict[str, Any]
    """What the writer said about it."""


def name_of(step: int) -> str:
    """The name of a checkpoint's folder; names sort as steps do."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def named(folder: Path) -> list[Path]:
    """What is named as a checkpoint in a folder of checkpoints, newest first, whole or not."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def after(folder: Path, step: int) -> list[Path]:
    """What is named as a checkpoint of a later step."""
    return [path for path in named(folder) if (step_of(path) or 0) > step]


def write(folder: Path, step: int, fill: Callable[[Path], None], facts: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint under a temporary name, bring it to the disk, and rename it.

    Args:
        folder: of all checkpoints; made where it is missing.
        fill: writes the files into the folder it is given.
        facts: plain JSON data, kept in the manifest.

    Raises:
        CheckpointNotWritten: the disk is full or does not take it for another reason.
    """
    temporary = folder / f"{WRITING}{name_of(step)}"
    try:
        make_room(folder, step)
        fill(temporary)
        return complete(temporary, step, described(temporary.iterdir()), {"format": WHOLE, **facts})
    except OSError as error:
        give_up(temporary)
        raise not_written(folder, step, error) from error
    except BaseException:
        give_up(temporary)
        raise


def make_room(folder: Path, step: int) -> Path:
    """An empty folder for the files of a checkpoint, under its temporary name. Raises OSError."""
    temporary = folder / f"{WRITING}{name_of(step)}"
    folder.mkdir(exist_ok=True)
    _remove(temporary)
    temporary.mkdir()
    return temporary


def described(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files by name, when they are on the disk. Raises OSError."""
    found = {}
    for file in sorted(files):
        sync(file)
        found[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    return found


def complete(temporary: Path, step: int, files: Mapping[str, Any], facts: Mapping[str, Any]) -> Checkpoint:
    """Write the manifest of a checkpoint whose files are on the disk, and give it its name.

    Args:
        temporary: of `make_room`.
        files: of `described`; all that it is to hold.
        facts: plain JSON data, kept in the manifest; the format among them.

    Raises:
        OSError: the disk does not take it.
    """
    folder = temporary.parent
    path = folder / name_of(step)
    contents = {"step": step, "files": dict(sorted(files.items())), **facts}
    text = json.dumps({"contents": contents, "sha256": _digest_of(contents)}, indent=1)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync(temporary / MANIFEST)
    sync(temporary)
    delete([path])  # one of the same step that was not whole, or that a resumed run has passed again
    os.replace(temporary, path)
    sync(folder)
    sync(folder.parent)
    return Checkpoint(path, step, contents)


def give_up(temporary: Path) -> None:
    """Remove what was written of a checkpoint."""
    _remove(temporary)


def read(path: Path, *, contents: bool = True) -> Checkpoint:
    """Check a checkpoint against its manifest.

    Args:
        contents: read every byte; else only names and sizes are compared.

    Raises:
        TornCheckpoint: a file is missing, of another size or changed.
        OSError: it cannot be read.
    """
    facts = _manifest(path)
    for name, expected in facts["files"].items():
        file = path / name
        if not file.is_file():
            raise TornCheckpoint(f"{path}: {name} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise TornCheckpoint(f"{path}: {name} has {size:,} bytes, {expected['bytes']:,} were written")
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = pool.map(_sha256, (path / name for name in facts["files"] if contents))
        for (name, expected), digest in zip(facts["files"].items(), digests):
            if digest != expected["sha256"]:
                raise TornCheckpoint(f"{path}: the contents of {name} are not what was written (its SHA-256 differs)")
    return Checkpoint(path, facts["step"], facts)


def newest(folder: Path, *, contents: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a folder, and what is wrong with the newer ones that are not."""
    torn = []
    for path in named(folder):
        try:
            return read(path, contents=contents), torn
        except (TornCheckpoint, OSError) as error:
            torn.append(str(error))
    return None, torn


def at(path: Path, *, contents: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that is named by its folder, or by that of its run; see `newest`.

    Raises:
        TornCheckpoint: a checkpoint itself was named, and is not whole.
    """
    if step_of(path) is not None and path.is_dir():
        return read(path, contents=contents), []
    inner = path / FOLDER
    return newest(inner if inner.is_dir() else path, contents=contents)


def delete(paths: Iterable[Path]) -> None:
    """Remove checkpoints: each is renamed first, so that a kill in between leaves none that looks whole."""
    for path in paths:
        if path.exists():
            doomed = path.with_name(f"{DELETING}{path.name}")
            _remove(doomed)
            os.replace(path, doomed)
            _remove(doomed)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def free_space(folder: Path) -> str:
    """What the disk of a folder has left, in words."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"
    except OSError:
        return "its free space is not known"


def _manifest(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        contents = stored["contents"]
        right = stored["sha256"] == _digest_of(contents)
    except FileNotFoundError:
        raise TornCheckpoint(f"{path}: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise TornCheckpoint(f"{path}: {MANIFEST} cannot be read") from None
    if not right:
        raise TornCheckpoint(f"{path}: the contents of {MANIFEST} are not what was written")
    if contents["format"] not in (WHOLE, SHARDED):
        told = f"this version reads {WHOLE} and {SHARDED}"
        raise TornCheckpoint(f"{path} is of format {contents['format']}, {told}")
    return contents


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_of(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path, ignore_errors=True)


def not_written(folder: Path, step: int, error: Exception) -> CheckpointNotWritten:
    """What is told of a checkpoint that an error kept from being written."""
    told = (isinstance(error, OSError) and error.strerror) or error
    reason = f"{told}; {free_space(folder.parent)}"
    return CheckpointNotWritten(f"the checkpoint of step {step} could not be written to {folder} ({reason})")


class NotedFile(io.FileIO):
    """A file to write to that remembers why it could not be written; torch tells something else."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """All of it."""
        try:
            view, done = memoryview(data).cast("B"), 0
            while done < len(view):
                done += super().write(view[done:])
            return done
        except OSError as error:
            self.failure = error
            raise
