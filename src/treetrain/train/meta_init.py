"""Models that are made without weights, cut over the ranks, and only then given their weights.

Two ways. Where a folder's safetensors have the model's own names, every rank reads what it holds and nothing else.
Else the first rank loads the model as it is loaded everywhere, and hands out the shards.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.models.loading import load_config, load_model
from treetrain.models.presets import is_preset
from treetrain.train.adapters import add_adapter
from treetrain.train.config import TrainConfig
from treetrain.train.parallel import World, from_main
from treetrain.train.sharding import shard

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNSET = -(2**30)
"""What a buffer of whole numbers holds before it is computed."""


def load_sharded(name: str, config: TrainConfig, world: World, *, adapter: bool) -> nn.Module:
    """A model with float32 weights over the ranks, loaded as `meta_init` says; a collective call.

    Args:
        name: preset, folder or hub id.
        adapter: put the configured adapter on it.
    """
    names = from_main(world.ranks, "looking for the model's weights", lambda: _folder(name))
    if names is not None and not (adapter and config.lora_rank):
        model = _read_by_shards(Path(names), name, config, world)
        if model is not None:
            return model
    return _handed_out(name, config, world, adapter=adapter)


def _folder(name: str) -> str | None:
    """Where a model's safetensors are; those of the hub are fetched. None: there are none."""
    if is_preset(name):
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        load_config(name)  # says what is wrong with a name before anything large is fetched
        folder = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer*"]))
    found = any((folder / file).is_file() for file in (INDEX, SINGLE))
    return str(folder) if found else None


def _read_by_shards(folder: Path, name: str, config: TrainConfig, world: World) -> nn.Module | None:
    """None where the stored names are not the model's, or a buffer cannot be computed without the weights."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    model = _on_meta(str(folder))
    if not (_stored_names(folder) >= _own_names(model) and _computable(model)):
        return None
    tied = _ties(model)
    shard(model, config, world)
    model.to_empty(device="cpu" if config.cpu_offload else world.device)
    _tie_again(model, tied)
    with torch.no_grad():
        if not _compute_buffers(model):
            return None
        state = {key: value for key, value in model.state_dict().items() if key in _stored_names(folder)}
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    _like_loaded(model, folder, name)
    return model


def _handed_out(name: str, config: TrainConfig, world: World, *, adapter: bool) -> nn.Module:
    """Loaded by the first rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}

    def make() -> tuple[nn.Module, dict[str, Tensor] | None]:
        if not world.main:
            made = _on_meta(name)
            return nn.Module.to(add_adapter(made, config) if adapter else made, "meta"), None
        loaded: nn.Module = load_model(name, seed=config.seed, dtype=torch.float32)
        made = add_adapter(loaded, config) if adapter else loaded
        state.update(made.state_dict())
        kept = set(state)
        buffers = {key: value.clone() for key, value in made.named_buffers() if key not in kept}
        tied = _ties(made)
        _tie_again(nn.Module.to(made, "meta"), tied)
        return made, buffers

    model, told = world.ranks.agree("loading the model", make)
    tied = _ties(model)
    shard(model, config, world)
    model.to_empty(device="cpu" if config.cpu_offload else world.device)
    _tie_again(model, tied)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key in told[0]:
                buffer.copy_(told[0][key])
    return model


def _on_meta(name: str) -> nn.Module:
    """A model of float32 weights that are not there. Raises UnsupportedModel for one that is not exact on a tree."""
    from transformers import AutoModelForCausalLM

    from treetrain.models.config_check import check_config

    config = load_config(name)
    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _stored_names(folder: Path) -> set[str]:
    """Of all tensors in a folder's safetensors."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    from safetensors import safe_open

    with safe_open(folder / SINGLE, framework="pt") as file:
        return set(file.keys())


def _own_names(model: nn.Module) -> set[str]:
    """Of the weights, a tied one once, and of the persistent buffers."""
    kept = set(model.state_dict())
    buffers = {name for name, _ in model.named_buffers() if name in kept}
    return {name for name, _ in model.named_parameters()} | buffers


def _unkept(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Buffers that are in no file, with the modules they belong to."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]


def _computable(model: nn.Module) -> bool:
    """Whether those buffers stand in modules without weights, so that computing them draws no random weights."""
    return all(
        not list(module.parameters(recurse=False)) and (buffer.is_floating_point() or buffer.dtype == torch.int64)
        for module, _, buffer in _unkept(model)
    )


def _compute_buffers(model: nn.Module) -> bool:
    """Let the model's class compute them as it does after `from_pretrained`; False where one was left out."""
    from transformers import PreTrainedModel

    buffers = _unkept(model)
    for _, _, buffer in buffers:
        buffer.fill_(torch.nan if buffer.is_floating_point() else _UNSET)
    wanted = {module for module, _, _ in buffers}
    for owner in model.modules():  # an inner model knows its own modules best, and comes last
        if isinstance(owner, PreTrainedModel):
            for module in owner.modules():
                if module in wanted:
                    owner._init_weights(module)
    unset = [b.isnan().any() if b.is_floating_point() else (b == _UNSET).any() for _, _, b in _unkept(model)]
    return not any(map(bool, unset))


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Names of weights that are another one, and the name of that one."""
    first: dict[nn.Parameter, str] = {}
    pairs = [(name, first.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return [(name, other) for name, other in pairs if name != other]


def _tie_again(model: nn.Module, ties: list[tuple[str, str]]) -> None:
    """Memory that was given anew was given to each name by itself."""
    for name, other in ties:
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, model.get_parameter(other))


def _like_loaded(model: Any, folder: Path, name: str) -> None:
    """What `from_pretrained` sets besides the weights."""
    from transformers import GenerationConfig

    model.config._name_or_path = name
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
