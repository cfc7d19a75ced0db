"""The GPU benchmark without a GPU: shapes of trees, rows that are kept, and a trial run of everything."""

import csv
import os
import subprocess
import sys
import time
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


def test_rows_are_appended_and_a_file_of_other_columns_is_set_aside(tmp_path, capsys):
    from gpu_rows import Out

    out = Out(tmp_path, time.time() + 60)
    out.write("some", {"a": 1, "b": 0.123456789})
    out.write("some", {"a": 2, "b": ""})
    with (tmp_path / "some.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["a"] for row in rows] == ["1", "2"] and rows[0]["b"] == "0.1235" and rows[0]["torch"]
    assert "a=1 b=0.1235" in capsys.readouterr().out
    out.write("some", {"c": 3})
    assert len(list(tmp_path.glob("some*.csv"))) == 2
    assert 50 < out.left <= 60
    out.tune(right=["flex"])
    out.tune(fastest="flex")
    assert out.tuned() == {"right": ["flex"], "fastest": "flex"}


def test_tuned_block_sizes_are_handed_on(tmp_path, monkeypatch):
    import torch

    from gpu_rows import Out, load_tuned
    from treetrain.softmax_attention import triton_shapes

    monkeypatch.setattr(triton_shapes, "_chosen", {})
    out = Out(tmp_path, time.time())
    load_tuned(out)
    default = triton_shapes.shapes_for(128, torch.bfloat16)
    out.tune(shapes={"128 bfloat16": [[64, 32, 4, 1], [64, 64, 4, 1], [32, 64, 4, 1]]})
    load_tuned(out)
    found = triton_shapes.shapes_for(128, torch.bfloat16)
    assert found.forward == triton_shapes.Shape(64, 32, 4, 1) != default.forward
    assert triton_shapes.shapes_for(128, torch.float32) == triton_shapes.candidates(128, torch.float32)[0]


def test_a_stage_that_hangs_or_crashes_costs_the_others_nothing(tmp_path, monkeypatch, capfd):
    import gpu

    calls = []

    def within(command, timeout):
        name = command[command.index("--stage") + 1]
        calls.append((name, timeout))
        return {"correctness": None, "attention": 1}.get(name, 0)

    monkeypatch.setattr(gpu, "within", within)
    assert gpu.all_stages(list(gpu.SHARES), tmp_path, 8.7, smoke=False) == 2
    assert [name for name, _ in calls] == list(gpu.SHARES)
    limits = [timeout - gpu.GRACE for _, timeout in calls]
    # Nothing was used, so the last stage has all that is left; a real run stays within the sum.
    assert limits[0] == pytest.approx(60 * 8.7 * gpu.SHARES["correctness"], abs=1)
    assert limits[-1] == pytest.approx(60 * 8.7, abs=2)
    assert sum(gpu.SHARES.values()) == pytest.approx(1)
    said = capfd.readouterr().out
    assert "correctness: ended: it took too long" in said and "attention: failed with code 1" in said
    assert gpu.all_stages(["memory"], tmp_path, 0.01, smoke=False) == 0 and len(calls) == len(gpu.SHARES)


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    import gpu

    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.time()
    assert gpu.within([sys.executable, "-c", parent], 0.7) is None and time.time() - start < 3
    time.sleep(max(0.0, start + 3.7 - time.time()))
    assert not (tmp_path / "alive").exists()
    assert gpu.within([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


@pytest.mark.parametrize("works", [True, False])
def test_the_allocator_s_setting_is_taken_where_a_trial_of_it_works(monkeypatch, capfd, works):
    import gpu

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu, "within", lambda command, timeout: 0 if works else 1)
    gpu.one_memory_pool()
    assert os.environ.pop("PYTORCH_ALLOC_CONF", None) == ("expandable_segments:True" if works else None)
    assert ("do not work here" in capfd.readouterr().out) != works
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    gpu.one_memory_pool()
    assert "PYTORCH_ALLOC_CONF" not in os.environ, "what somebody chose is left alone"


def test_correctness_is_looked_at_side_by_side_and_no_group_is_lost(tmp_path, monkeypatch):
    import gpu_correctness
    from gpu_rows import Out

    monkeypatch.setattr(gpu_correctness, "runnable", lambda device: ["flex", "triton", "varlen"])
    names = gpu_correctness.groups(smoke=False)
    assert len(names) == len(set(names)) and [n for n in names if "warm" in n] == names[-9:]
    for backend in ("flex", "triton", "varlen"):
        cases = gpu_correctness.attention_cases(backend, smoke=False)
        assert {f"{backend}/{ask} {size}" for _, ask, _, size in cases} <= set(names) and f"{backend}/steps" in names
    ended = []

    class Process:
        def __init__(self, command, **options):
            ended.append(command[command.index("--group") + 1])
            if ended[-1] == "varlen/steps":
                raise subprocess.TimeoutExpired(command, 1)
            self.returncode = int(ended[-1] == "triton/full 64")

    monkeypatch.setattr(gpu_correctness.subprocess, "run", Process)
    out = Out(tmp_path, time.time() + 60)
    gpu_correctness.run(out, smoke=False)
    assert sorted(ended) == sorted(names) and out.tuned()["right"] == ["flex", "varlen"]


def test_a_case_that_fails_or_has_no_time_says_so_in_its_row(tmp_path, monkeypatch):
    import gpu_models
    import gpu_steps
    from gpu_rows import Out
    from treetrain.engine.engine import TreeEngine

    model = gpu_models.make_model("qwen3-0.6b", smoke=True)
    out = Out(tmp_path, time.time() + 60)
    case = gpu_steps.Case(out, "some", model, "qwen3-0.6b", "synthetic", "sft", smoke=True)
    monkeypatch.setattr(gpu_steps, "measure", lambda *a, **o: 1 / 0)
    assert case.run("tree", TreeEngine(model), None, False) is None
    late = gpu_steps.Case(Out(tmp_path, time.time() + 1), "some", model, "qwen3-0.6b", "synthetic", "sft", smoke=True)
    late.smoke, late.flops = False, 1e18
    late.run("tree", TreeEngine(model), None, False)
    with (tmp_path / "some.csv").open() as file:
        notes = [row["note"] for row in csv.DictReader(file)]
    assert "ZeroDivisionError" in notes[0] and "skipped: about" in notes[1]


@pytest.mark.slow
def test_the_whole_benchmark_runs_with_tiny_sizes(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--minutes", "10", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = ["correctness", "attention", "head", "steps", "memory", "nothing_shared", "ablation"]
    found = {}
    for name in names:
        with (tmp_path / f"gpu_{name}.csv").open() as file:
            found[name] = list(csv.DictReader(file))
    assert {row["verdict"] for row in found["correctness"]} == {"right"}
    assert all(float(row["of_plain"]) > 0 for row in found["attention"])
    assert {row["verdict"] for row in found["head"]} == {"right"} and {row["note"] for row in found["head"]} == {""}
    for name in names[3:]:
        assert all(float(row["seconds"]) > 0 and not row["note"] for row in found[name]), name
    assert {row["engine"] for row in found["steps"]} == {"linear", "tree", "rival"}
    assert all(float(row["predicted_gb"]) > 0 for row in found["memory"])
    engines = {row["engine"] for row in found["ablation"]}
    assert {"tree, head not fused", "tree, a part for each segment", "tree, parts of a quarter"} <= engines


def test_the_waits_of_a_step_are_counted_and_the_mode_is_put_back_whatever_happens(monkeypatch):
    import warnings

    import torch

    import gpu_models

    modes = ["default"]
    monkeypatch.setattr(gpu_models, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu_models, "wait", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step():
        assert modes[-1] == "warn"
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=2)
        warnings.warn("something else", UserWarning, stacklevel=2)

    assert gpu_models.count_waits(step) == 3 and modes == ["default", "warn", "default"]
    assert gpu_models.count_waits(lambda: 1 / 0) == "" and modes[-1] == "default"
    monkeypatch.undo()
    assert gpu_models.count_waits(lambda: 1 / 0) == "", "nothing is run without a GPU"


@pytest.mark.parametrize("linear", [False, True])
def test_a_step_is_timed_with_the_tree_of_the_next_one_built_after_it(monkeypatch, linear):
    import gpu_models
    import gpu_steps

    model = gpu_models.make_model("qwen3-0.6b", smoke=True)
    rows = gpu_steps.batch("synthetic", smoke=True)
    kind = gpu_models.LinearEngine if linear else tt.TreeEngine
    events, original, build, timed = [], tt.TreeEngine.forward_backward, gpu_models.as_tree, gpu_models._timed

    def forward_backward(self, batch, *arguments, **options):
        shares = isinstance(batch, tt.TokenTree) and batch.num_tokens < batch.num_flat_tokens
        events.append(("step", type(batch).__name__, shares))
        return original(self, batch, *arguments, **options)

    def built(*arguments, **options):
        events.append(("tree",))
        return build(*arguments, **options)

    def noted(call):
        events.append(("begin",))
        found = timed(call)
        events.append(("end",))
        return found

    monkeypatch.setattr(tt.TreeEngine, "forward_backward", forward_backward)
    monkeypatch.setattr(gpu_models, "as_tree", built)
    monkeypatch.setattr(gpu_models, "_timed", noted)
    found = gpu_models.measure(model, None, kind(model), rows, tt.losses.sft(), repeats=2, waits=True)
    step = [("begin",), ("step", "TokenTree", not linear), ("tree",), ("end",)]
    assert events == [("step", "list", False), ("tree",), *step, *step]
    assert found.host_waits == "" and found.seconds > 0
