"""What a checkpoint of a run holds, and how a run takes it up again, bit for bit.

| file | holds |
| --- | --- |
| model.safetensors | the trained weights and persistent buffers, by name |
| config.json | the model's configuration, so that the folder loads as a model where all weights are trained |
| training.pt | optimiser, schedule, averages, progress; random states; what plans are made from |
| metrics.jsonl | the records up to here |
| manifest.json | settings, digests of the data, versions; sizes and checksums of the files |

Those are the files of one process; `sharded_checkpoint` tells of those of several. Either is read by any number.
"""

import errno
import hashlib
import random
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from treetrain.engine.ranks import Ranks
from treetrain.train.checkpoint_files import NotedFile
from treetrain.train.metrics import METRICS_FILE
from treetrain.train.portable import SEPARATOR, Places, by_name, by_number, put_together, take_apart
from treetrain.train.sharded_checkpoint import STATE, is_sharded, read_into, stored_kinds

WEIGHTS, TRAINING = "model.safetensors", "training.pt"
_MODEL, _LOOP = f"model{SEPARATOR}", "loop"
"""The beginnings of the paths of weights, and of other tensors."""


def fill(folder: Path, *, model: nn.Module, state: Mapping[str, Any], metrics: Path) -> None:
    """Write the files of a checkpoint of one process, all but its manifest.

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
    _save(dict(state), folder / TRAINING)
    _fill_others(folder, model, metrics)


def fill_beside_shares(folder: Path, *, model: nn.Module, plain: Mapping[str, Any], metrics: Path) -> None:
    """Write the files of a checkpoint of several ranks that one of them writes; see `fill`.

    Args:
        plain: of `parts`.
    """
    _save(dict(plain), folder / STATE)
    _fill_others(folder, model, metrics)


def _fill_others(folder: Path, model: nn.Module, metrics: Path) -> None:
    if isinstance(model, PreTrainedModel):
        model.config.save_pretrained(folder)
    shutil.copyfile(metrics, folder / METRICS_FILE)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Give the model the weights of a checkpoint, in place; both may be sharded, or not.

    Raises:
        ValueError: it has others, by name, shape or dtype.
    """
    own, places = changing_tensors(model), Places(model)
    if is_sharded(folder):
        kinds = {path: kind for path, kind in stored_kinds(folder).items() if path.startswith(_MODEL)}
        _check_names(folder, {path.removeprefix(_MODEL) for path in kinds}, own)
        for name, tensor in own.items():
            _check_kind(folder, name, kinds[f"{_MODEL}{name}"], tensor)
        read_into(folder, {f"{_MODEL}{name}": tensor.detach() for name, tensor in own.items()})
        return
    with safe_open(folder / WEIGHTS, framework="pt") as stored, torch.no_grad():
        _check_names(folder, set(stored.keys()), own)
        for name, tensor in own.items():
            whole = stored.get_tensor(name)
            _check_kind(folder, name, (whole.shape, whole.dtype), tensor)
            tensor.copy_(places.put(name, whole))


def _check_names(folder: Path, stored: Collection[str], own: Mapping[str, Tensor]) -> None:
    if only := sorted({*stored} ^ own.keys()):
        raise ValueError(
            f"{folder} is of another model, or trains other weights of it: only one of the two has "
            f"{', '.join(only[:3])}{', ...' if len(only) > 3 else ''}"
        )


def _check_kind(folder: Path, name: str, stored: tuple[torch.Size, torch.dtype], own: Tensor) -> None:
    there, here = ((tuple(shape), str(dtype)) for shape, dtype in (stored, (own.shape, own.dtype)))
    if there != here:
        raise ValueError(f"{folder} is of another model: {name} is {there} there and {here} here")


