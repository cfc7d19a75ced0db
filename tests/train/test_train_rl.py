"""A policy update from a file: rewards become advantages, the run computes the log-probabilities that are missing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import branching_rows, write_rows
from small_runs import records
from transformers import AutoModelForCausalLM

from support import linear
from support.pure import PureFloat64
from support.saved import save_small_model
from treetrain.cli import main
from treetrain.data.advantages import group_advantages
from treetrain.data.load import load
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.models.loading import load_model
from treetrain.train import trainer as trainer_module
from treetrain.train.config import TrainConfig
from treetrain.train.loop import TrainLoop
from treetrain.train.objective import ObjectiveSettings, make_objective
from treetrain.train.references import ReferencePolicy
from treetrain.train.rollouts import Rollouts
from treetrain.train.trainer import Trainer, train
from treetrain.train.updates import Updates
from treetrain.trainers.watch import Watch

SEVERAL: dict[str, Any] = {"updates_per_batch": 2, "minibatches": 2}


RUN_SETTINGS = {"loss": "grpo", "steps": 4, "report": False}
"""Of `make_config`."""


# A whole run against a loop written by hand

CLIP, KL, ENTROPY, LR = 0.02, 0.1, 0.01, 0.05
BY_HAND: dict[str, Any] = {
    **SEVERAL,
    "epochs": 2,
    "steps": None,
    "clip": CLIP,
    "kl": KL,
    "entropy": ENTROPY,
    "lr": LR,
    "schedule": "constant",
    "warmup_steps": 0,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": None,
}


def uneven(folder: Path) -> str:
    """Groups of answers of 3 to 8 tokens; of the last one all rewards are equal."""
    rows = branching_rows()
    for number, row in enumerate(rows):
        keep = len(row["input_ids"]) - number % 6
        row |= {name: row[name][:keep] for name in ("input_ids", "loss_mask")}
        row |= {"reward": 1.0} if row["group_id"] == 5 else {}
    return write_rows(folder / "uneven.jsonl", rows)


@dataclasses.dataclass(frozen=True)
class Step:
    gradient: torch.Tensor
    loss: float
    metrics: dict[str, float]


def by_the_trainer(monkeypatch, config: TrainConfig) -> list[Step]:
    """A run in float64, its gradients beside its records."""
    gradients: list[torch.Tensor] = []
    update = TrainLoop._update

    def spy(self: TrainLoop, loss: float) -> float:
        gradients.append(linear.gradients(self.model))
        return update(self, loss)

    with monkeypatch.context() as patched, PureFloat64():
        patched.setattr(
            "treetrain.train.model.load_model", lambda *args, **kwargs: load_model(*args, **kwargs).double()
        )
        patched.setattr(TrainLoop, "_update", spy)
        train(config)
    return [
        Step(gradient, step["loss"], step) for gradient, step in zip(gradients, records(config.output), strict=True)
    ]


def by_hand(config: TrainConfig) -> list[Step]:
    """The same without trainer and engine: one plain forward per row, autograd, plain gradient descent."""
    trainer = Trainer(config)
    rows = trainer.prepared.rows
    with PureFloat64():
        model = load_model(config.model).double()
        reference = [scored.detach() for scored in linear.score_rows(model, [row.ids for row in rows])[0]]
        steps, old = [], {}
        updates = Updates(config, trainer.prepared.plan, trainer.total_steps)
        for update in updates:
            if (update.number, update.minibatch) == (1, 1):
                ids = [rows[number].ids for number in update.batch_rows]
                old = dict(zip(update.batch_rows.tolist(), [s.detach() for s in linear.score_rows(model, ids)[0]]))
            steps.append(_step_by_hand(model, rows, update.rows.tolist(), old, reference))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
            updates.advance(update, None)
    return steps


def _step_by_hand(model, rows, numbers, old, reference) -> Step:
    members = [
        rows[number].replace(
            old_logprobs=np.append(0.0, old[number].numpy()), ref_logprobs=np.append(0.0, reference[number].numpy())
        )
        for number in numbers
    ]
    model.zero_grad()
    scores = linear.score_rows(model, [row.ids for row in members])
    watched: dict[str, list[torch.Tensor]] = {}

    def per_token(logp, entropy, facts):
        log_ratio, trained = (logp - facts["old_logprobs"]).detach(), facts["weights"] > 0
        advantages, to_reference = facts["advantages"], linear.kl("k3", logp, facts)
        seen = {
            "ratio": log_ratio.exp(),
            "approx_kl": log_ratio.exp() - 1 - log_ratio,
            "clip_fraction_low": (log_ratio.exp() < 1 - CLIP) & (advantages < 0),
            "clip_fraction_high": (log_ratio.exp() > 1 + CLIP) & (advantages > 0),
            "kl": to_reference,
            "entropy": entropy,
            "advantage": advantages,
        }
        for name, values in seen.items():
            watched.setdefault(name, []).append(values.detach().double()[trained])
        return linear.clipped(logp, facts, CLIP, CLIP) + KL * to_reference - ENTROPY * entropy

    loss = linear.batch_loss(scores, members, per_token, "trajectory")
    loss.backward()
    metrics = {name: float(torch.stack([row.mean() for row in values]).mean()) for name, values in watched.items()}
    ratios, advantages = torch.cat(watched["ratio"]), torch.cat(watched["advantage"])
    metrics |= {"ratio_max": float(ratios.max()), "ratio_min": float(ratios.min())}
    metrics |= {"advantage_mean": float(advantages.mean()), "advantage_std": float(advantages.std(correction=0))}
    lengths, silent = [len(row) for row in watched["ratio"]], {row.group for row in members if row.group == 5}
    metrics |= {"response_tokens_mean": float(np.mean(lengths)), "response_tokens_max": max(lengths)}
    metrics |= {"groups": len({row.group for row in members}), "groups_without_signal": len(silent)}
    rewards = [row.reward for row in members]
    metrics |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    return Step(linear.gradients(model), float(loss.detach()), metrics)


@pytest.fixture(scope="module")
def hand(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[Step]]:
    folder = tmp_path_factory.mktemp("hand")
    settings = BY_HAND | {"tokens_per_step": 150, "loss": "grpo", "report": False}
    config = TrainConfig(data=(uneven(folder),), model=model_folder, output=str(folder / "out"), **settings)
    return config, by_hand(config)


@pytest.mark.parametrize("changes", [{}, {"execution": "linear"}, {"budget": 9, "tokens_per_call": 60}], ids=str)
def test_every_step_of_a_run_is_that_of_a_loop_written_by_hand(monkeypatch, hand, tmp_path, changes) -> None:
    config, expected = hand
    made = TrainConfig(**config.as_dict() | {"output": str(tmp_path / "out")} | changes)
    steps = by_the_trainer(monkeypatch, made)
    assert len(steps) == len(expected) > 12
    for step, other in zip(steps, expected, strict=True):
        assert linear.relative_error(step.gradient, other.gradient) <= 1e-12
        assert step.loss == pytest.approx(other.loss, rel=1e-10, abs=1e-12)
        assert {name: step.metrics[name] for name in other.metrics} == pytest.approx(other.metrics, rel=1e-9, abs=1e-12)
    for name in ("clip_fraction_low", "clip_fraction_high", "groups_without_signal", "kl", "approx_kl"):
        assert any(step.metrics[name] > 0 for step in expected), name


def test_records_say_which_update_of_which_batch_a_step_was(make_config) -> None:
    result = train(make_config(**SEVERAL, steps=None, epochs=1))
    found = [(step["step"], step["batch"], step["update"], step["minibatch"]) for step in records(result.output)]
    places = [(batch, update, part) for batch in (1, 2, 3) for update in (1, 2) for part in (1, 2)]
    assert found == [(step, *place) for step, place in enumerate(places, start=1)] and result.steps == 12
    assert ["old_logprobs_seconds" in step for step in records(result.output)] == [True, False, False, False] * 3


def test_a_batch_that_is_updated_once_needs_no_old_log_probabilities(make_config, monkeypatch) -> None:
    monkeypatch.setattr(trainer_module.TrainLoop, "_score_references", lambda self: None)
    result = train(make_config())
    assert all(step["ratio"] == 1 and "old_logprobs_seconds" not in step for step in records(result.output))
    assert all("batch" not in step for step in records(result.output))


# Log-probabilities under the old and the reference policy


def captured(config: TrainConfig, monkeypatch) -> list[list[Trajectory]]:
    """The rows of every step of a run, as its loss sees them."""
    seen: list[list[Trajectory]] = []
    rows = Rollouts.rows

    def spy(self: Rollouts, numbers) -> list[Trajectory]:
        seen.append(rows(self, numbers))
        return seen[-1]

    monkeypatch.setattr(Rollouts, "rows", spy)
    train(config)
    return seen


def difference(rows: list[Trajectory], fact: str, model: torch.nn.Module) -> float:
    """From the plain model's log-probabilities, at trained tokens."""
    largest = 0.0
    with torch.no_grad():
        for row in rows:
            expected = linear.score_row(model, row.ids)[0].numpy()
            largest = max(largest, np.abs((getattr(row, fact)[1:] - expected)[row.weights[1:] > 0]).max())
    return float(largest)


