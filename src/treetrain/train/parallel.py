"""The processes of a run: how they find each other, which device each has, and which of them speaks for all."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from treetrain.engine.ranks import CONTROL_TIMEOUT, Ranks
from treetrain.errors import RanksDisagree
from treetrain.train.config import TrainConfig

T = TypeVar("T")
LAUNCH = "torchrun --nproc-per-node {} -m treetrain train"
"""How a run over several processes is started; `{}` is their number on a host."""

WHOLE_WEIGHTS = ("adafactor", "adamw8bit")
"""Optimisers that fail on DTensors: torch's Adafactor in an operation of its norms, bitsandbytes in its kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes of a run, this one among them."""

    ranks: Ranks
    device: torch.device
    joined: bool = False
    """The process group was made for the run, and is to be left at its end."""

    @property
    def main(self) -> bool:
        """Whether this process writes, prints and saves for all."""
        return self.ranks.rank == 0

    def leave(self) -> None:
        """The run is over for all processes; those that are alone have nothing to leave."""
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()


def join(config: TrainConfig, group: Any = None) -> World:
    """The processes of a run, which torchrun has started or which are in a group already.

    Args:
        config: of the run.
        group: of torch.distributed; None: all processes.

    Raises:
        ValueError: settings and the way of starting do not belong together, or a GPU that is not there.
    """
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if config.parallel == "none":
        if launched or group is not None:
            raise ValueError(
                f"parallel is 'none', but {os.environ.get('WORLD_SIZE', 'several')} processes were started to train "
                "together, and each would train the whole run into the same folder: give --parallel ddp or fsdp, or "
                "start one process without torchrun"
            )
        return World(ranks=Ranks(), device=_device(config.device))
    _check_available(config)
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = not dist.is_initialized()
    if joined:
        # Beside the GPUs' backend always one for the CPU: a few numbers, and gradients that are kept there.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=CONTROL_TIMEOUT)
    world = World(ranks=Ranks(dist.group.WORLD if group is None else group), device=device, joined=joined)
    _check_settings(config, world)
    return world


def _check_available(config: TrainConfig) -> None:
    if not dist.is_available():
        raise ValueError(f"parallel is {config.parallel!r}, but this torch was built without torch.distributed")
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            f"parallel is {config.parallel!r}, but this process was not started as one of several: start it by "
            f"`{LAUNCH.format(2)} ... --parallel {config.parallel}`, or leave --parallel out"
        )


def _check_settings(config: TrainConfig, world: World) -> None:
    size = world.ranks.size
    if size % config.replicas:
        raise ValueError(f"replicas is {config.replicas}, which does not divide the {size} processes of the run")
    if config.cpu_offload and world.device.type == "cpu":
        raise ValueError("cpu_offload keeps weights in CPU memory, and on a CPU they are there anyway: leave it out")
    if config.parallel == "fsdp" and config.optimizer in WHOLE_WEIGHTS:
        raise ValueError(
            f"optimizer is {config.optimizer}, whose arithmetic does not know weights that are cut over processes "
            "(parallel fsdp): use adamw, or parallel ddp"
        )


def _device(name: str, local_rank: int | None = None) -> torch.device:
    """Where a process trains. Raises ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch sees no GPU; use device cpu or auto")
    kind = "cuda" if available and name == "auto" else "cpu" if name == "auto" else name
    if kind != "cuda" or local_rank is None:
        return torch.device(kind)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this host has no GPU: there are {torch.cuda.device_count()}; start as many "
            "processes as there are GPUs (--nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


def alike(ranks: Ranks, what: str, make: Callable[[], T]) -> T:
    """Make on every rank what is the same on all; one that fails as rank 0 does leaves the message to rank 0.

    Raises:
        RanksDisagree: rank 0 says the same; or another rank could not make it.
        Exception: what `make` raised.
    """
    if ranks.alone:
        return make()
    try:
        made, failure = make(), None
    except Exception as error:
        failure = error
    told = ranks.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        if ranks.rank and told[ranks.rank] == told[0]:
            raise RanksDisagree(f"{what}: rank 0 says why it stopped") from failure
        raise failure
    failed = next((rank for rank, error in enumerate(told) if error is not None), None)
    if failed is not None:
        raise RanksDisagree(f"{what} stopped on all ranks, because of rank {failed} of {ranks.size}: {told[failed]}")
    return made  # type: ignore[possibly-undefined]


def from_main(ranks: Ranks, what: str, make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; it must pickle.

    Raises:
        RanksDisagree: rank 0 could not, on the others.
        Exception: what `make` raised, on rank 0.
    """
    _, told = ranks.agree(what, lambda: (None, make() if ranks.rank == 0 else None))
    return told[0]
