"""`treetrain report`, and the page that `treetrain train` keeps."""

import json

from treetrain.report.records import read_run


def trained(treetrain, token_file, model_folder, out, *more):
    argv = ("train", token_file, "--model", model_folder, "--output", out, "--steps", "2", "--eval-fraction", "0.25")
    answer = treetrain(*argv, "--seed", "3", *more)
    assert answer.code == 0, answer.err
    return answer


def test_training_leaves_a_page_of_all_it_did(treetrain, token_file, model_folder, tmp_path) -> None:
    answer = trained(treetrain, token_file, model_folder, tmp_path / "out", "--loss", "grpo")
    page = tmp_path / "out" / "report.html"
    assert str(page) in answer.out.replace("\n", "")
    text = page.read_text()
    assert 'data-state="finished"' in text and 'http-equiv="refresh"' not in text
    for chart in ("loss", "reward", "ratio", "entropy", "memory", "time", "overlap", "ideal"):
        assert (f'id="chart-{chart}"' in text) == (chart != "entropy")  # which this loss did not ask for
    assert "longest path" in text and "forward-backward" not in read_run(tmp_path / "out").start["plan"]


def test_no_report_leaves_no_page(treetrain, token_file, model_folder, tmp_path) -> None:
    answer = trained(treetrain, token_file, model_folder, tmp_path / "out", "--no-report")
    assert not (tmp_path / "out" / "report.html").exists() and "report.html" not in answer.out


def test_a_tree_run_is_compared_with_a_linear_one(treetrain, token_file, model_folder, tmp_path) -> None:
    for execution in ("tree", "linear"):
        trained(treetrain, token_file, model_folder, tmp_path / execution, "--execution", execution, "--no-report")
    answer = treetrain("report", tmp_path / "tree", "--compare", tmp_path / "linear", "--json")
    found = answer.json["comparison"]
    assert answer.code == 0 and found["same_work"] and found["names"] == ["tree", "linear"]
    assert found["speedup"] > 0 and found["ideal"] > 1 and found["largest_difference"] < 1e-4
    page = (tmp_path / "tree" / "comparison.html").read_text()
    assert answer.json["page"] == str(tmp_path / "tree" / "comparison.html") and 'id="chart-speedup"' in page


def test_the_page_goes_where_it_is_told_to(treetrain, tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 1.0}) + "\n")
    answer = treetrain("report", tmp_path, "--output", tmp_path / "a" / "b.html")
    assert answer.code == 0 and answer.out.startswith(str(tmp_path / "a" / "b.html"))
    assert "<!DOCTYPE html>" in (tmp_path / "a" / "b.html").read_text()


def test_a_folder_without_a_run_is_one_line(treetrain, tmp_path) -> None:
    assert "no metrics.jsonl in it" in treetrain("report", tmp_path).error
    assert "no such folder" in treetrain("report", tmp_path / "nowhere").error


def test_a_missing_package_is_told_before_anything_is_read(treetrain, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    argv = ("train", tmp_path / "no.jsonl", "--model", "tiny", "--output", tmp_path / "out")
    assert "pip install tensorboard" in treetrain(*argv, "--tensorboard").error
    assert "pip install wandb" in treetrain(*argv, "--wandb", "mine").error
