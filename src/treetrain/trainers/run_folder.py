"""The output folder of a run: which folders are refused, which of their contents are ours, and the lock.

A run creates `.treetrain` in its output folder, for its lock and for what is not complete yet. This folder and every
checkpoint contain `treetrain.txt`. Only folders with this mark are ever replaced or deleted.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from treetrain.core.errors import quoted

OWN = ".treetrain"
MARK, MARK_TEXT = "treetrain.txt", "Written by treetrain, which may replace or delete this folder.\n"
LOCK, WORKING = "lock", "working"
WRITTEN = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.model", "*.jinja"),
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer*.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*processor_config.json", "trainer_state.json"),
    "README.md",
)
"""Patterns of names in an output folder that saving a model there overwrites, or deletes as old shards."""
SYSTEM = (
    *("bin", "boot", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr/bin", "usr/include", "usr/lib"),
    *("usr/lib64", "usr/sbin", "usr/share", "System", "Library"),
)
"""System folders. No run writes there, nor to any folder below."""
SHARED = (
    *("", "dev", "dev/shm", "home", "media", "mnt", "opt", "root", "run", "srv", "tmp", "usr", "usr/local", "var"),
    *("var/lib", "var/log", "var/tmp", "Users", "Volumes", "private", "private/tmp"),
)
"""Folders that many share. No run writes there, but it may write to a folder below."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_WHOLE_FILE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""The `struct flock` of a lock on all bytes of a file."""


class FolderRefused(ValueError):
    """An output folder that this run must not write to. The message says why, and what to do."""


def check_name(output_dir: str) -> None:
    """Refuse what cannot be the folder of a run, without touching it. Raises FolderRefused."""

    def refuse(why: str) -> None:
        raise FolderRefused(f"output_dir {quoted(output_dir)} {why}; give a folder of its own, such as 'runs/first'")

    if not output_dir.strip() or any(part and not part.strip() for part in output_dir.split("/")):
        refuse("is blank")
    if not output_dir.isprintable():
        refuse("has control characters or line breaks in its name")
    if any(len(part.encode()) > 255 for part in output_dir.split("/")):
        refuse("has a name of more than 255 bytes")
    path = Path(os.path.abspath(output_dir))
    try:
        for each in (path, *path.parents):
            if os.path.lexists(each):
                break
        if each.is_symlink() and not each.exists():
            refuse(f"is, or is in, a link to {quoted(os.readlink(each))}, which does not exist")
        if not each.is_dir():
            refuse("is a file" if each == path else f"is in {each}, which is a file")
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        return refuse(f"cannot be used ({error})")
    homes = {Path(os.path.expanduser("~")).resolve(), *Path(os.path.expanduser("~")).resolve().parents}
    shared = {Path("/", name).resolve() for name in SHARED} | {Path(tempfile.gettempdir()).resolve()}
    system = {Path("/", name).resolve() for name in SYSTEM}
    if real in homes | shared:
        refuse(f"is {real}, which holds more than a run")
    if system & {real, *real.parents}:
        refuse(f"is {real}, in a folder of the system")
    if not os.access(each, os.W_OK | os.X_OK):
        refuse(f"cannot be written: no right to write in {each}")


def check_contents(
    folder: Path, *, resume: str | bool | None, overwrites: bool, models: Sequence[str], how: str
) -> None:
    """Refuse a folder with anything that a run would replace, without touching it.

    Args:
        resume: as `Trainer.train` takes it: whether, or from which checkpoint, the run goes on.
        overwrites: the user allows replacing what earlier runs and others have left.
        models: folders that the run's models were loaded from.
        how: the setting that allows overwriting, shown in messages.

    Raises:
        FolderRefused: the message names what is in the way.
    """
    own = folder / OWN
    if os.path.lexists(own) and not (is_own(own) or _is_half_made(own)):
        raise FolderRefused(f"{own} was not made by treetrain, which needs this name: move it away")
    check_links(folder)
    if overwrites or not folder.is_dir():
        return
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
    foreign = [name for name in checkpoints if not is_own(folder / name)]
    named = folder if folder.name else Path(os.path.abspath(folder))  # "." has no name
    free = next(path for n in range(2, 10**6) if not os.path.lexists(path := named.with_name(f"{named.name}-{n}")))
    cure = f"give a new output_dir such as {free}, or allow it with {how}"
    if foreign:
        raise FolderRefused(
            f"{folder} holds {_some(foreign)}, which treetrain did not write and a run may have to replace: move it "
            f"away, {cure}"
        )
    for model in filter(os.path.isdir, models):
        if os.path.samefile(model, folder):
            raise FolderRefused(f"{folder} is the folder of the model {model}, which the run would overwrite: {cure}")
    here = resume if isinstance(resume, bool | None) else Path(resume).resolve().parent == folder.resolve()
    if checkpoints and here:
        return
    if checkpoints:
        raise FolderRefused(
            f"{folder} holds {_some(checkpoints)} of an earlier run, which a new run would replace: resume it "
            f"(resume_from_checkpoint), {cure}"
        )
    if written := sorted({path.name for pattern in WRITTEN for path in folder.glob(pattern)}):
        raise FolderRefused(f"{folder} holds {_some(written)}, which the run would overwrite at its end: {cure}")