@pytest.mark.parametrize("changes", [{}, {"execution": "linear"}, {"tokens_per_call": 60}], ids=str)
def test_old_and_reference_log_probabilities_are_those_of_the_plain_model(
    make_config, monkeypatch, model_folder, changes
) -> None:
    seen = captured(make_config(**SEVERAL, kl=0.1, steps=6, **changes), monkeypatch)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    # A minibatch of this data is one group, so it is one call.
    first, later = seen[:4], seen[4:]
    assert difference([row for rows in seen for row in rows], "ref_logprobs", plain) < 1e-5
    assert difference([row for rows in first for row in rows], "old_logprobs", plain) < 1e-5
    assert difference([row for rows in later for row in rows], "old_logprobs", plain) > 1e-3


def test_another_model_can_be_the_reference(make_config, monkeypatch, tmp_path) -> None:
    other = save_small_model(tmp_path / "other", vocabulary=64, positions=128)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.add_(0.3 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(other)
    config = make_config(kl=0.1, reference_model=other, steps=3)
    assert any(str(other) in note for note in Trainer(config).prepared.notes)
    seen = captured(config, monkeypatch)
    assert difference([row for rows in seen for row in rows], "ref_logprobs", model) < 1e-5
    assert all(step["kl"] > 1e-3 for step in records(config.output))
    [record] = records(config.output, "reference")
    assert record["trajectories"] == 18 and record["step"] == 0


def test_only_rows_that_the_run_comes_to_are_scored(make_config) -> None:
    train(make_config(kl=0.1, steps=1))
    assert records(make_config().output, "reference")[0]["trajectories"] == 6


def test_a_reference_that_cannot_read_the_rows_is_refused_before_the_first_step(make_config, tmp_path) -> None:
    small = save_small_model(tmp_path / "small", vocabulary=10, positions=128)
    with pytest.raises(DataError, match="vocabulary"):
        train(make_config(kl=0.1, reference_model=small))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def touched(config: TrainConfig) -> tuple[Trainer, torch.nn.Module]:
    """A run's model, its trained weights moved."""
    trainer = Trainer(config)
    model = trainer._load()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer, model


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"lora_rank": 4, "lora_dora": True}], ids=str)
def test_the_reference_of_weights_that_have_moved_is_the_model_without_the_adapter_or_from_its_source(
    make_config, model_folder, monkeypatch, changes
) -> None:
    trainer, model = touched(make_config(kl=0.1, **changes))
    engine, rows = trainer._engine(model), trainer.prepared.rows
    loaded: list[str] = []
    monkeypatch.setattr(
        "treetrain.train.model.load_model", lambda name, **more: loaded.append(name) or load_model(name, **more)
    )
    before = [score.clone() for score in engine.logprobs(rows)]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    policy = ReferencePolicy(trainer.config, model, engine, trainer.world)
    with policy.engine(untouched=False) as reference:
        scores = reference.logprobs(rows)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        expected = [linear.score_row(plain, row.ids)[0] for row in rows]
    assert max(float((one - other).abs().max()) for one, other in zip(scores, expected)) < 1e-5
    assert max(float((one - other).abs().max()) for one, other in zip(before, expected)) > 1e-2
    assert loaded == ([] if changes else [model_folder])
    assert all(torch.equal(one, other) for one, other in zip(before, engine.logprobs(rows)))
    assert trained == [name for name, p in model.named_parameters() if p.requires_grad]


