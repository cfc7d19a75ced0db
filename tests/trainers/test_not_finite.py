"""NaN and infinite gradients and weights: steps are skipped, nothing of it is saved, and runs get past them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import SafeTrainer, StopAt, differences, make_trainer, make_tree_trainer, outcome, saved_steps
from transformers import Trainer, TrainerCallback

from treetrain.core.engine.ranks import Ranks


def poisons(kind: type, steps: tuple[int, ...], value: float = math.nan) -> type:
    """A trainer whose gradient is not finite in some steps, although its loss is."""

    class Poisoned(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step + 1 in steps:
                next(p for p in self.model.parameters() if p.grad is not None).grad.flatten()[3] = value
            return loss

    return Poisoned


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


class Watch(TrainerCallback):
    """Weights and learning rate after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, lr_scheduler: Any, **_: Any) -> None:
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        self.seen.append((flat, lr_scheduler.get_last_lr()[0]))


@pytest.mark.few(1)
@pytest.mark.parametrize(("value", "max_grad_norm"), [(math.nan, 1.0), (math.inf, 0.0)])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(value, max_grad_norm, tmp_path, caplog) -> None:
    watch = Watch()
    settings = {"max_steps": 5, "logging_steps": 1, "max_grad_norm": max_grad_norm, "callbacks": (watch,)}
    trainer = make_trainer(tmp_path / "out", kind=poisons(SafeTrainer, (3,), value), **settings)
    trainer.train()
    steps = [flat for flat, _ in watch.seen]
    assert torch.equal(steps[1], steps[2]) and not torch.equal(steps[2], steps[3])
    rates = [rate for _, rate in watch.seen]
    assert rates[1] == rates[2] != rates[3]  # the schedule waits too
    assert all(bool(flat.isfinite().all()) for flat in steps) and len(steps) == 5
    assert "step 3 is skipped, since its gradient norm is" in caplog.text and "(1 in a row" in caplog.text
    counted = [record.get("skipped_steps") for record in trainer.state.log_history if "loss" in record]
    assert counted == [None, None, 1, 1, 1]
    assert not any(each.is_complex() or each.isnan().any() for each in weights(trainer))


