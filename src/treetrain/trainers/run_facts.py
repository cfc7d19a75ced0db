"""The facts that identify a run: model, data, loss and settings. Checkpoints store them for comparison when resuming.

They are a flat dictionary of JSON values, so that a difference has a name and two values.
"""

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, TrainingArguments

from treetrain.core.errors import shortened
from treetrain.core.hf.capability import causal_lm
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import Json

SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "optim_args", "optim_target_modules"),
    *("seed", "data_seed", "full_determinism", "label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16"),
    *("train_sampling_strategy", "max_steps", "num_train_epochs"),
)
"""Arguments of transformers that change the weights of a run. Those that a subclass adds count too."""
NOT_SETTINGS = (
    "execution",
    "budget",
    "compile_layers",
    "overwrite_output_dir",
    "accept_changes",
    "max_skipped_steps",
    "async_save",
)
NOT_SETTINGS_PREFIXES = ("vllm_", "log_", "dataset_num_proc")
"""Arguments of subclasses that change no weights, and beginnings of the names of such arguments."""
NOT_CONFIG = (
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Entries of a model's configuration that change no weights, or that transformers sets by itself."""
LENGTH = ("max_steps", "num_train_epochs")
"""A run may be made longer or shorter: a difference here is a warning."""
FIXED = ("model", "parameters", "trained", "optim", "optim_args", "optim_target_modules")
"""If one of these differs, the checkpoint cannot be loaded into the run."""
MAY_BE_UNKNOWN = ("data", "frozen weights")
ROWS, TRAJECTORIES = 1000, 100_000
"""At most so many rows are hashed, evenly spread over the data set; the number of rows always is."""


def facts_of_model(model: nn.Module) -> dict[str, Json]:
    """Class, configuration, names and shapes of the parameters, and a sample of the frozen ones."""
    config = getattr(model, "config", None)
    settings = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    return {f"config.{name}": _plain(value) for name, value in settings.items() if _counts(name)} | {
        "model": type(causal_lm(model)).__name__,
        "parameters": _shapes(named),
        "trained": _shapes(trained),
        "frozen weights": _sample({name: p for name, p in named.items() if not p.requires_grad}),
    }


def facts_of_arguments(args: TrainingArguments) -> dict[str, Json]:
    """The arguments that change the weights of a run."""
    known = {each.name for each in dataclasses.fields(TrainingArguments)}
    more = [each.name for each in dataclasses.fields(args) if each.name not in known]
    more = [name for name in more if name not in NOT_SETTINGS and not name.startswith(NOT_SETTINGS_PREFIXES)]
    return {name: _plain(getattr(args, name)) for name in (*SETTINGS, *more) if hasattr(args, name)}


def facts_of_loss(loss: object) -> str:
    """A loss with its options, as text."""
    options = _plain(vars(loss) if not dataclasses.is_dataclass(loss) and hasattr(loss, "__dict__") else loss)
    return f"{getattr(loss, '__qualname__', type(loss).__qualname__)} {json.dumps(options, sort_keys=True)}"


def facts_of_rows(rows: Any) -> str | None:
    """Number and SHA-256 of the rows; None for a stream, or for rows that differ from one look to the next."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or not len(rows):
        return None
    with _random_state_kept():
        limit = TRAJECTORIES if isinstance(rows[0], Trajectory) else ROWS
        if _plain(rows[0]) != _plain(rows[0]):
            return None
        numbers = np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)).tolist()
        digest = hashlib.sha256()
        for number in numbers:
            digest.update(json.dumps(_plain(rows[number]), sort_keys=True).encode())
    return f"{len(rows)} rows, SHA-256 {digest.hexdigest()[:16]}"


def differences(saved: Mapping[str, Json], now: Mapping[str, Json]) -> dict[str, str]:
    """Describe every fact that differs, by name. Facts that only one of the two has are left out."""
    both = {name: (saved[name], now[name]) for name in sorted(saved.keys() & now.keys())}
    return {
        name: f"{name} was {shortened(one, 60)} and is {shortened(other, 60)}"
        for name, (one, other) in both.items()
        if one != other and not (name in MAY_BE_UNKNOWN and None in (one, other))
    }


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Reading rows may draw random numbers, which the run would miss."""
    # Not `torch.random.fork_rng`, which would take memory on every GPU of the host.
    before, torch_before = random.getstate(), torch.get_rng_state()
    numpy_before = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(torch_before)
        np.random.set_state(numpy_before)  # noqa: NPY002


def _counts(name: str) -> bool:
    return name not in NOT_CONFIG and not name.startswith("_attn")


def _shapes(parameters: Mapping[str, Tensor]) -> str:
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in sorted(parameters.items())]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return f"{len(shapes)} arrays of {sum(p.numel() for p in parameters.values())} numbers, SHA-256 {digest[:16]}"


def _sample(parameters: Mapping[str, Tensor]) -> str | None:
    """The first numbers of every array, hashed: another base model under an adapter is recognised."""
    if not parameters or any(isinstance(p, DTensor) or p.is_meta for p in parameters.values()):
        return None
    digest = hashlib.sha256()
    for _, parameter in sorted(parameters.items()):
        first = parameter.detach().flatten()[:256].cpu().contiguous()
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return f"SHA-256 {digest.hexdigest()[:16]} of samples"


def _plain(value: Any) -> Json:
    """A value as JSON: long arrays as their hash, objects without a meaning of their own as their class."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # NaN would differ from itself
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(each) for each in value]
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype is torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        kind = str(value.dtype), list(value.shape)
        return [*kind, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__name__,
            {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)},
        ]
    return getattr(value, "__qualname__", type(value).__qualname__)