def test_pairs_need_no_recorded_reference_and_start_at_even_odds(make_config, tmp_path) -> None:
    rows = branching_rows(samples=2)
    for number, row in enumerate(rows):
        row |= {"pair": row["group_id"], "chosen": number % 2 == 0}
    settings = {"loss": "dpo", "data": (write_rows(tmp_path / "pairs.jsonl", rows),), "eval_fraction": 0.4}
    result = train(make_config(**settings, eval_every_steps=2))
    first, *_, last = records(result.output)
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5) and last["margin"] > 0
    evaluated = records(result.output, "eval")
    assert evaluated[0]["loss"] == pytest.approx(np.log(2), rel=1e-5) and evaluated[-1]["loss"] != evaluated[0]["loss"]


# What rows have recorded


def with_old(rows: list[Trajectory], value: float = -1.0) -> list[Trajectory]:
    return [row.replace(old_logprobs=np.full(len(row), value), id=f"row {number}") for number, row in enumerate(rows)]


SEVERAL_UPDATES = ObjectiveSettings(several_updates=True)
RECOMPUTE = ObjectiveSettings(several_updates=True, old_logprobs="recompute")


def test_recorded_and_missing_old_log_probabilities_are_not_mixed(data_file) -> None:
    rows = load(data_file).trajectories
    mixed = [*with_old(rows)[:5], *rows[5:]]
    for settings in (SEVERAL_UPDATES, ObjectiveSettings(), ObjectiveSettings(old_logprobs="recorded")):
        with pytest.raises(DataError, match=r"'row 0' has old_logprobs.*has none: 5 of 18 rows.*recompute") as error:
            make_objective("grpo", {}, mixed, settings)
        assert str(rows[5].id) in str(error.value)
    assert make_objective("grpo", {}, mixed, RECOMPUTE).computed == {"old_logprobs"}


