"""Speeds, sizes and links of a device: presets with published or measured figures."""

import dataclasses
from typing import Literal, NamedTuple

USABLE = {"cpu": 0.8, "cuda": 0.9}
"""How much of a device's free memory a step may use: predictions err by up to a tenth, and a CPU's memory is shared."""
MEMORY_MARGIN = 2
"""If this many times a predicted peak is free, the peak fits in spite of prediction errors."""
HEAD_CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits that the head computes at once, within the bounds of `HEAD_CHUNK_ROWS`. On a CPU, a chunk suits the cache. On
a GPU, a chunk is so large that reading the head's matrix and adding to its gradient, once per chunk, cost little
compared with the matrix products (1,766 rows with a vocabulary of 151,936)."""
HEAD_CHUNK_ROWS = {"cpu": (64, 2048), "cuda": (64, 8192)}
"""Minimum and maximum rows per chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One rank's device and its links to the other ranks."""

    name: str
    flops: float
    """Peak FLOP/s of dense matrix products in the compute dtype."""
    efficiency: float = 0.4
    """Fraction of `flops` that layers and LM head reach, including everything between the matrix products."""
    attention_efficiency: float = 0.25
    """Fraction of `flops` that attention reaches."""
    dtype_bytes: int = 2
    """Bytes per number in the compute dtype: 2, 4 or 8."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a rank can send within its node, while it receives as many."""
    node_ranks: int = 8
    network_bandwidth: float | None = None
    """Bytes per second that a rank can send to other nodes; None takes `link_bandwidth`."""
    link_efficiency: float = 0.8
    """Fraction of both bandwidths that collectives reach."""
    collective_seconds: float = 2e-5
    """Fixed seconds of a collective, independent of its size and ranks."""
    link_seconds: float = 3.4e-6
    """Seconds of each step of a ring within a node."""
    network_seconds: float = 9.6e-6
    """Seconds of each step of a ring to another node."""
    reduce_scatter: float = 1.0
    """Time of a reduce-scatter relative to an all-gather of as many bytes."""
    layer_pass_seconds: float = 1e-3
    """Fixed seconds of one layer's forward and backward: launches, Python, autograd. The host of a GPU is taken to be
    twice as fast as the processor of benchmarks/results (host_time.csv)."""
    kind: Literal["cpu", "cuda"] = "cuda"
    """Sets the memory allocator that is modelled."""

    def group(self, size: int, stride: int = 1) -> "Group":
        """A group of `size` ranks whose numbers are `stride` apart."""
        return Group(size, max(1, min(size, int(self.node_ranks) // stride)))

    @classmethod
    def of_kind(cls, kind: str, dtype_bytes: int) -> "Device":
        """The preset for a kind of device (a small CPU, or an H100), at the speed of a dtype.

        Raises:
            ValueError: a kind or size that is not in `DTYPE_SPEEDS`.
        """
        if kind not in DTYPE_SPEEDS or dtype_bytes not in DTYPE_SPEEDS[kind]:
            raise ValueError(
                f"device={kind!r}, dtype_bytes={dtype_bytes!r}: known are {', '.join(DTYPE_SPEEDS)} with 2, 4 or 8 "
                "bytes"
            )
        preset = DEVICES["h100" if kind == "cuda" else kind]
        return dataclasses.replace(
            preset, flops=preset.flops * DTYPE_SPEEDS[kind][dtype_bytes], dtype_bytes=dtype_bytes
        )


class Group(NamedTuple):
    size: int
    in_node: int
    """How many of them share a node."""


DTYPE_SPEEDS = {"cpu": {2: 0.8, 4: 1.0, 8: 0.5}, "cuda": {2: 1.0, 4: 0.125, 8: 0.0625}}
"""Speed of matrix products by bytes per number, relative to the preset's."""
SLACK = {"cpu": (1.17, 8e6), "cuda": (1.05, 0.0)}
"""Memory of a process relative to its tensors: a factor (blocks that the allocator cannot reuse) and constant bytes
(library buffers, large blocks that no gap holds). cpu: fitted to measured peaks
(benchmarks/results/memory.csv) with glibc 2.36; before 2.38, glibc does not reuse a freed aligned block for a request
of the same size, and every tensor is an aligned block. cuda: not measured."""


def _gpu(name: str, teraflops: float, gigabytes: float, terabytes: float, link: float, network: float) -> Device:
    return Device(
        name=name,
        flops=teraflops * 1e12,
        memory_bytes=gigabytes * 1e9,
        memory_bandwidth=terabytes * 1e12,
        link_bandwidth=link * 1e9,
        network_bandwidth=network * 1e9,
    )


DEVICES = {
    # Dense bfloat16 TFLOP/s, GB, TB/s, GB/s each way within a node of 8, GB/s of network per GPU in the vendor's 8-GPU
    # server. Published figures (NVIDIA's data sheets of A100, H100 and H200: NVLink of 600 and 900 GB/s both ways
    # together; DGX user guides: one InfiniBand port of 200 or 400 Gb/s per GPU). Efficiencies are assumptions, steps
    # are NCCL's constants for NVLink and network (ring, simple protocol).
    "a100": _gpu("a100", 312, 80, 2.039, 300, 25),
    "h100": _gpu("h100", 989.4, 80, 3.35, 450, 50),
    "h200": _gpu("h200", 989.4, 141, 4.8, 450, 50),
    "cpu": Device(
        name="cpu",
        flops=1.26e11,  # measured: 1.26e11 in attention, 1.05e11 in layers and head
        efficiency=1.05 / 1.26,
        attention_efficiency=1.0,
        dtype_bytes=4,
        memory_bytes=8e9,
        memory_bandwidth=1.0e10,
        link_bandwidth=1e9,
        node_ranks=1,
        network_bandwidth=1e9,
        link_efficiency=1.0,
        collective_seconds=2e-4,
        link_seconds=1e-4,
        network_seconds=1e-4,
        reduce_scatter=2.0,  # gloo adds up whole tensors
        layer_pass_seconds=2.0e-3,
        kind="cpu",
    ),
}
"""cpu: two cores, as measured on the machine of benchmarks/results; memory and network are assumptions."""
