"""Command line and result rows, shared by all benchmarks.

Every benchmark appends to a CSV of its own, with the commit and the machine that made the row.
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import multiprocessing
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def run_each(
    names: Collection[str], measure: Callable[..., None], description: str | None, **options: dict[str, Any]
) -> None:
    """Read the command line and measure every given name, each in its own process.

    Args:
        names: names of all works, the default.
        measure: called with a name and the options as keyword arguments.
        description: text for ``--help``.
        options: by name, what `argparse.ArgumentParser.add_argument` takes for each.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(names), help="; ".join(names))
    parser.add_argument("--here", action="store_true", help="in this process (one name)")
    for name, settings in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    given = vars(parser.parse_args())
    wanted, here = given.pop("names"), given.pop("here")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"unknown name {unknown[0]!r}; there are {'; '.join(names)}")
    if here:
        return measure(wanted[0], **given)
    flags = [argument for argument in sys.argv[1:] if argument not in names]
    for name in wanted:
        subprocess.run([sys.executable, sys.argv[0], name, "--here", *flags], check=True)


DRY_RUN: dict[str, Any] = {"action": "store_true", "help": "print the rows and append none"}
"""The option of benchmarks that can do so."""


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 580) -> list[Any]:
    """`function(rank, size, *arguments)` in a gloo group of fresh processes; the results by rank.

    Raises:
        RuntimeError: a rank did not come back in `timeout` seconds.
        EOFError: a rank failed; it has printed why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3", "treetrain"])
    pipes, started = [], []
    for rank in range(size):
        here, there = context.Pipe()
        one = context.Process(target=_run_rank, args=(rank, size, port, there, function, arguments), daemon=True)
        one.start()
        there.close()
        pipes.append(here)
        started.append(one)
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                raise RuntimeError(f"rank {rank} of {size} did not come back in {timeout:g} s")
            found.append(pipe.recv())
        for one in started:
            one.join(10)
        return found
    finally:
        for one in started:
            one.kill()


def _run_rank(
    rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    result = function(rank, size, *arguments)
    dist.barrier()
    pipe.send(result)
    dist.destroy_process_group()


def count(default: int) -> dict[str, Any]:
    """An option that is a number."""
    return {"type": int, "default": default}


def provenance() -> dict[str, str]:
    """Date, commit (with a + where the library or a benchmark differs from it), processor, versions."""
    root = Path(__file__).parents[1]
    commit = _git(root, "rev-parse", "--short", "HEAD")
    changed = "+" if _git(root, "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results") else ""
    found = {
        "date": datetime.date.today().isoformat(),
        # The variable is for a copy of the tree without its history.
        "commit": os.environ.get("TREETRAIN_COMMIT") or commit + changed or "unknown",
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
    }
    try:
        import torch
        import transformers
    except ImportError:
        return found
    return found | {"torch": torch.__version__, "transformers": transformers.__version__}


def processor() -> str:
    """The processor's name."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def append(name: str, row: dict[str, Any]) -> None:
    """Append one row to results/<name>.csv; columns must be those already there."""
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    row = provenance() | row
    new = not path.exists()
    if not new:
        header = path.read_text().splitlines()[0].split(",")
        if header != list(row):
            raise ValueError(f"{path} has the columns {header}, the new row {list(row)}; move the old file away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def has(name: str, **values: str) -> bool:
    """Whether results/<name>.csv has a row of this commit with these values."""
    path, wanted = RESULTS / f"{name}.csv", {"commit": provenance()["commit"]} | values
    if not path.is_file():
        return False
    with path.open(newline="") as file:
        return any(wanted.items() <= row.items() for row in csv.DictReader(file))


def report(name: str, row: dict[str, Any], *, dry_run: bool = False) -> None:
    """Print a row, and append it to results/<name>.csv unless it is a dry run."""
    print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
    if not dry_run:
        append(name, row)


def _git(root: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return ""
    return run.stdout.strip()


# ---- Memory of a CPU

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_memory() -> None:
    """Tell glibc to serve large blocks from its heap and to keep them; without glibc, do nothing.

    Memory that is returned between steps costs page faults at every step on a CPU. This equals setting
    MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ before the start.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for which, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20)):
            mallopt(which, value)
