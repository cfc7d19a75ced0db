"""Checks the shapes in signatures; shared fixtures: where the real data is, and how tests say that it is absent."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("beartype"):  # not on every machine on which benchmarks/gpu.py runs the kernels' tests
    from support.shapes import check_shapes

    check_shapes()

SHARED_DATA = Path(os.environ.get("TREETRAIN_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(autouse=True, scope="session")
def heard_interrupts() -> None:
    """A shell that starts pytest in the background has it ignore Ctrl-C, which some tests send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real trajectories and tokenizer; the test skips where it is not there."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real trajectories not found at {SHARED_DATA} (set TREETRAIN_SHARED_DATA)")
    return SHARED_DATA


@pytest.fixture(scope="session")
def _pairs() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for processes in found:
        processes.stop()


@pytest.fixture
def two(_pairs: list[Any]) -> Any:
    """Two processes of one group (`support.processes`); others after a test in which one failed."""
    from support.processes import Processes

    if not _pairs or not _pairs[-1].alive:
        _pairs.append(Processes(2))
    return _pairs[-1]
