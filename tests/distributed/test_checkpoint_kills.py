"""Runs of several ranks of which one is killed, at any moment: they lose the steps since the last checkpoint only."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from support.kills import differences, records, steps_done, survive
from support.ranked_runs import RankedRun, what_must_agree
from support.saved import save_small_model
from treetrain.train import checkpoint_files

EVERY, STEPS, SIZE = 2, 12, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of twelve steps with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("base")
    rows, model = folder / "rows.jsonl", save_small_model(folder / "model", vocabulary=64, positions=128)
    draw = np.random.default_rng(0)
    lines = []
    for group in range(6):
        trunk = draw.integers(0, 64, 12).tolist()
        lines += [
            f'{{"input_ids": {trunk + draw.integers(0, 64, 8).tolist()}, "group_id": "{group}"}}' for _ in range(3)
        ]
    rows.write_text("\n".join(lines) + "\n")
    sizes = ["--tokens-per-step", "120", "--steps", str(STEPS), "--lr", "1e-2", "--eval-fraction", "0.2"]
    writes = ["--checkpoint-every-steps", str(EVERY), "--eval-every-steps", "3", "--keep-checkpoints", "2"]
    return [str(rows), "--model", model, *sizes, *writes, "--threads", "1", "--no-report", "--parallel", "fsdp"]


@pytest.fixture(scope="module")
def undisturbed(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = RankedRun([*base, "--output", str(folder / "out")], folder, size=SIZE)
    assert run.wait() == [0] * SIZE, run.text
    return what_must_agree(folder / "out")


def newest_step(folder: Path) -> int:
    found, _ = checkpoint_files.newest(folder / checkpoint_files.FOLDER)
    return 0 if found is None else found.step


def check_loss(folder: Path) -> int:
    """No more is lost than since the last checkpoint; the one that was being written may be lost with it."""
    done, step = steps_done(folder), newest_step(folder)
    assert step >= ((done - 1) // EVERY - 1) * EVERY, (
        f"{done} steps were done, the newest whole checkpoint is of {step}"
    )
    return step


def go_on(base: list[str], folder: Path, **options) -> RankedRun:
    return RankedRun([*base, "--output", str(folder / "out"), "--resume", "auto"], folder, size=SIZE, **options)


def kill_until_done(base: list[str], folder: Path, kills: int, draw: random.Random, longest: float) -> int:
    """Start a run and kill one of its ranks until it comes to its end; returns how often one was killed."""
    out, killed = folder / "out", 0
    while True:
        before, victim = newest_step(out), draw.randrange(SIZE)
        at_a_write, last = draw.random() < 0.5, killed >= kills
        run = go_on(base, folder, kill_at=None if last or not at_a_write else (victim, draw.randrange(1, 40)))
        if not last and not at_a_write:
            run.wait_for(lambda run=run: "attention:" in run.text)
            run.processes[victim].join(draw.uniform(0, longest))
            run.send(victim, signal.SIGKILL)
        codes = run.wait()
        if before and "attention:" in run.text:
            assert f"goes on from step {before} of {STEPS}" in " ".join(run.text.split()), run.text
        if codes == [0] * SIZE:
            return killed
        if not at_a_write and codes[victim] == 0:
            continue  # it had come to its end
        assert codes[victim] == -signal.SIGKILL, (codes, run.text)
        killed += 1
        check_loss(out)


def test_a_run_of_which_ranks_are_killed_ends_as_if_they_had_not_been(base, undisturbed, tmp_path) -> None:
    killed = kill_until_done(base, tmp_path, 2, random.Random(3), 0.5)
    assert killed == 2
    assert differences(what_must_agree(tmp_path / "out"), undisturbed) == []


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_nothing(base, undisturbed, tmp_path) -> None:
    draw = random.Random(50)

    def check(out: Path) -> None:
        assert differences(what_must_agree(out), undisturbed) == []

    survive(50, tmp_path, lambda folder, kills: kill_until_done(base, folder, kills, draw, 1.5), check)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_before_any_of_a_ranks_calls_that_write_changes_nothing(base, tmp_path, rank) -> None:
    short = [*base, "--steps", "4", "--keep-checkpoints", "1"]
    whole = tmp_path / "whole"
    whole.mkdir()
    run = go_on(short, whole)
    assert run.wait() == [0] * SIZE, run.text
    expected = what_must_agree(whole / "out")
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        if go_on(short, folder, kill_at=(rank, number)).wait() == [0] * SIZE:
            break
        check_loss(folder / "out")
        again = go_on(short, folder)
        assert again.wait() == [0] * SIZE, again.text
        assert differences(what_must_agree(folder / "out"), expected) == [], number
    assert number > (25 if rank == 0 else 3), f"only {number} calls were met"


def test_a_signal_to_one_rank_ends_the_step_on_all_and_saves_it(base, undisturbed, tmp_path) -> None:
    out = tmp_path / "out"
    run = go_on(base, tmp_path)
    run.wait_for(lambda: steps_done(out) >= 3)
    run.send(1, signal.SIGTERM)
    assert run.wait() == [128 + signal.SIGTERM] * SIZE, run.text
    step = newest_step(out)
    assert step == steps_done(out) >= 3
    assert f"stopped after step {step} of {STEPS}; all of it is saved in" in " ".join(run.text.split())
    assert records(out)[-1]["kind"] == "interrupted" and not list(out.glob("*.safetensors"))
    again = go_on(base, tmp_path)
    assert again.wait() == [0] * SIZE, again.text
    assert differences(what_must_agree(out), undisturbed) == []
