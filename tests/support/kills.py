"""Training runs in processes of their own, which can be killed at any moment: by time, or in the middle of a write.

Processes are forked from one that has imported everything and run nothing, so that one costs a tenth of a second.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TIMES = ("time", "seconds", "peak_memory_bytes", "bytes_loaded", "flat_tokens_per_second", "free_bytes")
"""What no two runs have in common; as names, or as ends of names after an underscore."""
START_SECONDS = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "transformers.models.qwen3.modeling_qwen3", "treetrain.train.trainer"])


class Run:
    """`treetrain train ...` in a process.

    Args:
        arguments: after `train`.
        said: a file for what it prints.
        kill_at: kill it with SIGKILL right before the so-manieth call that brings something to the disk for good.
    """

    def __init__(self, arguments: Sequence[str], said: Path, *, kill_at: int | None = None) -> None:
        self.said = said
        self.process = _context.Process(target=_run, args=(list(arguments), str(said), kill_at))
        self.process.start()

    def wait(self) -> int:
        """The exit code; -9 after SIGKILL."""
        self.process.join(START_SECONDS)
        assert self.process.exitcode is not None, "the run did not end"
        return self.process.exitcode

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so, or the process is gone."""
        end = time.monotonic() + START_SECONDS
        while self.process.is_alive() and not condition():
            assert time.monotonic() < end, f"waited in vain; it said: {self.text}"
            time.sleep(0.002)

    def send(self, number: int) -> None:
        """A signal."""
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.said.read_text() if self.said.exists() else ""


def _run(arguments: list[str], said: str, kill_at: int | None) -> None:
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if kill_at is not None:
        _kill_before_call(kill_at)
    from treetrain.cli import main

    code = main(["train", *arguments])
    os._exit(code)


def _kill_before_call(number: int) -> None:
    """Die before the so-manieth call of what checkpoints and results are brought to the disk with."""
    calls = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, watched(getattr(os, name)))


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics; none where there is no file yet."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(folder: Path) -> int:
    """The last step in the metrics."""
    return max((record["step"] for record in records(folder) if record["kind"] == "train"), default=0)


def what_must_agree(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that an interruption must not change: records without times, weights, state."""
    newest = sorted(folder.glob("checkpoints/step-*/training.pt"))[-1:]
    kept = [record for record in records(folder) if record["kind"] != "resumed"]
    return {
        "records": [_timeless(record) for record in kept],
        "files": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*.safetensors"))
            if "checkpoints" not in path.parts
        },
        "state": {path.parent.name: _loaded(path) for path in newest},
    }


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two results are not the same bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        only = [f"{where}/{name}: only one has it" for name in sorted(map(str, one.keys() ^ other.keys()))]
        return only + [
            d for name in one if name in other for d in differences(one[name], other[name], f"{where}/{name}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, pair in pairs for found in differences(*pair, f"{where}/{at}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        equal = one.dtype == other.dtype and torch.equal(one, other)
        return [] if equal else [f"{where}: {one.flatten()[:3]} and {other.flatten()[:3]}"]
    return [] if type(one) is type(other) and one == other else [f"{where}: {one!r:.80} and {other!r:.80}"]


def _timeless(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    dropped = {name for name in value if name in (*TIMES, "output", "config") or str(name).endswith("_seconds")}
    return {name: _timeless(entry) for name, entry in value.items() if name not in dropped}


def _loaded(path: Path) -> Any:
    return _timeless(torch.load(path, weights_only=True))


def survive(kills: int, folder: Path, once: Callable[[Path, int], int], check: Callable[[Path], None]) -> None:
    """Runs, one after the other, until so many kills have been survived; each is checked when it has come to its end.

    Args:
        once: makes a run in a folder and kills it so often at most; says how often it did.
    """
    killed, number = 0, 0
    while killed < kills:
        number += 1
        own = folder / str(number)
        own.mkdir()
        killed += once(own, kills - killed)
        check(own / "out")
