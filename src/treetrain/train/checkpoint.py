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
import io
import random
import re
import shutil
from collections.abc import Mapping
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


def seed_all(seed: int) -> None:
    """Begin all random numbers that a run may use with a seed: what is not ours, a loss for one, may use any."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


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
    with _NotedFile(path, "w") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if file.failure is None:
                raise
            raise file.failure from error


class _NotedFile(io.FileIO):
    """A file to write to that remembers why it could not be written."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """All of it."""
        try:
            view, done = memoryview(data).cast("B"), 0
            while done < len(view):
                done += super().write(view[done:])
            return done
        except OSError as error:
            self.failure = error
            raise


def _as_os_error(error: SafetensorError) -> OSError:
    """The error of the operating system that the library's text tells of."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, re.sub(r".*I/O error: ", "", str(error)))
