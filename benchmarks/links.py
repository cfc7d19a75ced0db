"""Measures the links between ranks, by collectives of two sizes.

``torchrun --nproc-per-node 8 benchmarks/links.py`` prints them as the lines of a device's description for
`treetrain simulate`.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

LINK_BYTES = {"cpu": (1 << 16, 1 << 23), "cuda": (1 << 20, 1 << 28)}
"""Bytes of the two collectives, by device."""
LINK_REPEATS = 9
"""Their median counts, without the first."""


def measured_links() -> dict[str, float]:
    """Figures of a device's description: the links between the ranks of the default process group; a collective call.

    Links within a node are measured between its ranks, links between nodes by one rank of each, on all at once.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    figures: dict[str, float] = {"node_ranks": local, "link_efficiency": 1.0}
    if local > 1:
        own, _ = dist.new_subgroups(local)
        fixed, speed, slower = _links_within(own)  # type: ignore[arg-type]
        figures |= {"link_bandwidth": speed, "network_bandwidth": speed, "reduce_scatter": slower}
        figures |= {"collective_seconds": fixed / 2, "link_seconds": fixed / 2 / (local - 1)}
    if size > local:
        groups = [dist.new_group(list(range(first, size, local))) for first in range(local)]
        fixed, speed, slower = _links_within(groups[rank % local])  # type: ignore[arg-type]
        step = max(fixed - figures.get("collective_seconds", 0.0), 0.0) / (size // local - 1)
        figures = {"link_bandwidth": speed, "reduce_scatter": slower, "collective_seconds": 0.0} | figures
        figures |= {"network_bandwidth": speed, "network_seconds": step}
    return figures


def _links_within(group: "dist.ProcessGroup | None") -> tuple[float, float, float]:
    """(fixed seconds of a collective, bytes per second that a rank receives, time of a reduce-scatter relative to an
    all-gather), the same on every rank."""
    size, device = dist.get_world_size(group), torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    counts = [bytes // 4 // size for bytes in LINK_BYTES[device.type]]

    def seconds(operation: Callable[..., object], count: int, gathers: bool) -> float:
        own, whole = torch.zeros(count, device=device), torch.zeros(count * size, device=device)
        times = []
        for _ in range(LINK_REPEATS):
            dist.barrier(group)
            start = time.perf_counter()
            operation(*((whole, own) if gathers else (own, whole)), group=group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for these
        gather = [seconds(dist.all_gather_into_tensor, count, True) for count in counts]
        reduce = [seconds(dist.reduce_scatter_tensor, count, False) for count in counts]
    everyone: list[tuple[list[float], list[float]]] = [([], [])] * size
    dist.all_gather_object(everyone, (gather, reduce), group=group)
    gather, reduce = (np.median([own[which] for own in everyone], axis=0).tolist() for which in (0, 1))
    slope = max(gather[1] - gather[0], 1e-9) / (counts[1] - counts[0]) / 4 / (size - 1)
    slower = max(reduce[1] - reduce[0], 1e-9) / max(gather[1] - gather[0], 1e-9)
    return max(gather[0] - slope * counts[0] * 4 * (size - 1), 1e-6), 1 / slope, slower


if __name__ == "__main__":
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    lines = [f"{name} = {value:.6g}" for name, value in measured_links().items()]
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
