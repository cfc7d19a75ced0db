"""A few processes of one gloo group that stay alive and run functions for tests; one that hangs is a failure.

The processes are forked from one that has imported torch and transformers, so that they start at once.
"""

import datetime
import gc
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

SIZE = 4
TIMEOUT = 60.0
"""Seconds that a function may take; a collective gives up somewhat earlier."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "rank_steps", "trainer_runs", "safe_runs", "peft", "pytest"])


def start(target: Callable[..., None], *args: Any) -> Any:
    """A process that is forked from one that has imported what all need, and ends with this one.

    That one is started once, here or by an earlier call, and reads from PYTHONPATH where these modules are.
    """
    tests, path = Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")
    if str(tests) not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tests), f"{tests}/parallel", f"{tests}/trainers", path])
    process = _CONTEXT.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankFailed(AssertionError):
    """A function failed, or did not come back, on some rank."""


class Processes:
    """Ranks 0 to SIZE - 1 on this host; `run` sends the same function to the first few of them."""

    def __init__(self, size: int = SIZE):
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._calls = 0
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            self._processes.append(start(_serve, rank, size, port, there))
            there.close()
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = TIMEOUT) -> list[Any]:
        """`function(group, *args)` on ranks 0 to size - 1; what it returned, by rank.

        Raises:
            RankFailed: with the tracebacks of the ranks that failed; the processes are ended then.
        """
        pipes = self._pipes[:size]
        self._calls += 1
        for pipe in pipes:
            pipe.send((function, args, size, self._calls))
        found: dict[int, Any] = {}
        while len(found) < size:
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], timeout)
            if not ready:
                self.stop()
                raise RankFailed(f"ranks {sorted(set(range(size)) - set(found))} did not come back in {timeout:g} s")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = (False, "the process ended")
        failed = not all(went_well for went_well, _ in found.values())
        if failed:
            self.stop()  # one of them may still be within a collective
            raise RankFailed("\n".join(f"rank {rank}: {found[rank][1]}" for rank in range(size)))
        return [found[rank][1] for rank in range(size)]

    @property
    def alive(self) -> bool:
        """Whether all processes are there."""
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End them, wherever they are."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _name_groups_from(number: int) -> None:
    """Have all ranks name new groups by equal numbers again.

    torch numbers groups, and since 2.14 those too that are made by their members alone, which other ranks do not count.
    """
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = number  # type: ignore[attr-defined]


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support import counts

    torch.set_num_threads(1)
    gc.freeze()  # as in tests/conftest.py
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=TIMEOUT * 0.75)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    # By all of them: the name of a group that is made by its members alone depends on what each has made before.
    groups: dict[int, Any] = {size: dist.group.WORLD}
    for wanted in range(1, size):
        _name_groups_from(10 * wanted)
        groups[wanted] = dist.new_group(list(range(wanted)), timeout=timeout)
        if rank >= wanted:  # all are to have as many groups as the others, see above
            dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    while True:
        try:
            function, args, wanted, number = pipe.recv()
        except EOFError:
            return
        _name_groups_from(1000 * number)
        counts.share()
        try:
            with mock.patch.dict(os.environ):  # accelerate and DeepSpeed set variables for good
                found = function(groups[wanted], *args)
            pipe.send((True, found))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