def test_plain_transformers_steps_with_nan_so_the_tests_here_can_fail(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out", kind=poisons(Trainer, (3,)), max_steps=4)
    trainer.train()
    assert any(bool(each.isnan().any()) for each in weights(trainer))


@pytest.mark.slow
def test_a_run_with_a_skipped_step_resumes_bit_for_bit(tmp_path) -> None:
    kind = poisons(SafeTrainer, (3, 5))
    whole = make_trainer(tmp_path / "whole", kind=kind, max_steps=8)
    whole.train()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path / "out", kind=kind, max_steps=8, callbacks=(StopAt(4),)).train()
    again = make_trainer(tmp_path / "out", kind=kind, max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert (
        differences(outcome(again), outcome(whole)) == []
        and whole.skipped_steps.total == again.skipped_steps.total == 2
    )


@pytest.mark.slow
def test_after_too_many_in_a_row_the_run_stops_with_a_checkpoint_and_every_resume_gets_further(tmp_path) -> None:
    folder, kind = tmp_path / "out", poisons(SafeTrainer, tuple(range(3, 11)))
    stops = []
    for resume in (None, True, True, True):
        trainer = make_trainer(folder, kind=kind)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except FloatingPointError as error:
            stops.append(trainer.state.global_step)
            place = folder / f"checkpoint-{trainer.state.global_step}"
            assert "3 steps in a row had a NaN or infinite gradient and were skipped" in str(error)
            assert (
                f"saved in {place}" in str(error)
                and place.is_dir()
                and "goes on with the next step" in str(error)
                and len(str(error)) <= 400
            )
    assert stops == [5, 8] and trainer.state.global_step == 12 and trainer.skipped_steps.total == 8
    assert all(bool(each.isfinite().all()) for each in weights(trainer))


def test_the_first_one_ends_the_run_if_that_is_asked_for(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out", kind=poisons(SafeTrainer, (1,)))
    trainer.max_skipped_steps = 1
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        trainer.train()
    assert {*saved_steps(tmp_path / "out")} == {1}


class Breaks(TrainerCallback):
    """Makes a weight infinite after a step, as an optimizer may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            with torch.no_grad():
                next(iter(model.parameters())).view(-1)[0] = math.inf


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_weights_that_are_not_finite_are_never_saved_nor_the_end_of_a_run(step: int, tmp_path) -> None:
    # 2 and 4 are saved, 6 is the last step, 3 is seen by the gradient of the next one.
    folder = tmp_path / "out"
    trainer = make_trainer(folder, max_steps=6, save_total_limit=1, callbacks=(Breaks(step),))
    with pytest.raises(FloatingPointError, match="the weights are not finite") as told:
        trainer.train()
    good = {2: set(), 3: {2}, 4: {2}, 6: {4}}[step]
    assert {*saved_steps(folder)} == good
    said = f"the last good checkpoint is {folder / f'checkpoint-{max(good)}'}" if good else "no checkpoint yet"
    assert said in str(told.value) and "embed_tokens" in str(told.value) and len(str(told.value)) <= 400
    again = make_trainer(folder, max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert all(bool(each.isfinite().all()) for each in weights(again))


def test_while_steps_are_skipped_no_older_checkpoint_is_deleted(tmp_path) -> None:
    # After step 2 the weights are ruined: still finite, but no gradient is.
    trainer = make_trainer(tmp_path / "out", kind=poisons(SafeTrainer, (3, 4, 5)), save_steps=1, save_total_limit=1)
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        trainer.train()
    assert {*saved_steps(tmp_path / "out")} == {2, 3, 4, 5}


class Spoils(TrainerCallback):
    """Makes something infinite at the end of a step, or of the run."""

    def __init__(self, what: str, at_the_end: bool = False) -> None:
        self.what, self.at_the_end = what, at_the_end

    def spoil(self, model: Any, optimizer: Any) -> None:
        parameter = model.model.norm.weight
        tensor = {
            "weights": parameter,
            "buffers": model.seen,
            "states of the optimizer": next(iter(optimizer.state.values()), {}).get("exp_avg_sq", parameter),
        }[self.what]
        with torch.no_grad():
            tensor.view(-1)[0] = math.inf

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3 and not self.at_the_end:
            self.spoil(more["model"], more["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.at_the_end:
            self.spoil(more["model"], more["optimizer"])


@pytest.mark.parametrize("what", ["weights", "buffers", "states of the optimizer"])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_nothing_that_is_not_finite_is_saved_as_good(what: str, at_the_end: bool, tmp_path) -> None:
    trainer = make_trainer(tmp_path / "out", max_steps=4, callbacks=(Spoils(what, at_the_end),))
    trainer.model.model.norm.weight.requires_grad_(what != "weights")  # a frozen one
    trainer.model.register_buffer("seen", torch.ones(3))
    trainer.model.register_buffer("mask", torch.full((2,), -math.inf))  # as it should be
    with pytest.raises(FloatingPointError, match=f"the {what} are not finite (after|before) step"):
        trainer.train()
    assert {*saved_steps(tmp_path / "out")} == ({2, 4} if at_the_end else {2})


@pytest.mark.slow
def test_a_tree_trainer_skips_too_and_logs_the_mean_of_the_other_steps(tmp_path) -> None:
    trainer = make_tree_trainer(tmp_path / "out", kind_of=lambda kind: poisons(kind, (5,)), max_steps=7)
    trainer.train()
    logs = [json.loads(json.dumps(record)) for record in trainer.state.log_history if "loss" in record]
    assert [record.get("skipped_steps") for record in logs] == [None, 1]
    assert all(math.isfinite(record["loss"]) for record in logs)


def test_the_limit_is_an_argument_of_tree_runs(tmp_path) -> None:
    with pytest.raises(ValueError, match="max_skipped_steps is 0; give a whole number from 1"):
        make_tree_trainer(tmp_path / "out", max_skipped_steps=0)
    assert make_tree_trainer(tmp_path / "out", max_skipped_steps=7).max_skipped_steps == 7


def test_checkpoints_of_finite_weights_are_all_that_is_left_after_a_run_that_fails(tmp_path) -> None:
    folder = Path(tmp_path / "out")
    with pytest.raises(FloatingPointError):
        make_trainer(folder, save_total_limit=1, callbacks=(Breaks(7),)).train()
    from safetensors.torch import load_file

    for path in folder.glob("checkpoint-*/model.safetensors"):
        assert all(bool(each.isfinite().all()) for each in load_file(path).values())


def test_a_step_gathers_once_from_the_ranks_since_the_norm_is_the_same_on_all(tmp_path, monkeypatch) -> None:
    gathered: list[object] = []
    monkeypatch.setattr(Ranks, "gather", lambda self, value: gathered.append(value) or [value])
    counts = []
    for steps in (2, 5):
        gathered.clear()
        make_trainer(tmp_path / str(steps), max_steps=steps).train()
        counts.append(len(gathered))
    assert counts[1] - counts[0] == 3
