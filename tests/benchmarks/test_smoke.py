"""The floors of speed: works share what they say, and an efficiency below its floor fails."""

import csv
import sys
from pathlib import Path

import pytest

import treetrain as tt

pytest.importorskip("torch")


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import smoke

    return smoke


@pytest.mark.parametrize("work, least, most", [("calls", 0.85, 1.0), ("search", 0.7, 0.85), ("control", 0.0, 0.0)])
def test_a_work_shares_what_its_name_says(smoke, work, least, most):
    tree = tt.build_tree(smoke.load(work))
    assert least <= 1 - tree.num_tokens / tree.num_flat_tokens <= most


@pytest.mark.slow
def test_the_rows_are_written_and_an_efficiency_below_its_floor_fails(smoke, monkeypatch, tmp_path, capsys):
    """The times are not looked at: with a floor below any speed all pass, with one above any speed all fail."""
    trunk = list(range(40))
    rows = [tt.Trajectory([*trunk, 100 + k, 200 + k]) for k in range(3)]
    monkeypatch.setattr(smoke, "load", lambda work: rows)
    monkeypatch.setattr(smoke.result_rows, "keep_memory", lambda: None)  # it would last for the tests that follow
    monkeypatch.setattr(smoke, "model_11m", lambda: tt.load_model("tiny"))
    output = tmp_path / "new" / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["smoke.py", "calls", "--rounds", "1", "--output", str(output)])
    for floor, code in ((0.0, 0), (1e9, 1)):
        monkeypatch.setattr(smoke, "FLOORS", dict.fromkeys(smoke.FLOORS, floor))
        assert smoke.main() == code
        with output.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [row["way"] for row in found] == ["whole", "small budget", "score"]
        for row in found:
            ratio = float(row["linear_seconds"]) / float(row["seconds"]) / float(row["ideal"])
            assert float(row["efficiency"]) == pytest.approx(ratio, rel=0.1)
            assert float(row["ideal"]) > 2
        assert capsys.readouterr().err.count("is below the floor") == (3 if code else 0)
