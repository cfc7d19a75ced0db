"""A model in the hands of FSDP2: which of its modules gather their weights together, and its weights as a whole."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetrain.engine.ranks import is_shard
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.train.config import TrainConfig
from treetrain.train.parallel import World


def shard(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Cut a model's weights over the ranks: every decoder layer gathers its own, the model all others.

    Layers go to the ranks' devices one by one, so no device ever holds the whole model.

    Args:
        model: on the CPU or on meta; changed in place.

    Returns:
        the same model.

    Raises:
        UnsupportedModel: no layers are found, or layers share weights.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": _mesh(config, world),
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    for layer in sharded_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)  # in place
    return model


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that gather their weights by themselves: those that transformers says are not to be split.

    Raises:
        UnsupportedModel: there is none, or a weight belongs to several of them, or to one and to what is outside.
    """
    lm = causal_lm(model)
    members = [layer for each in lm.modules() if isinstance(each, nn.ModuleList) for layer in each]
    names = set(getattr(lm, "_no_split_modules", None) or ())
    layers = [layer for layer in members if type(layer).__name__ in names]
    if not layers:
        layers = _longest_list(lm)
    if not layers:
        raise UnsupportedModel(
            f"{type(lm).__name__} names no layers that can be cut over processes (_no_split_modules, or a list of "
            "layers); use parallel ddp."
        )
    _check_apart(model, layers)
    return layers


def _longest_list(lm: nn.Module) -> list[nn.Module]:
    """The list of layers that holds most weights."""
    lists = [each for each in lm.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=[]))  # type: ignore[arg-type]


def _check_apart(model: nn.Module, layers: list[nn.Module]) -> None:
    inside: dict[nn.Module, int] = {}
    for number, layer in enumerate(layers):
        for module in layer.modules():
            inside[module] = number
    owners: dict[nn.Parameter, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            owner = inside.get(module, -1)
            if owners.setdefault(parameter, owner) != owner:
                raise UnsupportedModel(
                    f"{name}.{own} is a weight of several layers of {type(model).__name__}, or of a layer and of what "
                    "is outside of the layers, which FSDP2 cannot cut over processes; use parallel ddp."
                )


def _mesh(config: TrainConfig, world: World) -> Any:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    kind, size, group = world.device.type, world.ranks.size, world.ranks.group
    assert group is not None
    if size < dist.get_world_size():
        if config.replicas > 1:
            raise ValueError(f"replicas is {config.replicas}, which needs all processes of torch.distributed")
        return DeviceMesh.from_group(group, kind)
    if config.replicas == 1:
        return init_device_mesh(kind, (size,))
    shape = (config.replicas, size // config.replicas)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor; it shares memory with it."""
    return tensor.to_local() if is_shard(tensor) else tensor


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """All weights and persistent buffers by name, in CPU memory, as one process would have them; a collective call.

    Tied weights are one tensor. What is frozen beside an adapter is left out.

    Returns:
        None on all ranks but the first.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=hasattr(model, "peft_config")
    )
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    if not state:
        return None
    first: dict[nn.Parameter, str] = {}
    same: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same[name] = first.setdefault(parameter, name)
    return {name: state.get(same.get(name, name), tensor) for name, tensor in state.items()}
