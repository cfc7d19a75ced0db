"""Checkpoints as folders on disk: complete or absent, and checked for later changes.

A checkpoint is written to a temporary folder beside its place. When every file is on the disk, a manifest with the
sizes and SHA-256 of all files (and of itself) is added, and one rename gives the folder its name. A kill at any moment
therefore leaves a complete checkpoint or none. Later changes by a disk, a copy or an editor are seen before loading.

Nothing here needs torch.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
WRITING = ".writing"
"""The folder, beside the checkpoints, in which one is written."""
DELETING = ".deleting-"
"""Prefix of checkpoints that are being deleted."""
LOCK = ".lock"


class TornCheckpoint(ValueError):
    """A checkpoint that differs from what was written. The message names the file and what differs."""


class CheckpointNotWritten(OSError):
    """A checkpoint that could not be written. Nothing of it is left, and older ones are as they were."""


def describe(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, dict[str, Any]]:
    """Sync the files of a folder to disk and compute their sizes and SHA-256; each rank does a share of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())[rank::ranks]
    for path in files:
        sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return {name: {"bytes": size, "sha256": _sha256(folder / name)} for name, size in sizes.items()}


def commit(temporary: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint whose files are on the disk, and move the folder to its place.

    Args:
        temporary: `<folder>/.writing/<name>`; it becomes `<folder>/<name>`.
        files: from `describe`.
        facts: JSON data that the manifest holds too.
    """
    folder = temporary.parents[1]
    order = 1 + max((manifest["order"] for _, manifest in manifests(folder)), default=0)
    contents = {"order": order, "files": dict(sorted(files.items())), **facts}
    text = json.dumps({"contents": contents, "sha256": _digest(contents)}, indent=1)
    (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync(temporary / MANIFEST)
    for path in [*temporary.rglob("*"), temporary, temporary.parent]:
        if path.is_dir():
            sync(path)
    place = folder / temporary.name
    replaced = place.with_name(f"{DELETING}{place.name}")
    if place.exists():  # torn, or of a run that was abandoned; see `recover` for a kill between the two renames
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(place, replaced)
    os.rename(temporary, place)
    sync(folder)
    for path in (temporary.parent, replaced):
        shutil.rmtree(path, ignore_errors=True)


def recover(folder: Path) -> None:
    """Delete what killed runs left half written; a complete checkpoint in the temporary folder moves to its place."""
    for path in (folder / WRITING).glob("*"):
        try:
            check_files(path)
        except TornCheckpoint:
            continue
        if not (folder / path.name).exists():
            os.rename(path, folder / path.name)
            sync(folder)
    for path in [folder / WRITING, *folder.glob(f"{DELETING}*")]:
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint's manifest. Raises TornCheckpoint where it is missing or altered."""
    try:
        stored = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        contents, written = stored["contents"], stored["sha256"]
    except FileNotFoundError:
        raise TornCheckpoint(
            f"{checkpoint}: {MANIFEST} is missing, so this is not a checkpoint of SafeCheckpointsMixin or a torn one"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise TornCheckpoint(f"{checkpoint}: {MANIFEST} cannot be read ({error})") from None
    if (digest := _digest(contents)) != written:
        raise TornCheckpoint(f"{checkpoint}: {MANIFEST} has SHA-256 {digest[:16]}, {written[:16]} was written")
    return contents


def check_files(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest; each rank does a share of them.

    Raises:
        TornCheckpoint: the manifest or a file is missing, has another size or other contents.
    """
    for name, written in sorted(read_manifest(checkpoint)["files"].items())[rank::ranks]:
        path = checkpoint / name
        if not path.is_file():
            raise TornCheckpoint(f"{checkpoint}: {name} is missing, {written['bytes']:,} bytes were written")
        if (size := path.stat().st_size) != written["bytes"]:
            raise TornCheckpoint(f"{checkpoint}: {name} has {size:,} bytes, {written['bytes']:,} were written")
        if (digest := _sha256(path)) != written["sha256"]:
            raise TornCheckpoint(
                f"{checkpoint}: {name} has SHA-256 {digest[:16]}, {written['sha256'][:16]} was written"
            )


def manifests(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The checkpoints of a folder that have a readable manifest, and the manifests; other files are not read."""
    for path in folder.glob("checkpoint-*"):
        try:
            yield path, read_manifest(path)
        except TornCheckpoint:
            continue


def newest_first(folder: Path) -> list[Path]:
    """All folders named as checkpoints, in the order in which resuming tries them.

    The newest is the last one written, which is not always that of the highest step: a run that resumes from an older
    checkpoint, or starts again in the same folder, writes lower steps later. Those without a readable manifest come
    first, so that resuming warns about them.
    """
    orders = {path: manifest["order"] for path, manifest in manifests(folder)}
    paths = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted(paths, key=lambda path: (path not in orders, orders.get(path, 0), path.name), reverse=True)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the newest one nor the best one.

    Folders without a readable manifest are left alone: they may be anything.
    """
    newest = [path for path, _ in sorted(manifests(folder), key=lambda each: each[1]["order"], reverse=True)]
    if not limit or limit < 1 or not newest:
        return
    kept = {newest[0].resolve(), *([Path(best).resolve()] if best else [])}
    others = [path for path in newest if path.resolve() not in kept]
    for path in others[max(0, limit - len(kept)) :]:
        # Renamed first: a kill during the deletion leaves nothing that looks like a checkpoint.
        doomed = path.with_name(f"{DELETING}{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def one_run_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The kernel releases the lock when the process ends, however it ends.

    Raises:
        CheckpointNotWritten: the folder cannot be written to.
        ValueError: another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointNotWritten(f"checkpoints cannot be written to {folder}: {error.strerror}") from error
    try:
        try:
            # Not flock: workers of a data loader would inherit it and hold it after a kill.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(handle, 200).decode("utf-8", "replace") or "an unknown process"
                raise ValueError(
                    f"{folder} is in use by another run ({holder}): wait for its end, or give another output_dir"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
                raise
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
