"""What a checkpoint of a run holds, and how a run takes it up again, bit for bit.

| file | holds |
| --- | --- |
| model.safetensors | the trained weights and persistent buffers, by name |
| config.json | the model's configuration, so that the folder loads as a model where all weights are trained |
| training.pt | optimiser, schedule, averages, progress; random states; what plans are made from |
| metrics.jsonl | the records up to here |
| manifest.json | settings, digests of the data, versions; sizes and checksums of the files |
"""

import errno
import hashlib
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treetrain.train.metrics import METRICS_FILE

WEIGHTS, TRAINING = "model.safetensors", "training.pt"


def fill(folder: Path, *, model: nn.Module, state: Mapping[str, Any], metrics: Path) -> None:
    """Write the files of a checkpoint, all but its manifest.

    Args:
        folder: empty.
        model: its trained weights are written.
        state: tensors and plain data.
        metrics: the run's metrics file.

    Raises:
        OSError: the disk does not take them.
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in changing_tensors(model).items()}
    try:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise _as_os_error(error) from error
    if isinstance(model, PreTrainedModel):
        model.config.save_pretrained(folder)
    _save(dict(state), folder / TRAINING)
    shutil.copyfile(metrics, folder / METRICS_FILE)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Give the model the weights of a checkpoint, in place.

    Raises:
        ValueError: it has others, by name, shape or dtype.
    """
    stored, own = load_file(folder / WEIGHTS), changing_tensors(model)
    if stored.keys() != own.keys():
        only = sorted(stored.keys() ^ own.keys())
        raise ValueError(
            f"{folder} is of another model, or trains other weights of it: only one of the two has "
            f"{', '.join(only[:3])}{', ...' if len(only) > 3 else ''}"
        )
    for name, tensor in own.items():
        kinds = [(tuple(each.shape), str(each.dtype)) for each in (stored[name], tensor)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"{folder} is of another model: {name} is {kinds[0]} there and {kinds[1]} here")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def load_state(folder: Path) -> dict[str, Any]:
    """The other state of a checkpoint; tensors on the CPU."""
    return torch.load(folder / TRAINING, map_location="cpu", weights_only=True)


def changing_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes of a model: trained parameters (a tied one once) and persistent buffers, by name."""
    kept = set(model.state_dict(keep_vars=True))
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def frozen_digest(model: nn.Module) -> str:
    """Of the parameters that are not trained and so are not in checkpoints: names, shapes and all bits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            bits = torch.hash_tensor(parameter.detach()).item()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {bits}\n".encode())
    return digest.hexdigest()


def random_states(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy, torch and, where the model is there, of all GPUs; plain data and tensors."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  libraries use this one
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if device.type == "cuda" else [],
    }


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on with these random numbers; those of GPUs only on as many of them."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _save(state: dict[str, Any], path: Path) -> None:
    """torch.save, with the reason of a failure: by itself it says only that its position is not what it expected."""
    failed: list[OSError] = []
    with path.open("wb") as file:
        try:
            torch.save(state, _Noted(file.write, failed))
        except RuntimeError as error:
            if failed:
                raise failed[0] from error
            raise


class _Noted:
    """A file to write to whose first failure is kept."""

    def __init__(self, write: Callable[[Any], int], failed: list[OSError]) -> None:
        self._write, self._failed = write, failed

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError as error:
            self._failed.append(error)
            raise


def _as_os_error(error: SafetensorError) -> OSError:
    """The error of the operating system that the library's text tells of."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, re.sub(r".*I/O error: ", "", str(error)))
