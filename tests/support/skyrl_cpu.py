"""What SkyRL's FSDP policy worker needs on CPUs: import this before anything of SkyRL.

SkyRL imports two functions of flash-attn, which it calls with packed rows only. Its code names CUDA devices.
"""

import importlib.machinery
import sys
import types
import typing
from typing import Any

import torch
import torch.distributed.device_mesh as device_mesh
import transformers.utils.import_utils as installed
import typing_extensions

installed.is_flash_attn_2_available()  # remembers that flash-attn is not installed
installed.PACKAGE_DISTRIBUTION_MAPPING.setdefault("flash_attn", [])  # type: ignore[attr-defined]
padding = types.ModuleType("flash_attn.bert_padding")
padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
package = types.ModuleType("flash_attn")
package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
typing.TypedDict = typing_extensions.TypedDict  # pydantic needs this one before Python 3.12

torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
for name in ("set_device", "manual_seed_all", "synchronize", "empty_cache"):
    setattr(torch.cuda, name, lambda *_: None)
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
empty, init_device_mesh = torch.empty, device_mesh.init_device_mesh


def empty_on_cpus(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """An empty tensor, on a CPU where a GPU is asked for."""
    return empty(*args, device="cpu" if device == "cuda" else device, **options)


def on_cpus(_device: str, *args: Any, **options: Any) -> Any:
    """A mesh of CPUs, whatever is asked for."""
    return init_device_mesh("cpu", *args, **options)


torch.empty = empty_on_cpus  # type: ignore[assignment]
device_mesh.init_device_mesh = torch.distributed.init_device_mesh = on_cpus
