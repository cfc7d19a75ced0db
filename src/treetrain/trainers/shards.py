"""The state of a model that was given to `fully_shard`, written and read by torch.distributed.checkpoint.

Every rank writes and reads only its shards, and any number of ranks can read what any other number wrote.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

MODEL, OPTIMIZER, CALLBACKS = "model_shards", "optimizer_shards", "callbacks_shards"
"""Folders inside a checkpoint."""


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is held in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def frozen_digest(model: nn.Module) -> str:
    """SHA-256 of the weights that are not trained, by name, shape and content; of shards those that this rank holds."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad and not parameter.is_meta:
            local = parameter.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            content = torch.hash_tensor(local).item() if local.numel() else 0
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {content}\n".encode())
    return digest.hexdigest()


def save_model(model: nn.Module, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Write the weights; of a model with an adapter only those of the adapter."""
    save(get_model_state_dict(model, options=_options(model)), checkpoint_id=checkpoint / MODEL, process_group=group)


def load_model(model: nn.Module, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Read what `save_model` wrote into a model that may be sharded in another way, or not at all."""
    state = get_model_state_dict(model, options=_options(model))
    load(state, checkpoint_id=checkpoint / MODEL, process_group=group)
    set_model_state_dict(model, state, options=_options(model))


def save_optimizer(model: nn.Module, optimizer: Any, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Write the optimiser's state, by the names of the weights."""
    state = get_optimizer_state_dict(model, _torch_optimizer(optimizer), options=_options(model))
    save(state, checkpoint_id=checkpoint / OPTIMIZER, process_group=group)


def load_optimizer(model: nn.Module, optimizer: Any, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Read what `save_optimizer` wrote."""
    state = get_optimizer_state_dict(model, _torch_optimizer(optimizer), options=_options(model))
    load(state, checkpoint_id=checkpoint / OPTIMIZER, process_group=group)
    set_optimizer_state_dict(model, _torch_optimizer(optimizer), state, options=_options(model))


def split(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of callbacks without any tensor in shards, and those with some."""
    sharded = {name for name, state in states.items() if _has_shards(state)}
    return (
        {name: state for name, state in states.items() if name not in sharded},
        {name: state for name, state in states.items() if name in sharded},
    )


def save_callbacks(states: dict[str, Any], checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Write states of callbacks with tensors in shards."""
    save(states, checkpoint_id=checkpoint / CALLBACKS, process_group=group)


def load_callbacks(states: dict[str, Any], checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Read what `save_callbacks` wrote into states of the same form, in place."""
    load(states, checkpoint_id=checkpoint / CALLBACKS, process_group=group)


def _has_shards(state: Any) -> bool:
    if isinstance(state, dict):
        return any(_has_shards(each) for each in state.values())
    if isinstance(state, list | tuple):
        return any(_has_shards(each) for each in state)
    return isinstance(state, DTensor)


def _options(model: nn.Module) -> StateDictOptions:
    adapter = hasattr(model, "peft_config")
    return StateDictOptions(ignore_frozen_params=adapter, strict=not adapter)


def _torch_optimizer(optimizer: Any) -> Any:
    """The optimiser inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
