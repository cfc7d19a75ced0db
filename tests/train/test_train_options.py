"""The trainer's options, each against what it promises, on a model of 20 thousand weights."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import branching_rows, write_rows
from small_runs import records
from transformers import AutoModelForCausalLM

from treetrain.data.advantages import group_advantages
from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.ranks import Ranks
from treetrain.errors import DataError
from treetrain.losses import by_name
from treetrain.models.loading import load_model
from treetrain.train import parallel
from treetrain.train.accumulate import StepSplitter, forward_backward, prepare
from treetrain.train.average import WeightAverage
from treetrain.train.best import Best
from treetrain.train.evaluation import evaluate
from treetrain.train.loop import TrainLoop
from treetrain.train.optim import MuonWithAdamW
from treetrain.train.trainer import Trainer, train

RUN_SETTINGS = {"steps": 3, "report": False}
"""Of `make_config`."""


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Accumulation


@pytest.mark.parametrize("loss", ["sft", "grpo"])
@pytest.mark.parametrize("tokens", [1, 60, 130])
def test_a_step_in_several_calls_is_the_step_in_one(make_config, tmp_path, loss, tokens) -> None:
    settings = {"loss": loss, "tokens_per_step": 240, "steps": 4}
    whole = train(make_config(**settings, output=str(tmp_path / "whole")))
    parts = train(make_config(**settings, output=str(tmp_path / "parts"), tokens_per_call=tokens))
    assert [step["calls"] for step in records(whole)] == [1, 1, 1, 1]
    assert max(step["calls"] for step in records(parts)) == {1: 4, 60: 4, 130: 2}[tokens]
    assert np.allclose(parts.losses, whole.losses, atol=1e-5)
    assert largest_difference(weights(whole.output), weights(parts.output)) < 1e-4
    for one, other in zip(records(whole), records(parts)):
        assert one["flat_tokens"] == other["flat_tokens"] and one["trajectories"] == other["trajectories"]
        means = ("nll",) if loss == "sft" else ("policy_loss", "ratio", "advantage")
        assert [other[name] for name in means] == pytest.approx([one[name] for name in means], abs=1e-5)


@pytest.mark.parametrize("name", ["sft", "ppo", "dpo"])
def test_accumulated_gradients_keep_the_numerics_contract(name) -> None:
    from support import linear
    from support.forests import dress
    from support.models import make_model
    from support.pure import PureFloat64

    rows = dress([[1, 2, 3, 4, 5], [1, 2, 3, 7], [9, 8, 7, 1], [9, 8, 2, 2, 2, 2], [5, 5, 5], [5, 6, 1, 2]], 3)
    rows = [row.replace(pair=number // 2, chosen=number % 2 == 0) for number, row in enumerate(rows)]
    model, loss = make_model("qwen3", dtype=torch.float64), by_name(name)
    with PureFloat64():
        gradients, losses = [], []
        for calls in ([rows], [rows[:2], rows[2:]], [rows[4:], rows[:2], rows[2:4]]):
            model.zero_grad()
            engine = TreeEngine(model)
            losses.append(forward_backward(engine, prepare(engine, calls), loss).loss)
            gradients.append(linear.gradients(model))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    assert all(linear.relative_error(gradient, gradients[0]) <= 1e-12 for gradient in gradients[1:])


def test_the_routers_auxiliary_loss_is_that_of_the_whole_step_in_any_number_of_calls() -> None:
    from support import linear
    from support.families import make_family
    from support.forests import dress

    rows = dress([[1, 2, 3, 4, 5], [1, 2, 3, 7], [9, 8, 7, 1], [9, 8, 2, 2, 2, 2], [5, 5, 5], [5, 6, 1, 2]], 3)
    model = make_family("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    results, gradients = [], []
    for calls in ([rows], [rows[:2], rows[2:]], [rows[4:], rows[:2], rows[2:4]]):
        model.zero_grad()
        engine = TreeEngine(model)
        results.append(forward_backward(engine, prepare(engine, calls), by_name("sft")))
        gradients.append(linear.gradients(model))
    for result, gradient in zip(results[1:], gradients[1:]):
        assert result.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert result.metrics["router_aux_loss"] == pytest.approx(results[0].metrics["router_aux_loss"], rel=1e-5)
        assert linear.relative_error(gradient, gradients[0]) < 1e-5


def test_no_group_is_torn_between_calls(make_config, tmp_path) -> None:
    data = write_rows(tmp_path / "many.jsonl", branching_rows(groups=9))
    prepared = Trainer(make_config(data=(data,), tokens_per_step=400)).prepared
    for tokens in (1, 60, 61, 150, 10_000):
        split = StepSplitter(prepared.plan, tokens)
        for _, numbers in prepared.plan.steps(6):
            calls = split(numbers)
            assert np.sort(np.concatenate(calls)).tolist() == numbers.tolist()
            groups = [{prepared.rows[number].group for number in call.tolist()} for call in calls]
            assert sum(map(len, groups)) == len(set.union(*groups))
            assert all(len(call) == 3 or 20 * len(call) <= tokens for call in calls)


# A second loss on the same rows


def test_cross_entropy_added_to_a_loss_gives_the_sum_of_their_gradients(make_config, tmp_path) -> None:
    alone = {
        name: train(make_config(loss=name, steps=1, output=str(tmp_path / name), optimizer="sgd", max_grad_norm=None))
        for name in ("grpo", "sft")
    }
    both = train(make_config(loss="grpo", sft_weight=0.1, steps=1, optimizer="sgd", max_grad_norm=None))
    assert both.losses[0] == pytest.approx(alone["grpo"].losses[0] + 0.1 * alone["sft"].losses[0], abs=1e-6)
    start, policy, sft, mixed = (
        weights(folder) for folder in (make_config().model, alone["grpo"].output, alone["sft"].output, both.output)
    )
    expected = {name: start[name] + (policy[name] - start[name]) + 0.1 * (sft[name] - start[name]) for name in start}
    decayed = {name: 1e-2 * 0.01 * 0.1 * value.abs().max() for name, value in start.items()}
    assert all(torch.allclose(mixed[name], expected[name], atol=1e-6 + float(decayed[name])) for name in start)
    assert {"grpo/policy_loss", "cross_entropy/nll", "cross_entropy/loss"} <= records(both)[0].keys()


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_cross_entropy_added_to_a_loss_on_preferences_is_that_of_the_chosen_rows(make_config, tmp_path, loss) -> None:
    """Anything else would teach what is to be avoided."""
    rows = [row | {"pair": row["group_id"], "chosen": n % 2 == 0} for n, row in enumerate(branching_rows(samples=2))]
    for row in rows:
        del row["reward"]
        row["ref_logprobs"] = [-2.0] * len(row["input_ids"])
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    prepared = Trainer(make_config(data=(data,), loss=loss, sft_weight=3.0)).prepared
    assert any("chosen rows" in note for note in prepared.notes)
    engine = TreeEngine(load_model(make_config().model))
    found = {}
    for name, members, one in (
        ("mixed", prepared.rows, prepared.loss),
        ("alone", prepared.rows, by_name(loss)),
        ("chosen", [row for row in prepared.rows if row.chosen], by_name("sft")),
    ):
        engine.model.zero_grad()
        value = engine.forward_backward(members, one).loss
        found[name] = value, torch.cat([p.grad.flatten().double() for p in engine.model.parameters()])
    assert found["mixed"][0] == pytest.approx(found["alone"][0] + 3 * found["chosen"][0], rel=1e-5)
    expected = found["alone"][1] + 3 * found["chosen"][1]
    assert float((found["mixed"][1] - expected).norm() / expected.norm()) < 1e-5


def test_a_step_of_kto_without_a_mismatched_row_is_refused_before_the_first_one(make_config, tmp_path) -> None:
    rows = branching_rows(samples=2)
    for number, row in enumerate(rows):
        del row["reward"]
        if number % 2 == 0:
            row["chosen"] = number % 4 == 0
    together = write_rows(tmp_path / "together.jsonl", rows)
    config = make_config(data=(together,), loss="kto", reference_point="mismatched", tokens_per_step=40, minibatches=2)
    assert train(config).steps == 3
    apart = write_rows(tmp_path / "apart.jsonl", [row | {"group_id": number} for number, row in enumerate(rows)])
    for changes in ({"tokens_per_step": 40}, {"tokens_per_step": 10_000, "minibatches": 12}):
        with pytest.raises(DataError, match=r"a step of kto .* would have 2? ?1? ?rows? .*group_id"):
            Trainer(make_config(data=(apart,), loss="kto", reference_point="mismatched", overwrite=True, **changes))


# The average of the weights


def test_the_average_follows_its_formula_and_is_evaluated_and_saved(make_config, tmp_path, monkeypatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    update = WeightAverage.update

    def spy(self: WeightAverage) -> None:
        if not seen:
            seen.append({name: value.clone() for name, value in self.values.items()})
        seen.append({name: p.detach().clone() for name, p in self._parameters.items()})
        update(self)

    monkeypatch.setattr(WeightAverage, "update", spy)
    result = train(make_config(ema_decay=0.6, eval_fraction=0.3, eval_every_steps=2, steps=4))
    assert len(seen) == 5
    expected = seen[0]
    for values in seen[1:]:
        expected = {name: 0.6 * expected[name] + 0.4 * values[name] for name in expected}
    saved = weights(Path(result.output) / "ema")
    assert all(torch.allclose(saved[name], value, atol=1e-6) for name, value in expected.items())
    last = weights(result.output)
    assert all(torch.equal(last[name], value) for name, value in seen[-1].items())
    assert largest_difference(saved, last) > 1e-3
    first, *_, final = records(result, "eval")
    assert first["ema_nll"] == first["nll"] and final["ema_nll"] != final["nll"]
    held = Trainer(make_config(eval_fraction=0.3, output=str(tmp_path / "x"))).prepared.eval_rows
    scores = TreeEngine(load_model(Path(result.output) / "ema")).logprobs(held)
    taken = torch.cat([score[torch.from_numpy(row.weights[1:] > 0)] for row, score in zip(held, scores)])
    assert final["ema_nll"] == pytest.approx(-float(taken.mean()), rel=1e-5)


def test_a_run_without_an_average_leaves_no_stale_one(make_config) -> None:
    result = train(make_config(ema_decay=0.5, steps=1))
    assert (Path(result.output) / "ema" / "config.json").exists()
    train(make_config(steps=1, overwrite=True))
    assert not (Path(result.output) / "ema").exists()


# The best evaluation


def test_the_run_stops_after_evaluations_that_are_no_better_and_the_best_weights_are_saved(
    make_config, tmp_path, monkeypatch
) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    add = Best.add

    def spy(self: Best, step: int, value: float) -> None:
        kept[step] = {name: p.detach().clone() for name, p in self._parameters.items()}
        add(self, step, value)

    monkeypatch.setattr(Best, "add", spy)
    held = write_rows(tmp_path / "held.jsonl", branching_rows(groups=4, seed=9))
    settings = {"eval_data": (held,), "eval_every_steps": 1, "early_stop_patience": 3, "keep_best": True}
    result = train(make_config(**settings, steps=60, lr=0.1, schedule="constant"))
    values = [nll for _, nll in result.eval_nll]
    best = int(np.argmin(values))
    assert result.stopped_early and 0 < best < result.steps < 60
    assert result.best_step == best and len(values) - 1 - best == 3
    saved = weights(result.output)
    assert all(torch.equal(saved[name], value) for name, value in kept[best].items())
    assert records(result, "end")[0]["stopped_early"] and records(result, "end")[0]["best_step"] == best


def test_an_improvement_that_is_too_small_does_not_count() -> None:
    best = Best(torch.nn.Linear(1, 1), patience=2, min_delta=0.1, keep=False)
    for step, value in enumerate([2.0, 1.95, 1.85, 1.8]):
        best.add(step, value)
    assert (best.value, best.step, best.worse) == (1.85, 2, 1)
    best.add(4, float("nan"))
    assert best.exhausted and not best.restore()


def test_without_patience_a_run_never_stops_early(make_config) -> None:
    result = train(make_config(eval_fraction=0.3, eval_every_steps=1, steps=5, lr=0.5, keep_best=True))
    assert result.steps == 5 and not result.stopped_early and result.best_step is not None


def test_the_loss_of_an_evaluation_is_divided_by_the_normaliser_of_all_held_out_rows(make_config) -> None:
    result = train(make_config(eval_fraction=0.4, tokens_per_step=60, steps=1))
    for record in records(result, "eval"):
        assert record["loss"] == pytest.approx(record["nll"], rel=1e-6)


def test_what_is_trained_is_evaluated_with_its_metrics(make_config, tmp_path) -> None:
    result = train(make_config(loss="grpo", entropy=0.1, eval_fraction=0.4, steps=1))
    first = records(result, "eval")[0]
    assert {"nll", "loss", "policy_loss", "entropy", "trained_tokens"} <= first.keys()
    prepared = Trainer(make_config(loss="grpo", entropy=0.1, eval_fraction=0.4, output=str(tmp_path / "x"))).prepared
    engine = TreeEngine(load_model(prepared and make_config().model))
    whole = engine.forward_backward(prepared.eval_rows, prepared.eval_loss)
    assert first["loss"] == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
    assert first["entropy"] == pytest.approx(whole.metrics["entropy"], rel=1e-5)


def test_tokens_count_by_their_weights_in_an_evaluation(make_config, model_folder) -> None:
    rows = [row.replace(loss_weights=np.arange(len(row)) % 3 / 2) for row in Trainer(make_config()).prepared.rows]
    engine = TreeEngine(load_model(model_folder))
    found = evaluate(engine, rows, [np.arange(len(rows))], by_name("sft"))
    scores = torch.cat(engine.logprobs(rows)).double()
    weighted = torch.cat([torch.from_numpy(row.weights[1:]) for row in rows])
    assert found.nll == pytest.approx(float(-(weighted * scores).sum() / weighted.sum()), rel=1e-6)
    assert found.trained_tokens == int((weighted > 0).sum()) and found.loss == pytest.approx(found.nll, rel=1e-6)


def test_an_untrained_token_may_be_impossible_in_an_evaluation() -> None:
    class Scored:
        ranks = Ranks()

        def logprobs(self, rows, **_):
            return [torch.tensor([-torch.inf, -2.0]) for _ in rows]

    row = Trajectory([1, 2, 3], loss_weights=[0, 0, 1])
    found = evaluate(Scored(), [row], [np.arange(1)], by_name("sft"))  # type: ignore[arg-type]
    assert (found.nll, found.loss) == (2.0, 2.0)


def test_how_rewards_become_advantages_is_a_setting(make_config) -> None:
    plain = Trainer(make_config()).prepared.rows
    for settings in ({}, {"advantage_std": False}, {"advantage_mean": False, "advantage_std": False}):
        rows = Trainer(make_config(loss="grpo", **settings)).prepared.rows
        expected = group_advantages(
            plain,
            subtract_mean=settings.get("advantage_mean", True),
            divide_by_std=settings.get("advantage_std", True),
        )
        assert all((row.advantages == other.advantages).all() for row, other in zip(rows, expected, strict=True))


def test_settings_of_advantages_are_refused_where_none_are_made_of_rewards(make_config, tmp_path) -> None:
    rows = [row | {"advantages": [1.0] * len(row["input_ids"])} for row in branching_rows()]
    data = write_rows(tmp_path / "own.jsonl", rows)
    for changes, why in (
        ({"data": (data,), "loss": "grpo"}, "rows have advantages of their own"),
        ({}, "sft has none"),
    ):
        for setting in ({"advantage_std": False}, {"advantage_clip": 1.0}):
            with pytest.raises(ValueError, match=rf"{next(iter(setting))} is .*, but no advantages are made.*{why}"):
                Trainer(make_config(**changes, **setting))


def test_held_out_rows_without_the_facts_are_evaluated_by_likelihood_or_refused(make_config, tmp_path) -> None:
    rows = [{name: value for name, value in row.items() if name != "reward"} for row in branching_rows(groups=2)]
    held = write_rows(tmp_path / "held.jsonl", rows)
    prepared = Trainer(make_config(loss="grpo", eval_data=(held,))).prepared
    assert prepared.eval_loss is None and any("log-likelihood alone" in note for note in prepared.notes)
    result = train(make_config(loss="grpo", eval_data=(held,), keep_best=True, best_metric="nll", steps=1))
    assert "loss" not in records(result, "eval")[0]
    with pytest.raises(DataError, match="best_metric is loss"):
        Trainer(make_config(loss="grpo", eval_data=(held,), keep_best=True, output=str(tmp_path / "x")))


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_a_held_out_loss_without_a_ratio_cannot_tell_the_best_weights(make_config, tmp_path, loss) -> None:
    """Every evaluation would be the same number, so that the weights before the first step would be saved."""
    settings: dict[str, Any] = {"loss": loss, "eval_fraction": 0.4, "eval_every_steps": 1, "lr": 0.05, "steps": 3}
    result = train(make_config(**settings, output=str(tmp_path / "seen")))
    assert len({round(record["loss"], 5) for record in records(result, "eval")}) == 1
    assert any("is a constant" in note for note in Trainer(make_config(**settings)).prepared.notes)
    for follows in ({"keep_best": True}, {"early_stop_patience": 2}, {"keep_best": True, "kl": 0.1, "sft_weight": 1.0}):
        with pytest.raises(DataError, match=r"best_metric is loss, but .* is a constant.*best_metric nll"):
            Trainer(make_config(**settings, **follows))
    assert train(make_config(**settings, keep_best=True, best_metric="nll")).best_step is not None


def test_a_held_out_loss_against_recorded_old_log_probabilities_tells_the_best_weights(make_config, tmp_path) -> None:
    rows = branching_rows()
    for row in rows:
        row["old_logprobs"] = [-2.0] * len(row["input_ids"])
    data = write_rows(tmp_path / "recorded.jsonl", rows)
    settings: dict[str, Any] = {"eval_fraction": 0.4, "eval_every_steps": 1, "keep_best": True, "steps": 2}
    result = train(make_config(loss="grpo", data=(data,), clip_high=float("inf"), **settings))
    assert len({record["loss"] for record in records(result, "eval")}) == 3


# Adapters


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_rslora": True, "lora_alpha": 8.0},
        {"lora_dora": True, "lora_targets": ("q_proj", "down_proj")},
        {"gradient_checkpointing": True, "budget": 25},
        {"dtype": "bfloat16", "loss": "grpo"},
        {"execution": "linear"},
    ],
    ids=str,
)
def test_lora_trains_and_saves_the_adapter_alone(make_config, model_folder, changes) -> None:
    from peft import PeftModel

    given = {"lora_rank": 4, "steps": 6, "lr": 5e-2, "eval_fraction": 0.3} | changes
    result = train(make_config(**given))
    assert result.eval_nll[-1][1] != result.eval_nll[0][1]
    folder = Path(result.output)
    assert {path.name for path in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not (folder / "config.json").exists() and not (folder / "README.md").exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), folder)
    stored = json.loads((folder / "adapter_config.json").read_text())
    assert stored["r"] == 4 and stored["lora_alpha"] == given.get("lora_alpha", 4) and stored["lora_dropout"] == 0
    assert stored["use_rslora"] == ("lora_rslora" in changes) and stored["use_dora"] == ("lora_dora" in changes)
    assert stored["base_model_name_or_path"] == model_folder
    held = Trainer(make_config(**given, overwrite=True)).prepared.eval_rows
    scores = TreeEngine(model.eval()).logprobs(held)
    taken = torch.cat([score[torch.from_numpy(row.weights[1:] > 0)] for row, score in zip(held, scores)])
    loose = 3e-2 if changes.get("dtype") else 1e-5
    assert result.eval_nll[-1][1] == pytest.approx(-float(taken.mean()), rel=loose)


def test_lora_as_a_tree_and_linearly_take_the_same_steps(make_config, tmp_path) -> None:
    runs = {
        execution: train(make_config(lora_rank=3, execution=execution, output=str(tmp_path / execution), steps=6))
        for execution in ("tree", "linear")
    }
    assert np.allclose(runs["tree"].losses, runs["linear"].losses, atol=1e-5)


def test_only_the_adapter_is_in_the_optimiser_and_in_the_average(make_config, tmp_path) -> None:
    trainer = Trainer(make_config(lora_rank=2, ema_decay=0.5))
    model = trainer._load()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    result = trainer.run()
    assert (Path(result.output) / "ema" / "adapter_config.json").exists()


def test_an_adapter_of_a_preset_says_which(make_config) -> None:
    result = train(make_config(model="tiny", lora_rank=2, steps=1))
    stored = json.loads((Path(result.output) / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == "tiny"


def test_a_target_that_does_not_exist_is_named_with_those_that_do(make_config, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"lora_targets names 'query'.*q_proj"):
        train(make_config(lora_rank=2, lora_targets=("q_proj", "query")))
    assert not list((tmp_path / "out").glob("*.jsonl"))


# Optimisers


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
def test_every_optimiser_learns_and_takes_the_same_steps_as_tree_and_linearly(make_config, tmp_path, optimizer) -> None:
    lr = {"sgd": 0.3, "adafactor": 3e-2, "muon": 1e-2}[optimizer]
    settings = {"optimizer": optimizer, "lr": lr, "steps": 12, "tokens_per_step": 400}
    runs = {
        execution: train(make_config(**settings, execution=execution, output=str(tmp_path / execution)))
        for execution in ("tree", "linear")
    }
    assert runs["tree"].losses[-1] < runs["tree"].losses[0] - 0.3
    assert np.allclose(runs["tree"].losses, runs["linear"].losses, atol=1e-3)


def test_muon_takes_hidden_matrices_and_adamw_the_rest(make_config) -> None:
    trainer = Trainer(make_config(optimizer="muon", momentum=0.8, weight_decay=0.2))
    model = trainer._load()
    from treetrain.train.optim import make_optimizer

    optimizer = make_optimizer(model, trainer.config)
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = ({names[id(p)] for g in member.param_groups for p in g["params"]} for member in optimizer.members)
    assert muon and all("_proj" in name for name in muon)
    assert any("embed" in name for name in adamw) and any("norm" in name for name in adamw)
    assert muon | adamw == set(names.values()) and not muon & adamw
    assert optimizer.members[0].param_groups[0]["momentum"] == 0.8
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2, 0.0}


def test_what_an_optimiser_or_an_adapter_needs_is_asked_for_before_the_model_is_loaded(
    make_config, monkeypatch, tmp_path
) -> None:
    if "bitsandbytes" not in sys.modules:
        with pytest.raises(ValueError, match="pip install bitsandbytes"):
            Trainer(make_config(optimizer="adamw8bit"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install peft"):
        Trainer(make_config(lora_rank=2))
    monkeypatch.undo()
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"pip install 'torch>=2.9'"):
        Trainer(make_config(optimizer="muon"))
    assert not (tmp_path / "out").exists()


# Times


def test_the_times_of_a_step_add_up(make_config) -> None:
    result = train(make_config(steps=5, eval_fraction=0.3, eval_every_steps=2))
    steps = records(result)
    for step in steps:
        assert step["seconds"] == pytest.approx(step["forward_backward_seconds"] + step["optimizer_seconds"])
        assert step["optimizer_seconds"] > 0 and step["other_seconds"] > 0
    assert sum(step["other_seconds"] for step in steps) == pytest.approx(result.other_seconds)
    assert sum(step["seconds"] for step in steps) == pytest.approx(result.seconds)


def test_what_is_between_the_steps_counts_and_evaluations_do_not(make_config, monkeypatch) -> None:
    record = TrainLoop._record
    monkeypatch.setattr(TrainLoop, "_evaluate", lambda self: time.sleep(0.5))
    monkeypatch.setattr(TrainLoop, "_record", lambda *args, **kwargs: (record(*args, **kwargs), time.sleep(0.1)))
    result = train(make_config(steps=3, eval_fraction=0.3, eval_every_steps=1))
    first, *rest = [step["other_seconds"] for step in records(result)]
    assert first < 0.1 and all(0.1 <= seconds < 0.5 for seconds in rest)


@pytest.mark.parametrize("optimizer", parallel.WHOLE_WEIGHTS)
def test_optimisers_that_need_whole_weights_are_refused_for_shards(make_config, optimizer):
    config = make_config(parallel="fsdp", optimizer=optimizer)
    with pytest.raises(ValueError, match=f"optimizer is {optimizer}, whose arithmetic does not know weights"):
        parallel._check_settings(config, parallel.World(ranks=Ranks(), device=torch.device("cpu")))
