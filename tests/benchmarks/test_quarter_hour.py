"""The command for a GPU: its processes outlive what fails in them, and its table claims no more than was measured."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
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


def test_a_case_that_fails_or_has_no_time_leaves_a_row_that_says_so(tmp_path, capsys):
    import gpu_cases

    out = gpu_cases.Out(tmp_path, 1.0, smoke=False, commit="abc")
    with out.case("some", a=1) as row:
        row["b"] = 0.123456789
    with out.case("some", a=2) as row:
        row["b"] = 1 / 0
    with out.case("some", a=3) as row:
        out.need(100.0)
    assert not out.device_failed
    with out.case("some", a=4):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["a"] for row in found] == [1, 2, 3, 4] and out.device_failed
    assert (found[0]["b"], found[0]["commit"]) == (0.12346, "abc") and "note" not in found[0]
    assert "ZeroDivisionError" in found[1]["note"] and "skipped: it takes about 100 s" in found[2]["note"]
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text() and "a=1" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "log.txt"}


STAND_IN = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
import json, pathlib
from argparse import ArgumentParser
import quarter_hour

class Out:
    device_failed = False
    left = 1.0
    def __init__(self, folder, phase):
        self.folder, self.every_row = folder, {{"phase": phase}}
    def say(self, text):
        with (self.folder / "log.txt").open("a") as file:
            file.write(text)
    def write(self, kind, **row):
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps({{"kind": kind, **row, **self.every_row}}) + "\\n")

parser = ArgumentParser()
for flag in ("--phase", "--out", "--minutes", "--scratch"):
    parser.add_argument(flag, type=str if flag == "--phase" else pathlib.Path)
given = parser.parse_args()
out = Out(given.out, given.phase)
phase = quarter_hour.Phase(out, given.scratch)
def device_error():
    out.device_failed = True
    out.write("some", case="first", note="CUDA error: an illegal memory access was encountered")
first = {{
    "right": lambda: None,
    "headline": os.abort,
    "sweep": lambda: time.sleep(600),
    "large": device_error,
    "trl": lambda: 1 / 0,
    "detail": lambda: sys.exit(3),
}}[given.phase]
phase.case("first", first)
phase.case("second", lambda: out.write("some", case="second"))
"""


def test_a_phase_that_crashes_hangs_or_loses_its_device_goes_on_with_its_next_case(tmp_path, monkeypatch, capsys):
    """Stand-ins for the phases, which need no torch."""
    import quarter_hour

    script = tmp_path / "phase.py"
    script.write_text(textwrap.dedent(STAND_IN).format(benchmarks=str(BENCHMARKS)))
    monkeypatch.setattr(quarter_hour, "CHILD", [sys.executable, str(script)])
    monkeypatch.setattr(quarter_hour, "SILENCE", 3.0)
    monkeypatch.setattr(quarter_hour, "WHEELS", tmp_path / "none")
    monkeypatch.setattr(quarter_hour, "not_importable", lambda *modules: "")
    monkeypatch.setattr(quarter_hour, "flash_impl", lambda: None)
    monkeypatch.setattr(sys, "argv", ["quarter_hour.py", "--out", str(tmp_path / "out")])
    assert quarter_hour.main() == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows if row.get("case") == "second"] == list(
        name for name in quarter_hour.PHASES if name != "flash"
    )
    stopped = {row["phase"]: (row["case"], row["note"]) for row in rows if row["kind"] == "stopped"}
    assert stopped["headline"] == ("headline: first", "ended with SIGABRT")
    assert stopped["sweep"][0] == "sweep: first" and re.fullmatch(r"silent for \d s, killed", stopped["sweep"][1])
    assert stopped["trl"] == ("trl: first", "ZeroDivisionError: division by zero")
    assert stopped["detail"] == ("detail: first", "ended with exit code 3")
    assert set(stopped) == {"headline", "sweep", "trl", "detail"}, "an error of the device has its row already"
    assert next(row for row in rows if row["kind"] == "skipped")["phase"] == "flash"
    assert "12 rows, 5 failed, cut or wrong" in capsys.readouterr().out


def test_a_phase_beyond_its_limit_is_killed_and_the_next_has_what_is_left(tmp_path, monkeypatch):
    import quarter_hour

    script = tmp_path / "phase.py"
    script.write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(quarter_hour, "CHILD", [sys.executable, str(script)])
    monkeypatch.setattr(quarter_hour, "LEAST", 1.0)
    monkeypatch.setattr(quarter_hour, "GRACE", 0.0)
    monkeypatch.setattr(quarter_hour, "PHASES", {"right": 2, "sweep": 70, "detail": 120})
    monkeypatch.setattr(sys, "argv", ["quarter_hour.py", "--out", str(tmp_path / "out"), "--minutes", "0.1"])
    assert quarter_hour.main() == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    found = [(row["kind"], row["phase"], row.get("note", row.get("why"))) for row in rows]
    assert found[0] == ("stopped", "right", "beyond its limit of 2 s, killed")
    assert found[1][:2] == ("stopped", "sweep") and found[2] == ("skipped", "detail", "no time was left")


ORIGIN = {"machine": "H100", "flash": "FA2", "torch": "2.11.0", "commit": "abc", "date": "2026-12-01"}


