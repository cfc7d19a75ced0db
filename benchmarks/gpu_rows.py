"""Rows of the GPU benchmark: written immediately, so that a stage that stops loses none."""

import csv
import fcntl
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import rows
from treetrain.engine.lm_head import ENVIRONMENT as HEAD

TUNED = "gpu_tuned.json"


class Out:
    """The output folder and deadline of a stage.

    Args:
        folder: folder of the files.
        until: on the clock of `time.time`, when the stage must be done.
    """

    def __init__(self, folder: Path, until: float):
        self.folder, self.until = folder, until
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.until - time.time()

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append one row to <name>.csv and print it; a file with other columns is set aside."""
        row = _origin() | {key: _short(value) for key, value in row.items()}
        with (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one stage write side by side
            self._append(self.folder / f"{name}.csv", row)
        said = " ".join(f"{key}={value}" for key, value in row.items() if key not in _origin() and value != "")
        print(f"{name}: {said}", flush=True)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        if path.exists() and path.read_text().splitlines()[0].split(",") != list(row):
            path.rename(path.with_suffix(f".{int(time.time())}.csv"))
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)

    def tuned(self) -> dict[str, Any]:
        """Results of earlier stages."""
        path = self.folder / TUNED
        return json.loads(path.read_text()) if path.exists() else {}

    def tune(self, **found: Any) -> None:
        """Save results for later stages."""
        (self.folder / TUNED).write_text(json.dumps(self.tuned() | found, indent=1))


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


@functools.cache
def _origin() -> dict[str, str]:
    found = rows.provenance()
    if not found["commit"].strip("+"):  # a copy of the tree without its history
        found["commit"] = os.environ.get("TREETRAIN_COMMIT", "unknown")
    if torch.cuda.is_available():
        found["machine"] = torch.cuda.get_device_name()
    try:
        import triton  # pyright: ignore[reportMissingImports]

        return found | {"triton": triton.__version__}
    except ImportError:
        return found | {"triton": ""}


def device() -> torch.device:
    """The GPU where there is one, else the CPU (a trial run)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Wait until the device has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    """Free the memory of the last model."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(call: Any, repeats: int, most: float = 4.0) -> list[float]:
    """Times of synchronised calls after one that is not counted; fewer if they are long."""
    call()
    times: list[float] = []
    while len(times) < repeats and sum(times) < most:
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return times


def load_tuned(out: Out) -> None:
    """Use the block sizes found by the attention stage, and the faster kernels of the head."""
    tuned = out.tuned()
    if "head" in tuned:
        os.environ[HEAD] = tuned["head"]
    if not tuned.get("shapes"):
        return
    from treetrain.softmax_attention.triton_shapes import Shape, Shapes, use

    for name, shapes in tuned["shapes"].items():
        size, dtype = name.split(" ")
        use(int(size), getattr(torch, dtype), Shapes(*(Shape(*shape) for shape in shapes)))
