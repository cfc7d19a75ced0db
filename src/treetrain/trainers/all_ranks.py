"""Work that succeeds on all ranks or fails on all of them, so that none waits for one that has given up."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from treetrain.trainers.checkpoint_files import CheckpointNotWritten, TornCheckpoint


def on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Do something on every rank.

    Args:
        work: takes nothing; what it returns can be pickled. It must not use collectives that a failure would skip.
        group: all ranks, on the CPU; None for one process.

    Returns:
        The results by rank.

    Raises:
        TornCheckpoint, CheckpointNotWritten, ValueError: the same that `work` raised on the first rank that failed.
        RuntimeError: `work` raised another exception there.
    """
    if group is None:
        return [work()]
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failure = error
    # An exception itself may not survive pickling: its kind and text do.
    mine = None if failure is None else (type(failure).__name__, str(failure))
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, result), group=group)
    for rank, (failed, _) in enumerate(told):
        if failed is not None:
            kinds = {kind.__name__: kind for kind in (TornCheckpoint, CheckpointNotWritten, ValueError)}
            raise kinds.get(failed[0], RuntimeError)(f"rank {rank}: {failed[1]}") from failure
    return [value for _, value in told]
