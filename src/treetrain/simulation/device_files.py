"""Devices by name, or from the user's TOML file."""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

from treetrain.core.errors import nearest
from treetrain.core.planning.devices import DEVICES, DTYPE_SPEEDS, Device


def find_device(name_or_file: str) -> Device:
    """Look up a preset by name, or read a TOML file.

    Raises:
        ValueError: neither a preset nor a file, a file that cannot be read, or invalid keys or values.
    """
    if name_or_file.lower() in DEVICES:
        return DEVICES[name_or_file.lower()]
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        raise ValueError(f"no device is named {name_or_file!r} and no file either; {nearest(name_or_file, DEVICES)}")
    try:
        figures: dict[str, Any] = {"name": path.stem} | tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no TOML file of a device's figures (docs/distributed.md): {error}") from error
    required = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Device)}
    for key in figures.keys() - required.keys():
        raise ValueError(f"{path}: a device has no figure {key!r}; {nearest(key, required)}")
    if missing := [name for name in required if required[name] and name not in figures]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; docs/distributed.md says what they are")
    return _checked(Device(**figures))


def _checked(device: Device) -> Device:
    """The device; raises ValueError for a figure that none can have."""
    for field in dataclasses.fields(device):
        name, value = field.name, getattr(device, field.name)
        if name in ("name", "kind") or (name == "network_bandwidth" and value is None):
            continue
        most, least = 1 if name.endswith("efficiency") else math.inf, 0 if name.endswith("seconds") else 1e-9
        if not isinstance(value, int | float) or not least <= value <= most or value == math.inf:
            raise ValueError(f"device {device.name}: {name} is {value!r}, expected a number from {least} to {most}")
    if device.kind not in DTYPE_SPEEDS or device.dtype_bytes not in (2, 4, 8) or device.node_ranks % 1:
        raise ValueError(
            f"device {device.name}: kind={device.kind!r}, dtype_bytes={device.dtype_bytes!r}, "
            f"node_ranks={device.node_ranks!r}; expected {' or '.join(DTYPE_SPEEDS)}, 2, 4 or 8 bytes, whole ranks"
        )
    return device
