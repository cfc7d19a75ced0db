"""Checkpoints of several ranks: every rank writes its share, in the background, while training goes on.

| file | holds |
| --- | --- |
| __0_0.distcp, __1_0.distcp, ... | the shares of the ranks: weights, buffers and all other tensors |
| .metadata | of torch.distributed.checkpoint: where in the shares each tensor is |
| state.pt | what is no tensor, with the tensors' paths in their places; random states of every rank |
| config.json, metrics.jsonl, manifest.json | as in a checkpoint of one process |

Any number of processes can read it, since torch.distributed.checkpoint hands every one what it holds of each tensor.
"""

import datetime
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from treetrain.engine.ranks import Ranks
from treetrain.errors import RanksDisagree
from treetrain.train import checkpoint_files
from treetrain.train.checkpoint_files import Checkpoint, NotedFile

METADATA, STATE = ".metadata", "state.pt"
TIMEOUT = datetime.timedelta(hours=6)
"""The slowest rank's disk may take so long for its share."""


class ShardedWriter:
    """Writes the checkpoints of a run over several ranks; one at a time.

    Args:
        folder: of all checkpoints, on a disk that all ranks share.
        ranks: of the run. Making this, `begin` and `wait` are collective.
        keep: the newest so many checkpoints stay.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int) -> None:
        self._folder, self._ranks, self._keep = folder, ranks, keep
        # The collectives of the background must not meet those of the training that goes on meanwhile.
        self._aside = Ranks(_second_group(ranks))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None

    @property
    def done(self) -> bool:
        """Whether there is something to `wait` for that takes no time; ranks may differ in it."""
        return self._pending is not None and self._pending.done()

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], fill: Callable[[Path], None], facts: Mapping[str, Any]
    ) -> None:
        """Begin to write; when it returns, the tensors are copied to the CPU and may change.

        Args:
            step: of the checkpoint.
            tensors: by path, the same paths on all ranks. A DTensor is written by those that hold it; another tensor
                is the same on all ranks.
            fill: called on rank 0 with the folder: writes the other files.
            facts: plain JSON data, for the manifest.

        Raises:
            CheckpointNotWritten: on all ranks; the older checkpoints are as they were.
        """
        assert self._pending is None, "another checkpoint is being written"

        def prepare() -> tuple[None, None]:
            if self._ranks.rank == 0:
                fill(checkpoint_files.make_room(self._folder, step))
            return None, None

        temporary = self._folder / f"{checkpoint_files.WRITING}{checkpoint_files.name_of(step)}"
        with self._failing(temporary, step):
            self._ranks.agree("writing a checkpoint", prepare)
        share = share_of(tensors, self._ranks)
        with _quiet():
            saved = async_save(share, storage_writer=_writer(temporary), process_group=self._aside.group)
        self._pending = self._pool.submit(self._finish, temporary, step, saved, dict(facts))  # type: ignore[arg-type]

    def wait(self) -> Checkpoint | None:
        """Wait for what is being written; None where nothing is.

        Raises:
            CheckpointNotWritten: on all ranks; nothing of it is left.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """No checkpoint follows."""
        self._pool.shutdown()

    def _finish(self, temporary: Path, step: int, saved: "Future[Any]", facts: dict[str, Any]) -> Checkpoint:
        """What follows when the shares are on the disk; in the background."""
        with self._failing(temporary, step):
            _, told = self._aside.agree("writing a checkpoint", lambda: (None, self._written(temporary, saved)))
            files = {name: entry for each in told for name, entry in each.items()}
            _, found = self._aside.agree(
                "naming a checkpoint", lambda: (None, self._named(temporary, step, files, facts))
            )
            return found[0]

    def _written(self, temporary: Path, saved: "Future[Any]") -> dict[str, dict[str, Any]]:
        """This rank's files."""
        try:
            saved.result()
        except CheckpointException as error:
            raise _as_os_error(error) from error
        return checkpoint_files.described(temporary.glob(f"__{self._aside.rank}_*"))

    def _named(
        self, temporary: Path, step: int, files: dict[str, dict[str, Any]], facts: dict[str, Any]
    ) -> Checkpoint | None:
        if self._aside.rank:
            return None
        here = {file.name: file for file in temporary.iterdir()}
        if missing := sorted(files.keys() - here.keys()):
            raise OSError(f"{temporary} lacks {missing[0]}, which another rank wrote: all ranks must share one disk")
        files |= checkpoint_files.described(file for name, file in here.items() if name not in files)
        facts = {"format": checkpoint_files.SHARDED, "ranks": self._aside.size, **facts}
        made = checkpoint_files.complete(temporary, step, files, facts)
        checkpoint_files.delete(checkpoint_files.named(self._folder)[self._keep :])
        return made

    @contextmanager
    def _failing(self, temporary: Path, step: int) -> Iterator[None]:
        """What goes wrong inside is told as a checkpoint that could not be written, of which nothing is left."""
        try:
            yield
        except (OSError, RanksDisagree, RuntimeError) as error:
            if self._ranks.rank == 0:
                checkpoint_files.give_up(temporary)
            raise checkpoint_files.not_written(self._folder, step, error) from error


def _second_group(ranks: Ranks) -> "dist.ProcessGroup":
    """Another group of the same processes, for the CPU."""
    members = dist.get_process_group_ranks(ranks.group or dist.group.WORLD)
    # Local names are made of the number of groups that a process has, in which members may differ; global ones are not.
    some = len(members) < dist.get_world_size()
    group = dist.new_group(members, backend="gloo", timeout=TIMEOUT, use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)
    return group


def share_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What a rank copies and writes: its shards, and of what all ranks hold alike about as much as the others."""
    alike = {path: tensor for path, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    filled, writer = [0] * ranks.size, {}
    for path in sorted(alike, key=lambda path: (-alike[path].nbytes, path)):
        writer[path] = filled.index(min(filled))
        filled[writer[path]] += alike[path].nbytes
    return {path: tensor for path, tensor in tensors.items() if writer.get(path, ranks.rank) == ranks.rank}


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written by several ranks."""
    return (folder / METADATA).is_file()


def stored_kinds(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Size and dtype of all tensors of a checkpoint, by path."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        path: (entry.size, entry.properties.dtype)
        for path, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_into(folder: Path, places: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, with what a checkpoint has for their paths. No collective: each rank by itself."""
    if places:
        with _quiet():
            load(places, storage_reader=FileSystemReader(folder), no_dist=True)


def _writer(folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder)
    writer.fs = _NotingFileSystem()
    return writer


class _NotingFileSystem(FileSystem):
    """Tells of a full disk as such; torch tells that its position is not what it expected."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """See the base class."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with NotedFile(path, mode) as file:
            try:
                yield file
            except RuntimeError as error:
                if file.failure is None:
                    raise
                raise file.failure from error


def _as_os_error(error: CheckpointException) -> OSError:
    """The first failure, with its rank; by itself it tells the whole trace."""
    rank, (reason, _) = min(error.failures.items())
    told = (isinstance(reason, OSError) and reason.strerror) or f"{type(reason).__name__}: {reason}"
    more = f", and {len(error.failures) - 1} more" if len(error.failures) > 1 else ""
    return OSError(f"rank {rank}{more}: {told}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remark that a process reads by itself, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield
