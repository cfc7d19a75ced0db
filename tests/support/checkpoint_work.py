"""What tests of checkpoints run on several ranks: a loop whose steps are the same bit for bit however it is spread.

Its gradients are drawn by step and name, so a step is the same arithmetic on every number of a weight, wherever the
number is; what differs between two runs is then what a checkpoint has changed.
"""

import dataclasses
import hashlib
import io
import random
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from support.models import make_model
from support.rank_work import sharded
from treetrain.engine.ranks import Ranks
from treetrain.train import checkpoint_files, sharded_checkpoint
from treetrain.train.average import WeightAverage
from treetrain.train.best import Best
from treetrain.train.checkpoint import frozen_digest, seed_all
from treetrain.train.config import TrainConfig
from treetrain.train.keeper import CheckpointKeeper
from treetrain.train.metrics import METRICS_FILE
from treetrain.train.optim import make_optimizer
from treetrain.train.result import Progress
from treetrain.train.resume import Wanted, find_start
from treetrain.train.schedules import make_schedule
from treetrain.train.scores import RowScores
from treetrain.train.signals import Interrupted, StopRequest

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of the loop."""

    folder: str
    parallel: str = "fsdp"
    """none, ddp or fsdp; none on one rank."""
    total: int = 6
    every: int = 2
    keep: int = 2
    optimizer: str = "adamw"
    resume: str = "never"
    frozen: bool = False
    """Whether only the weights of the attention are trained."""
    signalled: tuple[int, int] | None = None
    """A rank and the step in which it gets SIGTERM."""
    full: tuple[int, int, int] | None = None
    """A rank whose files may not grow between two steps."""


class TinyLoop:
    """As much of `TrainLoop` as a keeper of checkpoints sees."""

    def __init__(self, job: Job, config: TrainConfig, model: nn.Module, ranks: Ranks) -> None:
        self.job, self.model, self.total, self.device, self.ranks = job, model, job.total, CPU, ranks
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, job.total)
        self.average = WeightAverage(model, 0.9)
        self.best = Best(model, patience=0, min_delta=0.0, keep=True)
        self.progress, self.scores = Progress(), RowScores("old_logprobs")
        self.pieces: dict[str, Any] = {"progress": self.progress, "optimizer": self.optimizer}
        self.pieces |= {"schedule": self.schedule, "average": self.average, "best": self.best, "updates": self.scores}
        self.metrics = Metrics(Path(job.folder), ranks)
        self.display, self.engine, self.about = self, None, {}
        self.after_step: Callable[[], None] = lambda: None
        self.stop_asked: Callable[[], bool] = lambda: False
        self.seen: list[list[str]] = []
        self.drawn: list[tuple[float, ...]] = []

    @property
    def step(self) -> int:
        return self.progress.step

    def state_dict(self) -> dict[str, Any]:
        return {name: piece.state_dict() for name, piece in self.pieces.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, piece in self.pieces.items():
            piece.load_state_dict(state[name])

    def say(self, text: str) -> None:
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def train_step(self) -> None:
        step = self.step + 1
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                torch_numbers = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
                whole = torch.randn(parameter.shape, generator=torch_numbers)
                parameter.grad = like(whole, parameter)
        self.optimizer.step()
        self.schedule.step()
        self.average.update()
        self.progress.step = step
        self.best.add(step, abs(step - 3.0))
        self.scores._scores = {step: np.full(3, step, np.float32), step + 1: np.zeros(0, np.float32)}
        self.drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
        self.metrics.write({"kind": "train", "step": step})


class Metrics:
    """The metrics file, of the first rank only."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.path, self._main = folder / METRICS_FILE, ranks.rank == 0
        if self._main:
            self.path.touch()

    def write(self, record: Any) -> None:
        if self._main:
            with self.path.open("a") as file:
                file.write(f"{record}\n")

    def flush(self) -> None:
        assert self._main


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Nested data with every tensor as a whole, told by its bits; a collective call."""
    if isinstance(value, DTensor):
        return whole(value.full_tensor())
    if isinstance(value, dict):
        return {name: whole(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [whole(entry) for entry in value]
    if not isinstance(value, Tensor):
        return value
    bits = hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {bits}"


def flat(model: nn.Module) -> np.ndarray:
    """All weights end to end; a collective call."""
    parameters = (parameter.detach() for parameter in model.parameters())
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in parameters]).numpy()


def build(group: Any, job: Job) -> tuple[nn.Module, Ranks]:
    """The model of a job, spread as it says."""
    seed_all(3)
    # Odd sizes, so that the shards of the ranks are not of one size, and some are empty.
    model = make_model("qwen3", intermediate_size=42, vocab_size=37)
    if job.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)
    if job.parallel == "fsdp":
        model = sharded(model, group)
    return model, Ranks(None if job.parallel == "none" else group)


def run(group: Any, job: Job) -> dict[str, Any]:
    """Run the loop to its end, or until a signal stops it; what every rank has at the end."""
    model, ranks = build(group, job)
    seed_all(10 + ranks.rank)
    config = TrainConfig(
        data=("rows",),
        model="model",
        output=job.folder,
        steps=job.total,
        optimizer=job.optimizer,  # type: ignore[arg-type]
        lr=1e-2,
        warmup_steps=2,
        checkpoint_every_steps=job.every,
        checkpoint_every_minutes=0,
        keep_checkpoints=job.keep,
        resume=job.resume,
    )
    data = {"rows": "a", "eval_rows": "b", "order": "c"}
    wanted = Wanted(config=config, total=job.total, data=data, environment={"machine": "this"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = find_start(wanted, ranks=ranks)
        loop, stop = TinyLoop(job, config, model, ranks), StopRequest()
        keeper = CheckpointKeeper(
            wanted,
            loop,
            start,
            stop,
            console=Console(file=io.StringIO()),
            ranks=ranks,  # type: ignore[arg-type]
        )
        keeper.begin()
        begun = {"weights": whole(dict(model.named_parameters())), "state": whole(loop.state_dict())}
        interrupted = _steps(job, loop, keeper, stop)
    return {
        "begun": begun,
        "numbers": flat(model),
        "weights": whole(dict(model.named_parameters())),
        "state": whole(loop.state_dict()),
        "drawn": loop.drawn,
        "seen": loop.seen,
        "notes": start.notes,
        "told": [str(each.message) for each in told],
        "interrupted": interrupted,
        "last": None if keeper.last is None else keeper.last.step,
    }


def run_alone(group: Any, job: Job) -> dict[str, Any] | None:
    """The same in one process: the first of the group."""
    return run(None, job) if dist.get_rank(group) == 0 else None


def _steps(job: Job, loop: TinyLoop, keeper: CheckpointKeeper, stop: StopRequest) -> str | None:
    folder, room = Path(job.folder) / checkpoint_files.FOLDER, resource.getrlimit(resource.RLIMIT_FSIZE)
    rank, first, last = job.full or (-1, 0, 0)
    try:
        while loop.step < loop.total:
            loop.train_step()
            if job.signalled == (loop.ranks.rank, loop.step):
                stop.number = signal.SIGTERM
            if loop.ranks.rank == rank and loop.step in (first, last):
                keeper._collect()  # what is still being written belongs to the time before
                limit = 5000 if loop.step == first else room[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, room[1]))
            loop.after_step()
            loop.seen.append(sorted(path.name for path in folder.glob("step-*")))
    except Interrupted as stopped:
        return f"{stopped.number} {stopped}"
    finally:
        keeper.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    return None


def digest(group: Any, job: Job) -> str:
    """Of the weights that are not trained."""
    model, ranks = build(group, job)
    return frozen_digest(model, ranks)


def slow_disk(group: Any, job: Job) -> dict[str, Any]:
    """A run whose disk takes the first byte of a checkpoint only two steps after it was begun."""
    free, file, step = threading.Event(), sharded_checkpoint.NotedFile, TinyLoop.train_step

    class Slow(file):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            assert free.wait(30), "training waits for the disk"
            super().__init__(*args)

    def train_step(self: TinyLoop) -> None:
        step(self)
        if self.step == job.every + 2:
            dist.barrier(group)
            free.set()

    sharded_checkpoint.NotedFile, TinyLoop.train_step = Slow, train_step  # type: ignore[misc, method-assign]
    try:
        return run(group, job)
    finally:
        sharded_checkpoint.NotedFile, TinyLoop.train_step = file, step  # type: ignore[misc, method-assign]
