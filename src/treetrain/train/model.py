"""The models of a run, loaded and where they belong: whole on a device, or cut over the ranks."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from treetrain.engine.ranks import check_same
from treetrain.models.loading import load_model
from treetrain.train.adapters import add_adapter
from treetrain.train.config import TrainConfig
from treetrain.train.meta_init import load_sharded
from treetrain.train.parallel import World
from treetrain.train.sharding import shard


def placed_model(name: str, config: TrainConfig, world: World, *, trained: bool = True) -> nn.Module:
    """A model with float32 weights; a collective call over several ranks.

    Args:
        name: preset, folder or hub id.
        trained: with the configured adapter, to be trained; else all of it is frozen.
    """
    if config.meta_init:
        model = load_sharded(name, config, world, adapter=trained)
        return model if trained else model.requires_grad_(False)
    model: nn.Module = load_model(name, seed=config.seed, dtype=torch.float32)
    return place(add_adapter(model, config) if trained else model.requires_grad_(False), config, world)


def place(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """A model that was loaded on the CPU, where it belongs."""
    if config.parallel == "fsdp":
        check_same("the weights that they have loaded", world.ranks.gather(_digest(model)))
        return shard(model, config, world)
    nn.Module.to(model, world.device)
    if not world.ranks.alone:
        _take_first(model, world)
    return model


def _take_first(model: nn.Module, world: World) -> None:
    """Give every rank the weights and buffers of rank 0: each has loaded its own, and files may differ over hosts."""
    with torch.no_grad():
        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            dist.broadcast(tensor.detach(), group=world.ranks.group, group_src=0)


def _digest(model: nn.Module) -> str:
    """Of all bits of all weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {torch.hash_tensor(parameter.detach()).item()}\n".encode())
    return digest.hexdigest()[:16]
