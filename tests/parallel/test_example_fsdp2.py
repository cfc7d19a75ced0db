"""The example of a script of one's own learns on two processes what it learns on one."""

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from examples import fsdp2


def losses(group: Any, steps: int) -> list[float]:
    return fsdp2.main(DeviceMesh.from_group(group, "cpu"), steps=steps, rows_per_step=4)


@pytest.mark.slow
def test_the_example_on_two_processes_has_the_losses_of_one(run_on_ranks) -> None:
    [alone] = run_on_ranks(losses, 2, size=1)
    first, second = run_on_ranks(losses, 2, size=2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]
