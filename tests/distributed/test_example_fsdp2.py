"""The example of a script of one's own learns on two processes what it learns on one."""

import pytest

from support.example_work import fsdp2_losses


def test_the_example_on_two_processes_has_the_losses_of_one(run_on_ranks) -> None:
    [alone] = run_on_ranks(fsdp2_losses, 3, size=1)
    first, second = run_on_ranks(fsdp2_losses, 3, size=2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0] - 0.4
