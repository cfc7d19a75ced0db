"""LoRA: small matrices beside frozen weights, by peft."""

import importlib.util
import warnings
from typing import Any

import torch
from torch import nn

from treetrain.train.config import TrainConfig

ALL_LINEAR = "all-linear"


def check_adapter(config: TrainConfig) -> None:
    """Raise ValueError where an adapter is wanted and peft is not installed; before a model is loaded."""
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise ValueError(f"lora_rank is {config.lora_rank}, but peft is not installed: pip install peft")


def add_adapter(model: nn.Module, config: TrainConfig) -> nn.Module:
    """The model with the configured LoRA around it; as it is where none is configured.

    Raises:
        ValueError: a target that the model has no module for.
    """
    if not config.lora_rank:
        return model
    from peft import LoraConfig, get_peft_model

    targets: Any = list(config.lora_targets)
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,  # type: ignore[arg-type]
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        use_rslora=config.lora_rslora,
        use_dora=config.lora_dora,
        lora_dropout=0.0,  # a shared token would get one mask where every row has its own
        task_type="CAUSAL_LM",
    )
    _check_targets(model, targets)
    torch.manual_seed(config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers' former names
        wrapped = get_peft_model(model, options)  # type: ignore[arg-type]
    # A preset has no folder of its own; its name is what tells later which weights the adapter belongs to.
    wrapped.peft_config["default"].base_model_name_or_path = config.model
    return wrapped


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    if targets == [ALL_LINEAR]:
        return
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise ValueError(
                f"lora_targets names {target!r}, but the model has no such module; its linear layers are "
                f"{', '.join(ends)}, and {ALL_LINEAR} means all but the head"
            )