def test_a_run_that_is_stopped_ends_its_phase_and_shows_what_was_measured(tmp_path):
    script = tmp_path / "phase.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        """(out / 'rows.jsonl').write_text('{"kind": "some"}\\n')\n"""
        "(out / 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    call = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import quarter_hour; "
        f"quarter_hour.CHILD = [sys.executable, {str(script)!r}]; "
        f"sys.argv = ['quarter_hour.py', '--out', {str(tmp_path)!r}]; sys.exit(quarter_hour.main())"
    )
    run = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.terminate()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and "1 rows, 0 failed, cut or wrong" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def steps(seconds: float, engine: str, checkpointed: bool = False, **more) -> dict:
    """A row of a step."""
    shown = ORIGIN | {"kind": "steps", "model": "0.6b", "rows": "calls", "engine": engine}
    shown |= {"checkpointed": checkpointed, "seconds": seconds, "seconds_without_optimiser": seconds - 1.0}
    shown |= {"product_flops": 1e12, "tokens": 100, "mfu": 0.5, "predicted_gb": 2.0}
    return shown | ({"ideal": 8.0} if engine.startswith("linear") else {}) | more


def kernel(name: str, tflops: float, **more) -> dict:
    """A row of the sweep."""
    shown = ORIGIN | {"kind": "sweep", "kernel": name, "tree": "calls", "tokens": 100, "tflops": tflops}
    return shown | {"forward_tflops": 2 * tflops} | more


def test_a_speed_up_is_over_the_newest_baseline_of_the_same_machine_kernel_and_checkpointing():
    import gpu_table

    rows = [steps(2.0, "tree"), steps(99.0, "linear"), steps(10.0, "linear"), steps(14.0, "linear, every row")]
    rows += [steps(50.0, "linear", machine="H200"), steps(70.0, "linear", flash="FA4")]
    rows += [steps(4.0, "tree", checkpointed=True), steps(3.0, "tree, eager layers"), steps(9.0, "tree, broken")]
    rows[-1] |= {"note": "OutOfMemoryError: no"}
    found = {(entry["tree"]["engine"], entry["tree"]["checkpointed"]): entry for entry in gpu_table.speedups(rows)}
    plain = found["tree", False]
    assert (plain["speedup"], plain["ideal"], plain["efficiency"], plain["over_every_row"]) == (5.0, 8.0, 0.625, 7.0)
    assert plain["without_optimiser"] == 9.0 and found["tree, eager layers", False]["speedup"] == 10 / 3
    assert "speedup" not in found["tree", True], "a baseline that was not checkpointed is another one"
    assert "| 0.6b | calls | broken | 100 → 100 | 10 → 9 | OutOfMemoryError: no |" in gpu_table.report(rows)


def test_rows_that_fit_only_when_checkpointed_are_the_baseline_of_a_tree_that_is_not():
    import gpu_table

    rows = [steps(2.0, "tree"), steps(12.0, "linear", checkpointed=True), steps(0.0, "linear", note="OutOfMemoryError")]
    del rows[-1]["seconds"]
    (entry,) = gpu_table.speedups(rows)
    assert entry["speedup"] == 6.0
    assert gpu_table.table(rows)[1][0][2] == "tree, rows checkpointed"


def test_the_table_shows_no_speed_up_of_a_side_whose_gradient_is_wrong():
    import gpu_table

    for wrong in ("tree", "linear"):
        rows = [steps(2.0, "tree"), steps(10.0, "linear"), steps(14.0, "linear, every row")]
        next(row for row in rows if row["engine"] == wrong).update(right=False, gradient_error=0.5)
        (entry,) = gpu_table.speedups(rows)
        assert "speedup" not in entry
        assert "wrong: gradients differ by 5.0e-01" in gpu_table.table(rows)[1][0]
        assert "3 rows, 1 failed, cut or wrong" in gpu_table.report(rows)


@pytest.mark.parametrize("checkpointed, saved", [(False, 7 * (1 / 20 - 1 / 40)), (True, 8 * (1 / 20 - 1 / 40))])
def test_the_baseline_is_also_shown_with_its_attention_at_the_rate_of_the_fastest_kernel(checkpointed, saved):
    import gpu_table

    rows = [steps(2.0, "tree", checkpointed), steps(10.0, "linear", checkpointed)]
    rows += [kernel("plain flash", 20.0), kernel("plain cudnn", 40.0), kernel("plain wrong", 80.0, right=False)]
    rows += [
        kernel("varlen", 90.0),
        kernel("plain cudnn", 99.0, machine="H200"),
        kernel("plain flash", 1, tree="other"),
    ]
    (entry,) = gpu_table.speedups(rows)
    assert entry["best_kernel"] == "cudnn" and entry["best_linear"] == pytest.approx(10 - saved)
    assert entry["over_best"] == pytest.approx((10 - saved) / 2)
    assert "over_best" not in gpu_table.speedups(rows[:2])[0]


def test_the_page_shows_the_rows_of_a_gpu_once_there_are_any(tmp_path):
    import page

    assert "Nothing was measured on a GPU yet." in page.generated(tmp_path)
    rows = [steps(2.0, "tree"), steps(10.0, "linear"), kernel("plain flash", 20.0), kernel("plain cudnn", 40.0)]
    rows += [{"kind": "skipped", "phase": "flash", "why": "it is not there", "date": "2026-12-01"}]
    (tmp_path / page.GPU).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page.generated(tmp_path)
    assert "Nothing was measured on a GPU yet." not in text
    assert "**H100**, torch 2.11.0, commit abc, 2026-12-01." in text
    assert "| 0.6b | calls | tree | 100 → 100 | 10 → 2 | **5** | 8 | 0.625 |" in text
    assert "| calls | plain cudnn | 100 | 80 | 40 |" in text
