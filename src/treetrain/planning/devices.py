"""Speeds and sizes of a device: presets of published or measured figures, or a file of one's own."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

HEAD_CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits that the head makes at once, within the bounds of `HEAD_CHUNK_ROWS`: what a CPU's cache can do something with;
on a GPU so many that reading the head's matrix and adding to its gradient, once for each chunk, are small beside the
products (1,766 rows of a vocabulary of 151,936)."""
HEAD_CHUNK_ROWS = {"cpu": (64, 2048), "cuda": (64, 8192)}
"""Fewest and most rows of a chunk."""


def head_chunk_rows(vocab: int, device: str = "cpu") -> int:
    """Rows whose logits the head makes at once on a kind of device; on one that is not listed, as on a CPU."""
    device = device if device in HEAD_CHUNK_LOGITS else "cpu"
    least, most = HEAD_CHUNK_ROWS[device]
    return max(least, min(most, HEAD_CHUNK_LOGITS[device] // vocab))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One rank's device, and what ties it to the others."""

    name: str
    flops: float
    """Peak FLOP/s of dense matrices in the dtype of the arithmetic."""
    efficiency: float = 0.4
    """Share of it that layers and LM head reach, all that stands between their matrices included."""
    attention_efficiency: float = 0.25
    """Share of it that attention reaches."""
    dtype_bytes: int = 2
    """Bytes of an entry in the arithmetic: 2, 4 or 8."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a rank can send to the ranks of its node, and receive at the same time."""
    node_ranks: int = 8
    """Ranks of a node."""
    network_bandwidth: float | None = None
    """The same to other nodes, each rank's share; None: as within the node."""
    collective_seconds: float = 2e-5
    """Seconds of a collective whatever its size."""
    layer_pass_seconds: float = 4e-4
    """Fixed seconds of one layer's forward and backward: launches, Python, autograd."""
    kind: Literal["cpu", "cuda"] = "cuda"
    """cpu or cuda: how memory is allocated."""

    def __post_init__(self) -> None:
        zero_is_fine = ("collective_seconds", "layer_pass_seconds")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "kind") or (field.name == "network_bandwidth" and value is None):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name not in zero_is_fine):
                raise ValueError(f"device {self.name}: {field.name} is {value!r}, expected a number above 0")
        for name in ("efficiency", "attention_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"device {self.name}: {name} is {getattr(self, name)!r}, expected a share of at most 1"
                )
        if (
            self.kind not in DTYPE_SPEEDS
            or self.dtype_bytes not in (2, 4, 8)
            or int(self.node_ranks) != self.node_ranks
        ):
            raise ValueError(
                f"device {self.name}: kind={self.kind!r}, dtype_bytes={self.dtype_bytes!r}, "
                f"node_ranks={self.node_ranks!r}; expected {' or '.join(DTYPE_SPEEDS)}, 2, 4 or 8 bytes, whole ranks"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "device") -> Self:
        """A description as plain data. Raises ValueError for keys that are unknown or missing."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        wrong = sorted(set(data) - set(known))
        missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in data]
        missing = [key for key in missing if key != "name"]
        if wrong or missing:
            unlike = [f"unknown {', '.join(wrong)}"] * bool(wrong) + [f"missing {', '.join(missing)}"] * bool(missing)
            raise ValueError(f"device {name}: {'; '.join(unlike)}; keys are {', '.join(known)}")
        return cls(**{"name": name, **data})

    @classmethod
    def of_kind(cls, kind: str, dtype_bytes: int) -> "Device":
        """The preset for a kind of device, with the speed of a dtype: a small CPU, or an H100.

        Raises:
            ValueError: another kind or size than those of `DTYPE_SPEEDS`.
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


DTYPE_SPEEDS = {"cpu": {2: 0.8, 4: 1.0, 8: 0.5}, "cuda": {2: 1.0, 4: 0.125, 8: 0.0625}}
"""Speed of products by bytes of a number, over that of the preset."""
SLACK = {"cpu": (1.17, 8e6), "cuda": (1.05, 0.0)}
"""Memory of a process over that of its tensors: a factor (blocks that the allocator cannot use again), and bytes
whatever the size (libraries' own buffers, large blocks that find no gap of their size). cpu: fitted to measured peaks
(benchmarks/results/memory.csv) with glibc 2.36: before 2.38 a freed aligned block is not found again for a request of
its own size, and every tensor is such a block. cuda: not measured."""


def find_device(name_or_file: str) -> Device:
    """A preset by name, or a JSON or TOML file.

    Raises:
        ValueError: neither, a file that cannot be read, or keys and values that are no device's.
    """
    if name_or_file.lower() in DEVICES:
        return DEVICES[name_or_file.lower()]
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        raise ValueError(f"no device is named {name_or_file!r} and no such file is there; names: {', '.join(DEVICES)}")
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a device's description ({error}); give JSON, or TOML as .toml"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no table of a device's figures")
    return Device.from_dict(data, path.stem)


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
    # Dense bfloat16 TFLOP/s, GB, TB/s, GB/s each way within a node of 8, GB/s of network per GPU in the maker's 8-GPU
    # server. Published figures; the efficiencies are assumptions.
    "a100": _gpu("a100", 312, 80, 2.039, 300, 25),
    "h100": _gpu("h100", 989.4, 80, 3.35, 450, 50),
    "h200": _gpu("h200", 989.4, 141, 4.8, 450, 50),
    "cpu": Device(
        name="cpu",
        flops=1.26e11,  # measured: 1.05e11 in layers and head, this in attention
        efficiency=1.05 / 1.26,
        attention_efficiency=1.0,
        dtype_bytes=4,
        memory_bytes=8e9,
        memory_bandwidth=1.0e10,
        link_bandwidth=1e9,
        node_ranks=1,
        network_bandwidth=1e9,
        collective_seconds=2e-4,
        layer_pass_seconds=1.0e-3,
        kind="cpu",
    ),
}
"""cpu: two cores, as measured on the machine of benchmarks/results; memory and network are assumptions."""
