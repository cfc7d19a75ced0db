"""The GPU benchmark without a GPU: shapes of trees, rows that are kept, and trial runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treetrain as tt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_shape_is_that_of_the_rows_it_was_made_of():
    import tree_shapes

    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 900, 50).tolist()
    rows = [trunk, [*trunk[:20], 901, 902], [*trunk[:20], 901, 903, 904], [7], [*trunk, 905]]
    weights = [[0.0] * (len(row) - 1) + [1.0] for row in rows]
    given = [tt.Trajectory(row, loss_weights=w) for row, w in zip(rows, weights)]
    shape = tree_shapes.shape_of(given)
    assert shape == [[-1, 0, 50, 1], [0, 20, 2, 1], [1, 21, 2, 1], [-1, 0, 1, 1], [0, 50, 1, 1]]
    made = tree_shapes.rows_of(shape, 1000)
    assert [len(row) for row in made] == [len(row) for row in rows]
    assert [float(row.loss_weights.sum()) for row in made] == [1.0] * 5
    assert tt.build_tree(made).num_tokens == tt.build_tree(given).num_tokens
    assert tree_shapes.shape_of(made) == shape


@pytest.mark.parametrize("name", ["tau_airline_calls_2", "tau_airline_calls_48"])
def test_recorded_shapes_share_as_much_as_the_data(name):
    import tree_shapes

    rows = tree_shapes.rows_of(tree_shapes.load(name), 30_000)
    tree = tt.build_tree(rows)
    known = {"tau_airline_calls_2": (343_134, 24_707, 11_266), "tau_airline_calls_48": (32_747, 4_443, 2_316)}
    assert (tree.num_flat_tokens, tree.num_tokens, max(map(len, rows))) == known[name]


@pytest.mark.parametrize(("overlap", "path"), [(0.5, 4096), (0.75, 16384), (0.9, 4096), (0.9, 32768), (0.847, 4096)])
def test_synthetic_trees_have_about_the_overlap_they_are_named_by(overlap, path):
    import tree_shapes

    shape = tree_shapes.synthetic(overlap, path)
    tree = tt.build_tree(tree_shapes.rows_of(shape, 30_000))
    found = 1 - tree.num_tokens / tree.num_flat_tokens
    assert abs(found - overlap) < 0.06 and int(tree.depth.max()) == path - 1
    assert all(shared % 128 == 0 for _, shared, _, _ in shape), "segments of 128 tokens and more"


def test_a_case_that_fails_or_has_no_time_leaves_a_row_that_says_so(tmp_path, capsys):
    import gpu

    out = gpu.Out(tmp_path, 1.0, smoke=False, commit="abc")
    with out.case("some", a=1) as row:
        row["b"] = 0.123456789
    with out.case("some", a=2) as row:
        row["b"] = 1 / 0
    with out.case("some", a=3) as row:
        out.need(100.0)
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found == out.rows("some") and [row["a"] for row in found] == [1, 2, 3]
    assert (found[0]["b"], found[0]["commit"]) == (0.12346, "abc") and "note" not in found[0]
    assert "ZeroDivisionError" in found[1]["note"] and "skipped: it takes about 100 s" in found[2]["note"]
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text() and "a=1" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "log.txt"}


def test_the_speed_up_is_over_the_linear_rows_of_earlier_runs_with_and_without_checkpointing(tmp_path):
    import gpu

    out = gpu.Out(tmp_path, 1.0, smoke=True)
    shown = {"model": "0.6b", "rows": "some", "loss": "sft", "ideal": 8.0, "mfu": 0.5}
    for engine, checkpointed, seconds in (("tree", False, 2.0), ("linear", False, 10.0), ("linear", True, 12.0)):
        out.write("steps", **shown, engine=engine, checkpointed=checkpointed, seconds=seconds)
    out.write("steps", **shown, engine="rival", checkpointed=True, note="out of memory")
    gpu.speedups(out)
    found = [
        (row["engine"], row["linear_checkpointed"], row["speedup"], row["efficiency"]) for row in out.rows("speedup")
    ]
    assert found == [("tree", False, 5.0, 0.625), ("tree", True, 6.0, 0.75)]


@pytest.mark.slow
def test_the_three_runs_run_with_tiny_sizes(tmp_path):
    for run in "ABC":
        command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--run", run, "--smoke", "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    kinds = {row["kind"] for row in rows}
    assert kinds >= {"environment", "attention", "gate", "head", "step", "tests", "profile", "steps", "sweep", "memory"}
    steps = [row for row in rows if row["kind"] == "steps"]
    assert {row["engine"] for row in steps} >= {"tree", "linear", "rival", "tree, eager", "linear, eager"}
    assert all(row["seconds"] > 0 and row["mfu"] > 0 and row["tokens_per_second"] > 0 for row in steps)
    assert [row["rows"] for row in steps if row["model"] == "8b"] and [row for row in rows if row["kind"] == "speedup"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "log.txt"}
