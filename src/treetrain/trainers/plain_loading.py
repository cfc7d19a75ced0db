"""Loading files of a checkpoint without running code that they hold.

A pickle can name any function of any module and have it called. `torch.load(weights_only=True)` refuses that, but two
readers of `torch.distributed.checkpoint` do not use it: that of `.metadata`, which is a plain pickle, and that of
values that are no tensors. `numpy` arrays of Python objects, which transformers lets a random state hold, are addresses
of memory, and reading them may crash the process.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from treetrain.core.hf.tree_mode import replaced

FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables that `torch.load` reads at every call."""
OF_METADATA = {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "TensorProperties")),
    *(("torch.distributed.checkpoint.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("_MEM_FORMAT_ENCODING", "StorageMeta")),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
}
"""Classes of plain data that `.metadata` may name. Beside these, dtypes."""


@contextmanager
def without_code() -> Iterator[None]:
    """Inside the block `torch.load` and torch.distributed.checkpoint read plain data only, whatever they are asked."""
    before = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    os.environ[FORCE] = "1"
    try:
        with replaced(filesystem, pickle=SimpleNamespace(load=load_metadata, dump=pickle.dump)):
            yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of `.metadata`, or a dtype. Raises UnpicklingError for anything else."""
        of_torch = getattr(torch, name, None) if module == "torch" else None
        if (module, name) not in OF_METADATA and not isinstance(of_torch, torch.dtype):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> metadata.Metadata:
    """Read `.metadata`. Raises UnpicklingError unless it is plain data about files beside it."""
    found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f".metadata holds a {type(found).__name__}")
    for stored in (found.storage_data or {}).values():
        path = getattr(stored, "relative_path", None)
        if not isinstance(path, str) or path != os.path.basename(path):
            raise pickle.UnpicklingError(f".metadata names the file {path!r}, which is not beside it")
    return found


# ---- the random state


class _Dtype:
    """Stands for `numpy.dtype` while a file is read; accepts that of a random state."""

    def __init__(self, code: str, *_: object) -> None:
        if code != "u4":
            raise pickle.UnpicklingError(f"an array of dtype {code!r} is no random state")

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or state[1:5] != ("<", None, None, None):
            raise pickle.UnpicklingError("an array of another byte order is no random state")


class _Words:
    """Stands for `numpy.ndarray` while a file is read; accepts 624 words of 32 bits."""

    def __init__(self, *_: object) -> None:
        self.checked = False

    def __setstate__(self, state: object) -> None:
        version, shape, dtype, fortran, data = state if isinstance(state, tuple) and len(state) == 5 else (None,) * 5
        good = (version, shape, type(dtype), fortran) == (1, (624,), _Dtype, False)
        if not good or not isinstance(data, bytes) or len(data) != 2496:
            raise pickle.UnpicklingError("an array of another shape is no random state")
        self.checked = True


def check_random_state(path: Path) -> None:
    """Refuse a `rng_state.pth` whose arrays are anything but the numbers of numpy's generator.

    It is read as transformers reads it, with harmless classes in the place of numpy's.

    Raises:
        UnpicklingError: the file holds something else.
    """
    arrays = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray")
    stand_ins: list[Any] = [(_Words, name) for name in arrays]
    stand_ins += [(_Dtype, "numpy.dtype"), (_Dtype, "numpy.dtypes.UInt32DType")]
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(stand_ins):
            state = torch.load(path, map_location="cpu", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(allowed)
    found = state.get("numpy") if isinstance(state, dict) else None
    _, words, place, *_ = found if isinstance(found, tuple) and len(found) == 5 else (None, None, None)
    # numpy reads the word at this place without a look at how many there are.
    if not (isinstance(words, _Words) and words.checked and isinstance(place, int) and 0 <= place <= 624):
        raise pickle.UnpicklingError("it holds no random state of numpy")
