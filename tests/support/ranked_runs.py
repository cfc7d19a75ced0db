"""Training runs of several ranks, started and ended as torchrun does it, which can be killed at any moment."""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from support import kills
from treetrain.train.checkpoint_files import named
from treetrain.train.sharded_checkpoint import STATE, read_into, stored_kinds

GRACE_SECONDS = 3.0
"""What is left of a run so long after one of its ranks has ended gets SIGTERM, and as much later SIGKILL."""


class RankedRun:
    """`torchrun --nproc-per-node SIZE -m treetrain train ...`, its processes forked from one that has imported all.

    Args:
        arguments: after `train`.
        folder: for what the ranks print.
        size: ranks.
        kill_at: a rank, which is killed with SIGKILL right before its so-manieth call that brings something to disk.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, *, size: int = 2, kill_at: tuple[int, int] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.said = [folder / f"said-{rank}.txt" for rank in range(size)]
        self.processes = []
        for rank, said in enumerate(self.said):
            said.write_text("")
            number = kill_at[1] if kill_at is not None and kill_at[0] == rank else None
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            told = {name: str(value) for name, value in environment.items()}
            process = kills._context.Process(target=_run, args=(list(arguments), str(said), number, told), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self) -> list[int]:
        """Exit codes by rank; -9 after SIGKILL."""
        end = time.monotonic() + kills.START_SECONDS
        while any(process.is_alive() for process in self.processes):
            assert time.monotonic() < end or self._end(), f"the run did not end; it said: {self.text}"
            if any(process.exitcode for process in self.processes):
                self._end()
            time.sleep(0.005)
        return [process.exitcode for process in self.processes]  # type: ignore[misc]

    def _end(self) -> None:
        """As torchrun ends the others."""
        for number, seconds in ((None, GRACE_SECONDS), (signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 30.0)):
            for rank in range(len(self.processes)):
                if number is not None:
                    self.send(rank, number)
            end = time.monotonic() + seconds
            for process in self.processes:
                process.join(max(end - time.monotonic(), 0))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so, or a rank is gone."""
        end = time.monotonic() + kills.START_SECONDS
        while all(process.is_alive() for process in self.processes) and not condition():
            assert time.monotonic() < end, f"waited in vain; it said: {self.text}"
            time.sleep(0.002)

    def send(self, rank: int, number: int) -> None:
        """A signal to one rank."""
        process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, number)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """All that the first rank printed, and the others after it."""
        return "\n".join(said.read_text() for said in self.said)


def _run(arguments: list[str], said: str, kill_at: int | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    kills._run(arguments, said, kill_at)


def what_must_agree(folder: Path) -> dict[str, Any]:
    """See `kills.what_must_agree`; with the state that the newest checkpoint has, whoever wrote it."""
    newest = named(folder / "checkpoints")[0]
    kinds = stored_kinds(newest)
    tensors = {path: torch.empty(*kind[:1], dtype=kind[1]) for path, kind in kinds.items()}
    read_into(newest, tensors)
    plain = kills._timeless(torch.load(newest / STATE, weights_only=True))
    return kills.what_must_agree(folder) | {"state": {"step": newest.name, "tensors": tensors, "plain": plain}}
