"""What a machine can do, for predictions over many ranks: presets of published figures, or a file of one's own."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from treetrain.planning.constants import SPEEDS, Constants
from treetrain.planning.cost import ModelShape
from treetrain.planning.price import CostModel


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
    """Of an entry in the arithmetic: 2, 4 or 8."""
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
    """What a collective costs whatever its size."""
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
        if self.kind not in SPEEDS or self.dtype_bytes not in (2, 4, 8) or int(self.node_ranks) != self.node_ranks:
            raise ValueError(
                f"device {self.name}: kind={self.kind!r}, dtype_bytes={self.dtype_bytes!r}, "
                f"node_ranks={self.node_ranks!r}; expected {' or '.join(SPEEDS)}, 2, 4 or 8 bytes, whole ranks"
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

    def cost(self, shape: ModelShape, *, checkpointing: bool = False) -> CostModel:
        """The cost model of a shape on this device: its speeds, memory by formula."""
        base = Constants.from_shape(shape, self.kind, dtype_bytes=self.dtype_bytes, checkpointing=checkpointing)
        reached = self.flops * self.efficiency
        found = dataclasses.replace(
            base,
            matrix_flops=reached,
            head_flops=reached,
            pair_flops=self.flops * self.attention_efficiency,
            bandwidth=self.memory_bandwidth,
            graph_pass_seconds=shape.layers * self.layer_pass_seconds,
            forward_pass_seconds=shape.layers * self.layer_pass_seconds * 0.7,
            source=f"formula, the description of {self.name}",
        )
        return CostModel(shape=shape, constants=found)


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
        flops=SPEEDS["cpu"].flops,
        efficiency=1.0,  # the speed is a measured one, not a peak
        attention_efficiency=1.0,
        dtype_bytes=4,
        memory_bytes=8e9,
        memory_bandwidth=SPEEDS["cpu"].bandwidth,
        link_bandwidth=1e9,
        node_ranks=1,
        network_bandwidth=1e9,
        collective_seconds=2e-4,
        layer_pass_seconds=SPEEDS["cpu"].layer_pass,
        kind="cpu",
    ),
}
"""cpu: two cores for every rank, as measured on one machine (`SPEEDS`); memory and network are assumptions."""
