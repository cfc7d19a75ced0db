"""`TreeTrainer` on rows of several adapters: each learns from its own rows, and a resumed run goes on exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safe_runs import Averages, StopAt, differences, outcome
from test_tree_trainer import row_logprobs

import treetrain as tt
from support.tree_runs import branching_rows, error, make_arguments, pure, run, small_model, steps, weights
from treetrain.core.errors import DataError
from treetrain.trainers.groups import StepSampler
from treetrain.trainers.tree_trainer import TreeTrainer

NAMES = ("default", "other")


def rows_of_two():
    """Rows of one adapter, of the other, and of none, which is the active one; those of a group begin alike."""
    names = (None, "other", "default", "other")
    return [row.replace(key=names[number % 4]) for number, row in enumerate(branching_rows())]


def adapter_of(row: Any) -> str:
    return row.key or "default"


def adapted(dtype: torch.dtype = torch.float64) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    torch.manual_seed(7)
    model: Any = get_peft_model(small_model(dtype), config)
    model.add_adapter("other", config)
    model.to(dtype)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.3)
    return model


def test_each_adapter_learns_from_its_own_rows_as_in_a_plain_loop():
    trainer = run(adapted(), rows_of_two(), max_steps=7, loss="reinforce", save_strategy="no")
    rows, model, found = rows_of_two(), adapted(), []
    model.set_requires_grad(list(NAMES), True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    sampler, epoch = StepSampler(rows, seed=3, tokens_per_step=120), 0
    with pure(torch.float64):
        while len(found) < 7:
            sampler.set_epoch(epoch)
            epoch += 1
            for (call,) in list(sampler)[: 7 - len(found)]:
                members = [rows[n] for n in call.rows.tolist()]
                total = torch.zeros((), dtype=torch.float64)
                for row in members:
                    rewards = np.array([other.reward for other in rows if other.group == row.group])
                    advantage = (row.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                    model.set_adapter(adapter_of(row))
                    weight = torch.as_tensor(row.weights[1:])
                    total = total - advantage * (row_logprobs(model, row) * weight).sum()
                model.set_requires_grad(list(NAMES), True)
                loss = total / sum(row.weights[1:].sum() for row in members)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 - len(found) / 7)
                optimizer.step()
                optimizer.zero_grad()
                found.append((float(loss), float(norm)))
    assert error([[step["loss"], step["grad_norm"]] for step in steps(trainer)], found) < 1e-10
    mine, theirs = weights(trainer.model), weights(model)
    assert {name for adapter in NAMES for name in mine if f".{adapter}." in name} == set(mine) == set(theirs)
    assert max(error(mine[name], theirs[name]) for name in mine) < 1e-10
    assert trainer.model.active_adapters == ["default"]


def test_old_policies_are_scored_and_rows_evaluated_through_the_adapter_of_each_row():
    rows, model = rows_of_two(), adapted()
    with pure(torch.float64), torch.no_grad():
        truth = []
        for row in rows:
            model.set_adapter(adapter_of(row))
            truth.append(row_logprobs(model, row) * torch.as_tensor(row.weights[1:]))
        with model.disable_adapter():
            base = [row_logprobs(model, row) * torch.as_tensor(row.weights[1:]) for row in rows]
    settings = {"loss": "grpo", "loss_kwargs": {"kl": 0.1}, "updates_per_batch": 2, "max_steps": 2}
    trainer = run(adapted(), rows, **settings, tokens_per_step=10**6)
    for fact, right in (("old_logprobs", truth), ("ref_logprobs", base)):
        scores = trainer._batch.scores[fact]
        assert set(scores) == set(range(len(rows)))
        for number, one in scores.items():
            np.testing.assert_allclose(one, right[number], rtol=0, atol=1e-12)
    fresh = TreeTrainer(adapted(), make_arguments(), rows[:1])  # a row without a name: nothing names adapters
    for held_out, trainer in ((rows, fresh), (rows, TreeTrainer(adapted(), make_arguments(), rows))):
        with pure(torch.float64):
            found = trainer.evaluate(held_out)["eval_nll"]
        tokens = sum(row.weights.sum() for row in rows)
        assert found == pytest.approx(-float(sum(x.sum() for x in truth)) / tokens, rel=1e-10)


def trainer_of(folder: Path, *callbacks: Any, **settings: Any) -> TreeTrainer:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "logging_steps": 3, **settings}
    settings |= {"loss": "grpo", "loss_kwargs": {"kl": 0.1}, "updates_per_batch": 2, "minibatches": 2}
    args, rows = make_arguments(folder, **settings), rows_of_two()
    more: Any = {"ref_model": small_model(seed=2), "callbacks": [Averages(), *callbacks]}
    return TreeTrainer(adapted(torch.float32), args, rows, rows[:6], **more)


def test_an_interrupted_run_of_two_adapters_ends_as_the_other(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    with pytest.raises(SystemExit):
        trainer_of(tmp_path / "parts", StopAt(3)).train()
    resumed = trainer_of(tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    assert differences(outcome(whole), outcome(resumed)) == []
    assert {name.split(".")[-2] for name, p in resumed.model.named_parameters() if p.requires_grad} == set(NAMES)
    assert len(resumed.optimizer.state) == sum(p.requires_grad for p in resumed.model.parameters())


def test_the_best_weights_of_all_adapters_come_back(tmp_path):
    trainer = trainer_of(
        tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, metric_for_best_model="nll",
        learning_rate=0.5, save_total_limit=2,
    )  # fmt: skip
    trainer.train()
    best, end = trainer.state.best_model_checkpoint, trainer.state.global_step
    assert best is not None and not best.endswith(f"-{end}")  # the last weights are not the best
    assert trainer.evaluate()["eval_nll"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


def test_a_row_without_a_key_shares_and_counts_with_those_that_name_the_active_adapter():
    row = tt.Trajectory([5, 6, 7, 8])
    rows = [row, row.replace(key="default"), row.replace(key="other"), row.replace(key="default")]
    trainer = run(adapted(), rows, max_steps=1, loss="sft", save_strategy="no", count="once")
    assert [int(one.weights.sum()) for one in trainer.train_dataset] == [3, 0, 3, 0]
    assert steps(trainer)[0]["tree/unique_tokens"] == 8
    assert trainer._held_out(rows)[0][1].weights.sum() == 0
    model, scores = adapted(), []
    with pure(torch.float64), torch.no_grad():
        for name in NAMES:
            model.set_adapter(name)
            scores.append(row_logprobs(model, row))
    assert steps(trainer)[0]["loss"] == pytest.approx(-float(torch.cat(scores).mean()), rel=1e-10)
    rows = [tt.Trajectory([5, 6, 7, 8]), tt.Trajectory([5, 6, 7, 9], key="default")]
    engine = tt.TreeEngine(adapted())
    assert engine.forward_backward(rows, tt.losses.sft(), adapter_names=["default"] * 2).unique_tokens == 5
    assert engine.score([[5, 6, 7, 8], rows[1]], adapter_names=["default"] * 2).unique_tokens == 5
    opaque = [row.replace(key="default"), row]  # of a model with one adapter: `key` is anything
    trainer = run(small_model(torch.float64), opaque, max_steps=1, loss="sft", save_strategy="no", count="once")
    assert [int(one.weights.sum()) for one in trainer.train_dataset] == [3, 3]


def test_what_names_no_adapter_is_an_error_that_names_the_row():
    rows, args = rows_of_two(), make_arguments()
    wrong = [*rows[:2], rows[2].replace(key="third", id="r2")]
    with pytest.raises(DataError, match=r"trajectory 'r2' has key='third', .*several adapters.*known: default, other"):
        TreeTrainer(adapted(), args, wrong)
    with pytest.raises(DataError, match="key='third'"):
        TreeTrainer(adapted(), args, rows, wrong)
    with pytest.raises(ValueError, match="row 1 has the adapter '__base__', whose weights are all frozen"):
        TreeTrainer(adapted(), args, [rows[0], rows[1].replace(key="__base__")])
    model = adapted()
    own = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="rows train the adapter 'other', of which the optimizer lacks weights"):
        TreeTrainer(model, args, rows, optimizers=(own, None))
    model = adapted()
    model.base_model.set_adapter(list(NAMES))
    with pytest.raises(DataError, match=r"has key=None, .*several adapters"):
        TreeTrainer(model, args, rows)
    alone = TreeTrainer(adapted(), args, [row.replace(key=None) for row in rows])  # none is named: as one adapter
    assert {name.split(".")[-2] for name, p in alone.model.named_parameters() if p.requires_grad} == {"default"}
