"""Checks the shapes in signatures; shared fixtures: trajectories, real ones and stand-ins, and processes."""

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import counts, fewer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: more threads would only wait for each other
CHECKS_SHAPES = importlib.util.find_spec("beartype") is not None
"""Not on every machine on which benchmarks/quarter_hour.py runs the kernels' tests."""
if CHECKS_SHAPES:
    from support import shapes

    shapes.check_shapes()

SAMPLE = 8
_SHAPES_UNCHECKED = pytest.StashKey[bool]()

SHARED_DATA = Path(os.environ.get("TREETRAIN_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """`make test` leaves cases of products out, before pytest leaves out what is slow.

    Of the tests that are left it checks shapes in one of SAMPLE of a file, since they take a third of the time.
    Tests on several ranks come first: xdist gives the first half to one worker, so that only it starts their processes.
    """
    items.sort(key=lambda item: "_pools" not in getattr(item, "fixturenames", ()))
    fast = config.option.markexpr == "not slow"
    if fast:
        fewer.leave_products_to_the_slow_run(items)
    yield
    if fast:
        before: Counter[Path] = Counter()
        for item in items:
            item.stash[_SHAPES_UNCHECKED] = before[item.path] % SAMPLE > 0
            before[item.path] += 1


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what is imported: transformers' Trainer asks for one after every run."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if CHECKS_SHAPES:
        shapes.set_checked(not item.stash.get(_SHAPES_UNCHECKED, False))
    counts.share()


@pytest.fixture(autouse=True, scope="session")
def counts_of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder of counts for the workers of this run and the processes that they start."""
    base = tmp_path_factory.getbasetemp()
    os.environ[counts.FOLDER] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "counts")


COMPARED = ("models", "test_first_use.py", "test_hybrids.py", "test_wrappers.py", "test_customised_trainers.py")
"""Folders and files of tests in which engines compare models at first use in `make test` too."""


@pytest.fixture(autouse=True)
def first_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` does not compare the thousands of small models of the other tests; `make test-full` compares all."""
    fast = request.config.option.markexpr == "not slow"
    if fast and not {*request.path.parts} & {*COMPARED} and "treetrain.engine" in sys.modules:
        monkeypatch.setattr("treetrain.check.first_use.compare_first_use", lambda engine, call, tree: None)


@pytest.fixture(autouse=True, scope="session")
def heard_interrupts() -> None:
    """A shell that starts pytest in the background has it ignore Ctrl-C, which some tests send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", params=["stand-in", pytest.param("real", marks=pytest.mark.slow)])
def shared_data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of trajectories and a tokenizer.

    First that of `support.stand_in_data`, which everybody can make; then, in the slow run, that of the real ones, whose
    tests skip where it is not there.
    """
    if request.param == "stand-in":
        from support import stand_in_data

        folder = tmp_path_factory.mktemp("stand-in")
        stand_in_data.write(folder)
        return folder
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real trajectories not found at {SHARED_DATA} (set TREETRAIN_SHARED_DATA)")
    return SHARED_DATA


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Any]]:
    """Processes of one gloo group by their number, started for the first test that needs so many."""
    pools: dict[int, Any] = {}
    yield pools
    for processes in pools.values():
        processes.stop()


def _alive(pools: dict[int, Any], size: int) -> Any:
    from support.processes import Processes

    if size not in pools or not pools[size].alive:  # one of them hung or ended in an earlier test
        if size in pools:
            pools[size].stop()
        pools[size] = Processes(size)
    return pools[size]


@pytest.fixture
def two(_pools: dict[int, Any]) -> Any:
    """Two processes that are all of their group (`support.processes`)."""
    return _alive(_pools, 2)


@pytest.fixture
def four(_pools: dict[int, Any]) -> Any:
    """Four processes that are all of their group."""
    return _alive(_pools, 4)


@pytest.fixture
def run_on_ranks(_pools: dict[int, Any]) -> Callable[..., Any]:
    """`Processes.run` of four processes, of which a test takes as many as it needs."""
    return _alive(_pools, 4).run