def test_recorded_reference_log_probabilities_are_used_all_or_none(data_file) -> None:
    rows = load(data_file).trajectories
    recorded = [row.replace(ref_logprobs=np.full(len(row), -1.0)) for row in rows]
    assert not make_objective("grpo", {"kl": 0.1}, recorded).computed
    assert make_objective("grpo", {"kl": 0.1}, rows).computed == {"ref_logprobs"}
    with pytest.raises(DataError, match=r"has ref_logprobs.*17 of 18.*reference_model"):
        make_objective("grpo", {"kl": 0.1}, [*recorded[:-1], rows[-1]])
    named = make_objective("grpo", {"kl": 0.1}, recorded, ObjectiveSettings(reference_model="tiny"))
    assert named.computed == {"ref_logprobs"}
    assert any("ref_logprobs are not used: the reference policy is tiny" in note for note in named.notes)


def test_rows_without_anything_to_train_need_no_log_probabilities(data_file) -> None:
    rows = load(data_file).trajectories
    idle = rows[0].replace(loss_weights=0.0)
    assert not make_objective("grpo", {}, [idle, *with_old(rows)[1:]], SEVERAL_UPDATES).computed


def test_what_the_sampler_recorded_stays_apart_from_the_old_policy(make_config, tmp_path) -> None:
    rows = branching_rows()
    for row in rows:
        row["rollout_logprobs"] = [-3.0] * len(row["input_ids"])
    data = write_rows(tmp_path / "sampled.jsonl", rows)
    result = train(make_config(data=(data,), **SEVERAL, importance_cap=50.0))
    for step in records(result.output):
        assert step["importance_max"] >= step["importance"] > 0 and step["rollout_kl"] > 0
    first = records(result.output)[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["importance"] != pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("grpo", {"old_logprobs": "recorded"}, DataError, "no row has old_logprobs"),
        ("reinforce", {"old_logprobs": "recompute"}, ValueError, "reads no old"),
        ("sft", {"log_entropy": True}, ValueError, "no policy loss"),
        ("reinforce", {"target_kl": 0.1, "several_updates": True}, ValueError, "measures no KL"),
        ("sft", {"reference_model": "tiny"}, ValueError, "no reference"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(data_file, name, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        make_objective(name, {}, load(data_file).trajectories, ObjectiveSettings(**settings))


def test_a_loss_on_values_is_refused_before_it_asks_for_returns(data_file) -> None:
    with pytest.raises(ValueError, match="ppo, as it is set, needs values, and a run trains no value head"):
        make_objective("ppo", {"value_coefficient": 0.5}, load(data_file).trajectories)


def test_a_loss_without_a_ratio_says_that_later_updates_are_not_corrected(data_file) -> None:
    notes = make_objective("reinforce", {}, load(data_file).trajectories, SEVERAL_UPDATES).notes
    assert any("off-policy" in note for note in notes)


# Advantages


def test_the_baseline_may_leave_out_the_episode_itself_and_advantages_may_be_bounded(data_file) -> None:
    rows = load(data_file).trajectories
    settings = ObjectiveSettings(advantage_leave_one_out=True, advantage_std=False, advantage_clip=0.3)
    made = make_objective("grpo", {}, rows, settings)
    clipped = 0
    for number, row in enumerate(made.rows):
        others = [other.reward for place, other in enumerate(rows) if other.group == row.group and place != number]
        expected = rows[number].reward - np.mean(others)
        clipped += abs(expected) > 0.3
        assert row.advantages == pytest.approx(np.clip(expected, -0.3, 0.3))
    assert 0 < clipped < len(rows)
    with pytest.raises(ValueError, match="leave_one_out"):
        group_advantages(rows, subtract_mean=False, leave_one_out=True)
    with pytest.raises(ValueError, match="clip is -1"):
        group_advantages(rows, clip=-1)
    assert group_advantages([rows[0]], leave_one_out=True)[0].advantages == pytest.approx(0)


# What is watched


def test_extremes_are_those_of_what_counts_over_all_parts_and_a_part_that_is_run_again_changes_nothing() -> None:
    watch, counts = Watch(), torch.tensor([True, False, True])
    for values in ([3.0, 9.0, 1.0], [2.0, -9.0, 4.0], [3.0, 9.0, 1.0]):
        watch.note("ratio", torch.tensor(values), counts, smallest=True)
    watch.note("importance", torch.tensor([7.0]), torch.tensor([True]))
    watch.note("importance", torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert watch.read() == {"ratio_max": 4.0, "ratio_min": 1.0, "importance_max": 7.0}
    watch.begin()
    assert watch.read() == {}


def test_the_entropy_is_recorded_where_it_is_asked_for_and_changes_nothing(make_config, tmp_path) -> None:
    plain = train(make_config(output=str(tmp_path / "plain")))
    watched = train(make_config(log_entropy=True))
    assert all("entropy" not in step for step in records(plain.output))
    assert all(0 < step["entropy"] < np.log(64) for step in records(watched.output))
    assert np.allclose(plain.losses, watched.losses, atol=1e-5)


def test_recorded_reference_log_probabilities_are_watched_without_a_term_in_the_loss(make_config, tmp_path) -> None:
    rows = branching_rows()
    for row in rows:
        row["ref_logprobs"] = [-3.0] * len(row["input_ids"])
    result = train(make_config(data=(write_rows(tmp_path / "ref.jsonl", rows),), steps=1))
    assert records(result.output)[0]["kl"] > 0
    bare = train(make_config(steps=1, output=str(tmp_path / "bare")))
    assert bare.losses == result.losses and "kl" not in records(bare.output)[0]


def test_a_run_leaves_a_batch_whose_policy_went_too_far(make_config) -> None:
    settings = {"steps": None, "epochs": 2, "updates_per_batch": 4, "schedule": "constant", "eval_fraction": 0.2}
    result = train(make_config(**settings, lr=0.05, target_kl=0.02))
    steps = records(result.output)
    left = [step for step in steps if step["steps_left_out"]]
    assert left and all((step["approx_kl"] > 0.02) == (step["update"] < 4) for step in left)
    assert (
        result.steps
        == len(steps)
        == records(result.output, "start")[0]["steps"] - sum(step["steps_left_out"] for step in steps)
    )
    assert steps[-1]["epoch"] == 1 and result.eval_nll[-1][0] == result.steps


def test_the_metrics_of_a_mixture_are_watched_too(make_config) -> None:
    result = train(make_config(**SEVERAL, sft_weight=0.1, target_kl=1e-9))
    for step in records(result.output):
        assert step["ratio_max"] >= step["grpo/ratio"] >= step["ratio_min"]
    assert any(step["steps_left_out"] for step in records(result.output))


def test_a_file_of_rewards_is_all_that_the_command_needs(data_file, model_folder, tmp_path, capsys) -> None:
    arguments = ["--loss", "grpo", "--updates-per-batch", "2", "--minibatches", "2", "--kl", "0.02", "--log-entropy"]
    where = ["--model", model_folder, "--output", str(tmp_path / "out"), "--tokens-per-step", "120", "--no-report"]
    assert main(["train", data_file, *where, *arguments, "--epochs", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["steps"] == 12
    assert "old log-probabilities are computed" in said.err and "reference policy is the weights" in said.err
    wanted = {"ratio", "ratio_max", "approx_kl", "clip_fraction", "kl", "entropy", "advantage_std", "reward_mean"}
    assert all(wanted <= step.keys() for step in records(tmp_path / "out"))
