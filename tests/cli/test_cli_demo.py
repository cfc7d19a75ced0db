"""`treetrain demo`: its rows are the recorded ones, and it says when the two trainings differ, fail or die."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treetrain.cli import demo
from treetrain.cli.common import console

ROOT = Path(__file__).parents[2]


def test_its_rows_are_solved_games_of_the_recorded_ones(tmp_path) -> None:
    recorded = gzip.decompress((ROOT / "examples/countdown/train.jsonl.gz").read_bytes()).splitlines()
    games = gzip.decompress((demo._folder(str(tmp_path / "demo")) / demo.GAMES).read_bytes()).splitlines()
    assert len(set(games)) == 12 and set(games) <= set(recorded)
    read = [json.loads(game) for game in games]
    assert {game["reward"] for game in read} == {1.0} and len({game["task_id"] for game in read}) == 2


def test_a_folder_with_other_files_is_refused_and_one_of_an_earlier_demo_is_not(treetrain, tmp_path) -> None:
    assert demo._folder(str(tmp_path / "new")) == demo._folder(str(tmp_path / "new"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("x")
    for name in ("taken", "taken/thesis.tex"):
        said = treetrain("demo", "--output_dir", tmp_path / name).error
        assert f"--output_dir {tmp_path / name} is there and holds no earlier demo" in said
    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == ["thesis.tex"]


def training(run) -> demo.Training:
    """A process that runs a function with its end of the connection."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return demo.Training(process, ours)


def test_the_error_of_a_training_is_raised_and_one_that_dies_is_said() -> None:
    with pytest.raises(ValueError, match="wrong row"):
        demo._received(training(lambda connection: connection.send(ValueError("wrong row"))))
    with pytest.raises(ChildProcessError, match="ended with exit code -9"):
        demo._received(training(lambda connection: os.kill(os.getpid(), signal.SIGKILL)))
    assert demo._received(training(lambda connection: connection.send({"loss": 1.0}))) == {"loss": 1.0}


def write_run(folder: Path, losses: list[float], tokens: int) -> None:
    """The logs of a run with these losses."""
    folder.mkdir(parents=True)
    figures = {"tree/flat_tokens": 60, "tree/computed_tokens": tokens, "tree/seconds": tokens / 100}
    figures |= {"tree/tree_flops": 1e9, "tree/linear_flops": 3e9, "tree/peak_memory_bytes": 1e8}
    history = [{"step": step, "loss": loss, **figures} for step, loss in enumerate(losses, 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


@pytest.mark.parametrize(("apart", "agree"), [(5e-7, True), (0.002, False)])
def test_curves_that_lie_apart_are_said(tmp_path, capsys, apart, agree) -> None:
    write_run(tmp_path / "tree", [3.0, 2.0, 1.0], 20)
    write_run(tmp_path / "linear", [3.0, 2.0, 1.0 + apart], 60)
    assert demo._compare(tmp_path, console()) is agree
    said = capsys.readouterr().out
    assert ("THEY DIFFER" in said) is not agree and f"{apart:.1e} nats apart over 3 steps" in said
    assert "speed-up 3.00x (median over steps), 3.00x by FLOPs; 60 tokens" in said
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_the_demo_runs_in_an_empty_folder_and_both_trainings_agree(tmp_path) -> None:
    command = [sys.executable, "-m", "treetrain", "demo", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: gradients differ" in done.stdout and "they lie on each other" in done.stdout
    assert (
        done.stdout.count("\n  before ") == done.stdout.count("\n  after ") == 2 and len(done.stdout.splitlines()) < 30
    )
    made = sorted(path.name for path in (tmp_path / "treetrain-demo").iterdir())
    assert made == [demo.GAMES, "linear", "run.html", "tree"]
