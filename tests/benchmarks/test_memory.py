"""The measurement of `benchmarks/memory.py`."""

import sys
from pathlib import Path

import numpy as np
import pytest

import treetrain as tt
from treetrain.engine import TreeEngine
from treetrain.models.loading import load_model


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_grows_with_the_step_and_counts_neither_model_nor_imports(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from memory import peak_step_bytes

    def rows_of(length: int) -> list[tt.Trajectory]:
        ids = np.random.default_rng(0).integers(0, 60, length)
        return [tt.Trajectory(ids[start : start + 100]) for start in range(0, length, 100)]

    model, loss = load_model("tiny"), tt.losses.sft()
    small, large = (peak_step_bytes(TreeEngine, {}, model, rows_of(length), loss) for length in (500, 2_000))
    # A token of this model keeps tens of kB of activations; a process that has only imported torch holds 200 MB.
    assert 1_000_000 < small < 150_000_000
    assert large > 2 * small
