"""CPUs as a platform of verl, which runs on GPUs, and its training worker on it.

`VERL_USE_EXTERNAL_MODULES` imports this file in every process; `VERL_PLATFORM=cpu` selects the platform.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import fsdp
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


class CPUOffloadPolicy(fsdp.CPUOffloadPolicy):
    """FSDP2's offload policy without pinned memory, which needs a GPU."""

    def __init__(self, pin_memory: bool = True):
        super().__init__(pin_memory=False)


fsdp.CPUOffloadPolicy = CPUOffloadPolicy  # verl's engine imports it from there, later
NOTHING = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "manual_seed", "manual_seed_all")
SHARED = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


init_process_group = torch.distributed.init_process_group


def with_one_backend(backend: str | None = None, *args: Any, **options: Any) -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here."""
    init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)


torch.distributed.init_process_group = with_one_backend


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """verl's platform of CUDA, as far as its workers need it."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        **vars(torch.cpu)
        | dict.fromkeys(NOTHING, lambda *_: None)
        | dict.fromkeys(SHARED, lambda *_: 0)
        | {
            "mem_get_info": lambda *_: (0, 0),
            "get_device_name": lambda *_: "CPU",
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": torch.set_rng_state,
        }
    )
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    is_available = lambda self: True  # noqa: E731
    current_device = lambda self: torch.device("cpu")  # noqa: E731
    empty_cache = synchronize = lambda self, *_: None


def ray_workers(number: int, config: Any, environment: dict[str, str]) -> Any:
    """verl's group of Ray workers on CPUs, with its training worker in each."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers import TrainingWorker

    options = {"num_cpus": number + 1, "include_dashboard": False, "object_store_memory": 1 << 28}
    ray.init(runtime_env={"env_vars": environment}, **options)
    pool = RayResourcePool([number], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config)
    return RayWorkerGroup(pool, made, device_name="cpu")
