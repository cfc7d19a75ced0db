"""The example of FSDP2 within a group of a test's processes."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from examples import fsdp2


def fsdp2_losses(group: Any, steps: int) -> list[float]:
    """The losses of so many steps."""
    return fsdp2.main(DeviceMesh.from_group(group, "cpu"), steps=steps, rows_per_step=4)
