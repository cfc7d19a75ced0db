"""Shared fixtures: where the real data is, and how tests say that it is absent."""

import os
import signal
from pathlib import Path

import pytest

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