def load_state(folder: Path, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The other state of a checkpoint, for a model and optimiser that may be sharded in any way.

    Returns:
        "loop" and "planning"; "random": of every rank that wrote it. Tensors are on the CPU but where they belong to
        a sharded parameter.
    """
    places = Places(model)
    if is_sharded(folder):
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        stored = {path: kind for path, kind in stored_kinds(folder).items() if not path.startswith(_MODEL)}
        tensors = {path: places.empty(path, *kind) for path, kind in stored.items()}
        read_into(folder, tensors)
        loop = put_together(state["loop"], tensors)
        return state | {"loop": {**loop, "optimizer": by_number(loop["optimizer"], optimizer, model)}}
    state = torch.load(folder / TRAINING, map_location="cpu", weights_only=True, mmap=True)
    state["random"] = [state["random"]]
    loop = {**state["loop"], "optimizer": by_name(state["loop"]["optimizer"], optimizer, model)}
    plain, tensors = take_apart(loop, _LOOP)
    loop = put_together(plain, {path: places.put(path, tensor) for path, tensor in tensors.items()})
    return state | {"loop": {**loop, "optimizer": by_number(loop["optimizer"], optimizer, model)}}


def load_piece(folder: Path, name: str) -> Any:
    """The state of one piece of the run, with whole tensors on the CPU; None where the run has none of this name."""
    if not is_sharded(folder):
        return torch.load(folder / TRAINING, map_location="cpu", weights_only=True, mmap=True)["loop"].get(name)
    plain = torch.load(folder / STATE, map_location="cpu", weights_only=True)["loop"]
    if name not in plain:
        return None
    under = f"{_LOOP}{SEPARATOR}{name}{SEPARATOR}"
    kinds = {path: kind for path, kind in stored_kinds(folder).items() if path.startswith(under)}
    tensors = {path: torch.empty(size, dtype=dtype) for path, (size, dtype) in kinds.items()}
    read_into(folder, tensors)
    return put_together(plain[name], tensors)


def parts(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What several ranks write: tensors by path, not copied, and the rest of the state."""
    loop = {**state["loop"], "optimizer": by_name(state["loop"]["optimizer"], optimizer, model)}
    plain, tensors = take_apart(loop, _LOOP)
    weights = {f"{_MODEL}{name}": tensor.detach() for name, tensor in changing_tensors(model).items()}
    return weights | tensors, {**state, "loop": plain}


def changing_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes of a model: trained parameters (a tied one once) and persistent buffers, by name."""
    kept = set(model.state_dict(keep_vars=True))
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def frozen_digest(model: nn.Module, ranks: Ranks | None = None) -> str:
    """Of the parameters that are not trained and so are not in checkpoints: names, shapes and all bits.

    Args:
        ranks: over which the model may be sharded; then a collective call.
    """
    frozen = {name: parameter for name, parameter in sorted(model.named_parameters()) if not parameter.requires_grad}
    own = [_bits(parameter) for parameter in frozen.values()]
    found = [own]
    if ranks is not None and any(isinstance(parameter, DTensor) for parameter in frozen.values()):
        found = ranks.gather(own)
    digest = hashlib.sha256()
    for number, (name, parameter) in enumerate(frozen.items()):
        whole = isinstance(parameter, DTensor)
        bits = reduce(xor, (each[number] for each in found)) if whole else own[number]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {bits}\n".encode())
    return digest.hexdigest()


def _bits(parameter: Tensor) -> int:
    """All bits of what this rank holds of a tensor, so that those of all ranks combine to those of the whole one."""
    local = parameter.detach()
    if isinstance(local, DTensor):
        mine = zip(local.placements, local.device_mesh.get_coordinate() or (), strict=True)
        if any(coordinate and placement.is_replicate() for placement, coordinate in mine):
            return 0  # a copy
        local = local.to_local()
    return int(torch.hash_tensor(local).item()) if local.numel() else 0


def seed_all(seed: int) -> None:
    """Begin all random numbers that a run may use with a seed: what is not ours, a loss for one, may use any."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_states(device: torch.device, *, alone: bool = True) -> dict[str, Any]:
    """Of Python, numpy, torch and, where the model is there, of GPUs; plain data and tensors.

    Args:
        alone: this process may use all GPUs; else only its own.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  libraries use this one
    cuda: list[Tensor] = []
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state_all() if alone else [torch.cuda.get_rng_state(device)]
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_states(states: Mapping[str, Any], device: torch.device, *, alone: bool = True) -> None:
    """Go on with these random numbers; those of GPUs only on as many of them."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and alone and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    elif device.type == "cuda" and not alone and len(states["cuda"]) == 1:
        torch.cuda.set_rng_state(states["cuda"][0], device)


def go_on_drawing(stored: Sequence[Mapping[str, Any]], device: torch.device, ranks: Ranks) -> None:
    """Go on with the random numbers of a checkpoint.

    Args:
        stored: of every rank that wrote it. On another number of ranks each begins with a seed of its own, which is
            made of the first rank's state: the same whenever this is done again.
    """
    if len(stored) == ranks.size:
        set_random_states(stored[ranks.rank], device, alone=ranks.alone)
        return
    digest = hashlib.sha256(bytes(stored[0]["torch"].tolist()) + f"rank {ranks.rank} of {ranks.size}".encode())
    seed_all(int.from_bytes(digest.digest()[:7], "big"))


def _save(state: dict[str, Any], path: Path) -> None:
    """torch.save, with the reason of a failure: by itself it says only that its position is not what it expected."""
    with NotedFile(path, "w") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if file.failure is None:
                raise
            raise file.failure from error


def _as_os_error(error: SafetensorError) -> OSError:
    """The error of the operating system that the library's text tells of."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, re.sub(r".*I/O error: ", "", str(error)))
