"""Runs in processes of their own that are killed, or told to stop, on one process and on two ranks."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import Run, differences, saved_steps

from treetrain.trainers import checkpoints

EVERY = 2
FORMS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1},
    "ddp": {"ranks": 2, "per_device_train_batch_size": 1},
    "sharded": {"ranks": 2, "per_device_train_batch_size": 1, "sharded": True},
    "tree": {"ranks": 1, "tree": True},
    "tree, ddp": {"ranks": 2, "tree": True},
    "tree, sharded": {"ranks": 2, "tree": True, "sharded": True},
    "tree, accelerate": {"ranks": 2, "tree": True, "fsdp": True},
    "tree, accelerate, lora": {"ranks": 2, "tree": True, "fsdp": True, "lora": True},
    "shared, accelerate": {"ranks": 2, "shared": True, "fsdp": True},
    "async": {"ranks": 1, "async_save": True},
    "ddp, async": {"ranks": 2, "per_device_train_batch_size": 1, "async_save": True},
    "tree, sharded, async": {"ranks": 2, "tree": True, "sharded": True, "async_save": True},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Outcomes of undisturbed runs, by form; filled on demand."""
    folder = tmp_path_factory.mktemp("undisturbed")

    class OnDemand(dict):
        def __missing__(self, form: str) -> dict[str, Any]:
            run = Run(folder / form, resume=None, **FORMS[form])
            assert run.wait() == [0] * len(run.processes), run.text
            self[form] = run.outcome
            return self[form]

    return OnDemand()


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; all that are named as one must be whole."""
    steps = saved_steps(folder)
    for step in steps:
        checkpoints.check_files(folder / f"checkpoint-{step}")
    return max(steps, default=0, key=lambda step: steps[step])


def kill_until_done(form: str, folder: Path, kills: int, draw: random.Random) -> tuple[int, dict[str, Any]]:
    """Start, kill and resume a run until it comes to its end; returns how often it was killed, and its outcome."""
    killed, settings = 0, FORMS[form]
    while True:
        saved, how = newest_step(folder), draw.random()
        alive = killed >= kills
        at = None if alive or how < 0.5 else draw.randrange(1, 120)
        run = Run(
            folder, kill_at=at, kill_rank=draw.randrange(settings["ranks"]), slow=0 if alive else 0.02, **settings
        )
        if not alive and how < 0.5:
            run.wait_for_step(1)
            run.processes[0].join(draw.uniform(0, 1.0))
            run.send(signal.SIGKILL, draw.randrange(settings["ranks"]))
        codes = run.wait()
        done = max(run.done, saved)
        # The checkpoint of the last step but one that was due is there (with async_save, that before it): nothing that
        # was saved is lost.
        due = (done - 1) // EVERY * EVERY - (EVERY if settings.get("async_save") else 0)
        assert newest_step(folder) >= due, f"{done} steps were done; {run.text}"
        if codes == [0] * len(codes):
            return killed, run.outcome
        assert -signal.SIGKILL in codes, (codes, run.text)
        killed += 1


def survive(form: str, kills: int, folder: Path, expected: dict[str, Any], seed: int) -> None:
    draw, killed, number = random.Random(seed), 0, 0
    while killed < kills:
        number += 1
        new, found = kill_until_done(form, folder / str(number), min(10, kills - killed), draw)
        killed += new
        assert differences(found, expected) == []
    print(f"{form}: {killed} kills, {number} runs")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one", "tree", "shared, accelerate", "tree, sharded, async"])
def test_a_run_that_is_killed_twice_ends_as_if_it_had_not_been(form: str, undisturbed, tmp_path) -> None:
    survive(form, 2, tmp_path, undisturbed[form], seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form[:16] != "tree, accelerate"])
def test_fifty_kills_at_random_moments_lose_nothing(form: str, undisturbed, tmp_path) -> None:
    survive(form, 50, tmp_path, undisturbed[form], seed=50)


@pytest.mark.parametrize(
    ("form", "number", "rank"),
    [
        pytest.param("ddp", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("sharded", signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param("tree, ddp", signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param("tree, sharded", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("tree, accelerate", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("tree, accelerate, lora", signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param("shared, accelerate", signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_both_with_a_checkpoint_that_goes_on(
    form: str, number: int, rank: int, undisturbed, tmp_path
) -> None:
    run = Run(tmp_path / "out", resume=None, slow=0.1, **FORMS[form])
    run.wait_for_step(3)
    run.send(number, rank)
    assert run.wait() == [128 + number] * 2, run.text
    step = newest_step(tmp_path / "out")
    assert step == run.done >= 3
    assert (
        f"stopped after step {step} of 12; all of it is saved in {tmp_path / 'out' / f'checkpoint-{step}'}" in run.text
    )
    again = Run(tmp_path / "out", **FORMS[form])
    assert again.wait() == [0, 0], again.text
    assert differences(again.outcome, undisturbed[form]) == []


def close(one: Any, other: Any) -> None:
    """Equal by the numerics contract for float32: within 1e-5 of the largest."""
    for name, tensor in one.items():
        if isinstance(tensor, torch.Tensor):
            assert (tensor - other[name]).abs().max() <= 1e-5 * other[name].abs().max(), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"ranks": 2}, {"ranks": 1, "gradient_accumulation_steps": 4}, marks=pytest.mark.slow),
        pytest.param({"ranks": 1, "gradient_accumulation_steps": 4}, {"ranks": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 2, "sharded": True}, {"ranks": 1, "gradient_accumulation_steps": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"ranks": 2, "sharded": True},
            {"ranks": 4, "sharded": True, "gradient_accumulation_steps": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_within_rounding(before: dict, after: dict, tmp_path) -> None:
    # No dropout, since other ranks draw other numbers; the rows of every step are the same.
    fixed = {"per_device_train_batch_size": 1, "dropout": 0.0, "optim": "sgd", "learning_rate": 0.5}
    check_other_ranks(before, after, fixed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ranks": 2}, {"ranks": 1}),
        ({"ranks": 1}, {"ranks": 2}),
        ({"ranks": 2, "sharded": True}, {"ranks": 1}),
        ({"ranks": 2, "fsdp": True}, {"ranks": 1}),
    ],
)
def test_a_tree_trainer_goes_on_with_another_number_of_ranks_within_rounding(before: dict, after: dict, tmp_path):
    check_other_ranks(before, after, {"tree": True, "optim": "sgd", "learning_rate": 0.05}, tmp_path)


def check_other_ranks(before: dict, after: dict, fixed: dict, tmp_path: Path) -> None:
    """A run that is stopped on some ranks and goes on with others ends close to one that was not stopped."""
    fewer = min(before, after, key=lambda form: form["ranks"])
    whole = Run(tmp_path / "whole", resume=None, **fixed | fewer)
    assert whole.wait() == [0] * fewer["ranks"], whole.text
    stopped = Run(tmp_path / "out", resume=None, slow=0.05, **fixed | before)
    stopped.wait_for_step(5)
    stopped.send(signal.SIGTERM)
    stopped.wait()
    assert 5 <= newest_step(tmp_path / "out") < 12, stopped.text
    again = Run(tmp_path / "out", **fixed | after)
    assert again.wait() == [0] * after["ranks"], again.text
    close(again.outcome["weights"], whole.outcome["weights"])
    close(again.outcome["averages"], whole.outcome["averages"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "sharded"])
def test_where_one_rank_cannot_write_all_of_them_fail_and_name_the_last_good_checkpoint(form, tmp_path) -> None:
    run = Run(tmp_path / "out", resume=None, full_at=(1, 3), **FORMS[form])
    assert run.wait() == [1, 1]
    text = " ".join(run.text.split())
    why = "the checkpoint stopped on all ranks, because of rank 1 of 2: " if form == "ddp" else "CheckpointException"
    assert f"checkpoint-4 could not be written ({why}" in text  # by rank 0; the other's messages found no room
    assert f"the last good checkpoint is {tmp_path / 'out' / 'checkpoint-2'}. Make room" in text
    assert newest_step(tmp_path / "out") == 2 and not (tmp_path / "out" / checkpoints.WORKING).exists()
