"""Rows of records, made in several processes and kept in Arrow files that are named by the records' content.

Records are taken CHUNK at a time. A chunk whose file is there is not converted again, so a log that has grown, or is
read again with the same settings, costs what is new in it.
"""

import copy
import hashlib
import json
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from treetrain.data.arrow import MappedTrajectories, read_about, write_trajectories
from treetrain.data.trajectory import Trajectory

CHUNK = 256
"""Records of a file."""
Convert = Callable[[list[Any]], tuple[list[Trajectory], dict[str, Any]]]
"""Makes rows of records, and JSON data about them. A copy of it, and a pickled one, starts anew."""


def converted(
    records: Iterable[Any], convert: Convert, settings: Any, folder: str | os.PathLike[str] | None, processes: int
) -> Iterator[MappedTrajectories]:
    """Yield the rows of every CHUNK records, in order, with what `convert` says about them.

    Args:
        records: (place, record) each; at most a few chunks are in memory.
        convert: may be called in other processes.
        settings: what the rows depend on besides the records; plain data.
        folder: where the files stay; None: they are removed at the end.
        processes: 1 converts in this process.
    """
    here = copy.copy(convert)
    remaining, waiting = iter(records), deque[tuple[Path, Future[None] | None]]()
    with ExitStack() as stack:
        kept = Path(folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="treetrain-")))
        pool = None
        if processes > 1:
            # Not forked: the tokenizer has threads.
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, spawn, _start, (convert,)))
        while True:
            while len(waiting) < 2 * processes and (chunk := list(islice(remaining, CHUNK))):
                text = json.dumps([settings, chunk], sort_keys=True, default=repr)
                path = kept / f"{hashlib.sha256(text.encode(errors='replace')).hexdigest()}.arrow"
                if read_about(path) is not None:
                    waiting.append((path, None))
                elif pool is None:
                    _write(path, chunk, here)
                    waiting.append((path, None))
                else:
                    waiting.append((path, pool.submit(_write_there, path, chunk)))
            if not waiting:
                return
            path, future = waiting.popleft()
            if future is not None:
                future.result()
            yield MappedTrajectories(path)


def _write(path: Path, chunk: list[Any], convert: Convert) -> None:
    rows, about = convert(chunk)
    write_trajectories(path, rows, lambda: about)


_CONVERT: list[Convert] = []
"""In a worker: what it was started with."""


def _start(convert: Convert) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    _CONVERT[:] = [convert]


def _write_there(path: Path, chunk: list[Any]) -> None:
    _write(path, chunk, _CONVERT[0])
