"""CPUs as a platform of verl, which runs on GPUs, and its training worker on it.

`VERL_USE_EXTERNAL_MODULES` imports this file in every process; `VERL_PLATFORM=cpu` selects the platform.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

SHARED = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """verl's platform of CUDA, as far as its workers need it."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        **vars(torch.cpu), **dict.fromkeys(SHARED, lambda *_: 0), mem_get_info=lambda *_: (0, 0)
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

    class Worker(TrainingWorker):
        def __init__(self, config: Any):
            # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here.
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address = os.environ.get("DIST_INIT_METHOD")
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=address)
            super().__init__(config)

    options = {"num_cpus": number + 1, "include_dashboard": False, "object_store_memory": 1 << 28}
    ray.init(runtime_env={"env_vars": environment}, **options)
    pool = RayResourcePool([number], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(Worker), config=config)
    return RayWorkerGroup(pool, made, device_name="cpu")