def check_links(folder: Path) -> None:
    """Refuse links in the places of files that a run writes. Raises FolderRefused: they would be written through."""
    names = os.listdir(folder) if folder.is_dir() else []
    links = sorted(
        name for name in names if os.path.islink(folder / name) and any(fnmatch(name, pattern) for pattern in WRITTEN)
    )
    if links:
        raise FolderRefused(
            f"{folder} holds the link {links[0]} to {quoted(os.readlink(folder / links[0]))}, which the run would "
            "write to: take it away"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _is_half_made(folder: Path) -> bool:
    """Whether a folder is empty, or has a mark that a full disk or a loss of power has cut off, and nothing foreign."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode) or not set(os.listdir(folder)) <= {MARK, LOCK, WORKING}:
            return False
        found = (folder / MARK).lstat() if os.path.lexists(folder / MARK) else None
        if found is None:
            return not os.listdir(folder)
        cut = stat.S_ISREG(found.st_mode) and found.st_size < len(MARK_TEXT)
        return cut and MARK_TEXT.startswith((folder / MARK).read_text())
    except (OSError, ValueError):
        return False


def is_own(folder: Path) -> bool:
    """Whether a folder is marked as written by treetrain; a link to one is not."""
    try:
        marked = stat.S_ISDIR(folder.lstat().st_mode) and stat.S_ISREG((folder / MARK).lstat().st_mode)
        return marked and (folder / MARK).stat().st_size < 1000 and (folder / MARK).read_text() == MARK_TEXT
    except (OSError, ValueError):
        return False


def mark(folder: Path) -> None:
    """Make a folder, and mark it as written by treetrain. Raises FolderRefused if another has made it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_own(folder):
        if not _is_half_made(folder):
            raise FolderRefused(f"{folder} was not made by treetrain, which needs this name: move it away")
        with (folder / MARK).open("w") as file:
            file.write(MARK_TEXT)
            file.flush()
            os.fsync(file.fileno())  # before anything else is in the folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder: no two runs write to one at the same time.

    The system drops the lock when the process ends, however it ends, so that none is stale. On network file systems it
    holds between hosts if the server keeps POSIX locks (NFS 4, Lustre with `-o flock`); without locks there is a
    warning. It belongs to the open file (`F_OFD_SETLK`): a POSIX lock of the process would end as soon as any code of
    the process opens and closes the file, as a callback does that copies the folder. Children of the process close it.

    Raises:
        FolderRefused: another run holds it; the message names its process and host. Or its name is taken by a link, or
            by anything else that is no file: to write there would change what is not ours.
    """
    mark(folder / OWN)
    path = (folder / OWN).resolve() / LOCK
    # A file with another name is not ours either.
    if os.path.lexists(path) and not (stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_nlink == 1):
        raise FolderRefused(f"{path} is not the lock file that treetrain needs at this place: move it away")
    busy = f"another run writes to {folder} (%s): wait for it, end it, or give another output_dir"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        try:
            if hasattr(fcntl, "F_OFD_SETLK"):  # Linux
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                said = os.read(handle, 200).decode(errors="replace").strip()
                raise FolderRefused(busy % (said or error)) from error
            warnings.warn(
                f"{folder}: its file system has no locks ({error}); see to it that no other run writes there",
                RuntimeWarning,
                stacklevel=2,
            )
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        _open_locks.add(handle)
        try:
            yield
        finally:
            _open_locks.discard(handle)
    finally:
        os.close(handle)


_open_locks: set[int] = set()


def _close_locks() -> None:
    """In a child that was forked, such as a data loader's worker, which may live longer than its killed parent."""
    for handle in _open_locks:
        os.close(handle)
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_locks)


def delete(folders: Sequence[Path], working: Path) -> None:
    """Delete folders and the working folder. Raises OSError if the output folder is not writable."""
    mark(working.parent)
    working.mkdir(exist_ok=True)
    for path in folders:  # renamed first: a kill during the deletion leaves nothing that looks like a checkpoint
        os.rename(path, working / path.name)
    shutil.rmtree(working, ignore_errors=True)
