"""Runs that are killed or told to stop, in processes of their own: they lose the steps since the last checkpoint."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from branching import branching_rows, write_rows

from support.kills import Run, differences, records, steps_done, survive, what_must_agree
from treetrain.train import checkpoint_files

EVERY = 2


@pytest.fixture(scope="module")
def base(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of twelve steps with a checkpoint after every second one."""
    rows = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", branching_rows())
    sizes = ["--tokens-per-step", "120", "--steps", "12", "--lr", "1e-2", "--eval-fraction", "0.2", "--threads", "1"]
    writes = ["--checkpoint-every-steps", str(EVERY), "--eval-every-steps", "3", "--keep-checkpoints", "2"]
    return [rows, "--model", model_folder, *sizes, *writes]


@pytest.fixture(scope="module")
def undisturbed(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run([*base, "--output", str(folder / "out")], folder / "said.txt")
    assert run.wait() == 0, run.text
    return what_must_agree(folder / "out")


def newest_step(folder: Path) -> int:
    found, _ = checkpoint_files.newest(folder / checkpoint_files.FOLDER)
    return 0 if found is None else found.step


def check_loss(folder: Path, done: int) -> int:
    """No more is lost than what was done since the last checkpoint; returns the step to go on from."""
    step = newest_step(folder)
    assert step >= (done - 1) // EVERY * EVERY, f"{done} steps were done, the newest whole checkpoint is of {step}"
    return step


def go_on(base: list[str], folder: Path, **options) -> Run:
    return Run([*base, "--output", str(folder / "out"), "--resume", "auto"], folder / "said.txt", **options)


def kill_soon(run: Run, seconds: float) -> None:
    """So long after the model has been loaded."""
    run.wait_for(lambda: "attention:" in run.text)
    run.process.join(seconds)
    run.send(signal.SIGKILL)


def kill_until_done(base: list[str], folder: Path, kills: int, draw: random.Random, longest: float) -> int:
    """Start and kill a run until it comes to its end; returns how often it was killed."""
    out, killed = folder / "out", 0
    while True:
        before, done = newest_step(out), steps_done(out)
        at_a_write = draw.random() < 0.5
        alive = killed >= kills
        run = go_on(base, folder, kill_at=None if alive or not at_a_write else draw.randrange(1, 60))
        if not alive and not at_a_write:
            kill_soon(run, draw.uniform(0, longest))
        code = run.wait()
        said = " ".join(run.text.split())
        if before and ("attention:" in said or code == 0):
            assert f"goes on from step {before} of 12" in said or "is finished" in said, run.text
            assert done <= before or "is finished" in said or "run again" in said, run.text
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, (code, run.text)
        killed += 1
        check_loss(out, steps_done(out))


def test_a_run_that_is_killed_twice_ends_as_if_it_had_not_been(base, undisturbed, tmp_path) -> None:
    killed = kill_until_done(base, tmp_path, 2, random.Random(3), 0.5)
    assert killed == 2
    assert differences(what_must_agree(tmp_path / "out"), undisturbed) == []


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(base, undisturbed, tmp_path) -> None:
    draw = random.Random(20)

    def check(out: Path) -> None:
        assert differences(what_must_agree(out), undisturbed) == []

    survive(20, tmp_path, lambda folder, kills: kill_until_done(base, folder, kills, draw, 1.0), check)


@pytest.mark.slow
def test_a_kill_before_any_of_the_calls_that_write_checkpoints_and_results_changes_nothing(base, tmp_path) -> None:
    short = [*base, "--steps", "4", "--keep-checkpoints", "1", "--no-report"]
    whole = Run([*short, "--output", str(tmp_path / "whole" / "out")], tmp_path / "said.txt")
    assert whole.wait() == 0, whole.text
    expected = what_must_agree(tmp_path / "whole" / "out")
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        if go_on(short, folder, kill_at=number).wait() == 0:
            break
        check_loss(folder / "out", steps_done(folder / "out"))
        again = go_on(short, folder)
        assert again.wait() == 0, again.text
        assert differences(what_must_agree(folder / "out"), expected) == [], number
    assert number > 30, f"only {number} calls were met"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_it_and_says_how_to_go_on(base, undisturbed, tmp_path, number) -> None:
    out = tmp_path / "out"
    run = Run([*base, "--output", str(out)], tmp_path / "said.txt")
    run.wait_for(lambda: steps_done(out) >= 3)
    run.send(number)
    assert run.wait() == 128 + number, run.text
    step = newest_step(out)
    assert step == steps_done(out) >= 3
    said = " ".join(run.text.split())
    assert f"stopped after step {step} of 12; all of it is saved in" in said
    command = said[said.index("go on with: ") + len("go on with: ") :]
    assert command.startswith("treetrain train ") and command.endswith("--resume auto")
    assert records(out)[-1]["kind"] == "interrupted"
    assert not list(out.glob("*.safetensors"))
    go_on_run = Run(command.split()[2:], tmp_path / "said.txt")
    assert go_on_run.wait() == 0, go_on_run.text
    assert differences(what_must_agree(out), undisturbed) == []


def test_the_command_itself_exits_with_143_after_sigterm(base, tmp_path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "treetrain", "train", *base, "--output", str(out), "--steps", "100000", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and steps_done(out) < 1:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said, told = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 143 and said == "", told
    assert newest_step(out) == steps_done(out) and "--resume auto" in told
