"""FSDP2 by accelerate's own wrapping on processes without a GPU."""

from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from packaging.version import Version

_make = AcceleratorState.__init__
needs_sharding_on_cpus = pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.15"), reason="this accelerate looks for a GPU when it shards"
)


def let_accelerate_shard() -> None:
    """Until this process ends, accelerate follows an FSDP plugin on CPUs too.

    accelerate 1.15 looks at the plugin only where the processes are known to have GPUs. Nothing behind that check needs
    one: for the length of it the processes count as such. All that follows (preparing model and optimiser, wrapping
    layer by layer, clipping) is accelerate's and transformers' own code. Weights that are offloaded are not pinned,
    which needs a GPU.
    """
    AcceleratorState.__init__ = _init  # type: ignore[assignment, method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _init(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    if fsdp_plugin is not None and PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    _make(state, *args, fsdp_plugin=fsdp_plugin, **options)
    assert fsdp_plugin is None or state.distributed_type == DistributedType.FSDP
