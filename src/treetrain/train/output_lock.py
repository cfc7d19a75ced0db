"""One run per output folder at a time."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = ".lock"


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; one that is made for it and stays empty is removed.

    The kernel lets go of the lock when the process ends, however it ends, so no lock is ever left behind.

    Raises:
        ValueError: another process holds it.
    """
    made = not folder.exists()
    handle = _locked(folder / NAME)
    try:
        yield
    finally:
        # While it is still held: nobody else can have taken this file.
        (folder / NAME).unlink(missing_ok=True)
        os.close(handle)
        if made:
            with suppress(OSError):  # it is not empty: the run got somewhere
                folder.rmdir()


def _locked(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # the former holder has just removed the folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return handle  # a file system without locks cannot refuse anybody
            holder = os.read(handle, 200).decode("utf-8", "replace").strip() or "unknown process"
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise
            raise ValueError(
                f"output {path.parent} is in use by another run ({holder}); wait for its end, stop it, or name "
                "another folder"
            ) from None
        if _is_same(handle, path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return handle
        os.close(handle)  # the former holder removed it between our opening and our locking


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
