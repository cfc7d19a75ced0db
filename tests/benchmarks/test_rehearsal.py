"""The rehearsal of the command for a GPU, whole and with an error in every phase.

`make test-device` runs it with the versions of a GPU machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUARTER_HOUR = ROOT / "benchmarks" / "quarter_hour.py"
RUN = {"right", "headline", "sweep", "large", "trl", "detail"}
"""The phases of a rehearsal: without a GPU there is no other FlashAttention."""
ERRORS = ("crash", "hang", "wrong")


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def environment(**more: str) -> dict[str, str]:
    """That of a machine with a copy of the tree: the library is not installed, and there is no history."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return plain | {"TREETRAIN_COMMIT": "abc", "OMP_NUM_THREADS": "1"} | more


def test_every_phase_leaves_right_rows_and_compiles_nothing_while_it_is_timed(tmp_path):
    command = [sys.executable, str(QUARTER_HOUR), "--out", str(tmp_path), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment(), check=False)
    rows = rows_of(tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    ran = {row["phase"] for row in rows if row["kind"] != "skipped"}
    skipped = {row["phase"] for row in rows if row["kind"] == "skipped"}
    assert ran | skipped == RUN | {"flash"} and skipped <= {"flash", "trl"}
    assert {row.get("commit", "abc") for row in rows} == {"abc"}
    steps = [row for row in rows if row["kind"] in ("steps", "memory")]
    assert {row["engine"] for row in steps} >= {"tree", "linear", "linear, every row", "tree, eager layers"}
    assert {row["graphs_while_timed"] for row in steps} == {0}
    assert any(row["graphs"] for row in steps if row["compiled"]), "layers run compiled, as on a GPU"
    compared = [row for row in steps if "gradient_error" in row]
    assert len(compared) > len(steps) / 2 and all(row["right"] for row in compared)
    assert all(row["right"] for row in rows if row["kind"] in ("self_check", "attention", "head", "step", "trl"))
    assert "| 0.6b | tau_airline 2 | tree, checkpointed |" in done.stdout
    assert f"{len(rows)} rows, 0 failed, cut or wrong" in done.stdout


@pytest.mark.parametrize("turn", range(len(ERRORS)))
def test_an_error_in_a_phase_leaves_the_rows_of_its_other_cases_and_of_all_other_phases(tmp_path, turn):
    """Every phase has another error at every turn. Its first case is lost, or its wrong numbers are called wrong."""
    planted = {phase: ERRORS[(number + turn) % 3] for number, phase in enumerate(sorted(RUN))}
    call = (
        "import sys, quarter_hour; quarter_hour.SILENCE = 100.0; "
        f"quarter_hour.CHILD = [sys.executable, {str(ROOT / 'tests' / 'support' / 'planted.py')!r}]; "
        f"sys.argv = ['quarter_hour.py', '--out', {str(tmp_path)!r}, '--smoke']; sys.exit(quarter_hour.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", call],
        capture_output=True,
        text=True,
        timeout=3000,
        env=environment(PLANTED=json.dumps(planted), PYTHONPATH=str(QUARTER_HOUR.parent)),
        check=False,
    )
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr[-3000:]
    rows, said = rows_of(tmp_path), done.stdout[-4000:]
    if any(row["kind"] == "skipped" and row["phase"] == "trl" for row in rows):
        del planted["trl"]  # TRL is not there
    stopped = {row["phase"]: row for row in rows if row["kind"] == "stopped"}
    assert set(stopped) == {phase for phase, error in planted.items() if error != "wrong"}, said
    for phase, error in planted.items():
        found = [row for row in rows if row["phase"] == phase and row["kind"] not in ("stopped", "skipped")]
        if error == "wrong":
            assert any(row.get("right") is False for row in found), (phase, said)
            continue
        assert stopped[phase]["note"].startswith("ended with SIGABRT" if error == "crash" else "silent for"), said
        assert stopped[phase]["case"].startswith(f"{phase}: "), said
        assert phase == "trl" or len(found) >= 4, f"{phase}: the cases after the first"
        assert all(row.get("right", True) and "note" not in row for row in found), said
