"""Unsupported uses of `TreeTrainer` are refused by name before the first step."""

import pytest
import torch

from support.tree_runs import branching_rows, make_arguments, run, small_model
from treetrain import losses
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.engine import TreeEngine
from treetrain.trainers.first_step import compare_rows
from treetrain.trainers.tree_trainer import TreeTrainer


def partly(fact: str):
    rows = branching_rows()
    return [rows[0].replace(**{fact: [0.0] * len(rows[0])}), *rows[1:]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is 4, .* set tokens_per_step"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, .* loss_kwargs"),
        ({"fp16": True}, "fp16 is True, .* set bf16"),
        ({"torch_compile": True}, "torch_compile is True, .* compiled model"),
        ({"execution": "trees"}, "execution is 'trees'; allowed are 'tree' and 'linear'"),
        ({"execution": "linear", "budget": "1GiB"}, "linear execution packs tokens: give a number of tokens"),
        ({"budget": "many"}, "budget"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; give a whole number from 1"),
        ({"target_kl": 0.1}, "needs updates_per_batch or minibatches above 1"),
        ({"loss_kwargs": "clip"}, "loss_kwargs is 'clip'; give a JSON object"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_arguments(**settings)


@pytest.mark.parametrize(
    ("rows", "settings", "options", "error", "message"),
    [
        (branching_rows, {"loss": "grpo_plus"}, {}, ValueError, "unknown loss 'grpo_plus'"),
        (branching_rows, {"loss_kwargs": {"clip": 0.2}}, {}, ValueError, "loss 'sft' has no option 'clip'"),
        (branching_rows, {"loss": "grpo"}, {"loss": losses.sft()}, ValueError, "a loss is given"),
        (branching_rows, {}, {"loss": losses.value()}, ValueError, "no value head"),
        (branching_rows, {"target_kl": 1.0, "minibatches": 2}, {}, ValueError, "measures no KL"),
        (branching_rows, {"advantage_kwargs": {"eps": 1.0}}, {}, ValueError, "no advantages are made of rewards"),
        (branching_rows, {"loss": "distill"}, {}, DataError, "has no teacher_logprobs"),
        (branching_rows, {"loss": "dpo"}, {}, DataError, "pair"),
        (lambda: partly("old_logprobs"), {"loss": "ppo"}, {}, DataError, "would mix two policies"),
        (
            lambda: [
                row if n == 5 else row.replace(rollout_logprobs=[-1] * 20) for n, row in enumerate(branching_rows())
            ],
            {"loss": "ppo", "loss_kwargs": {"importance_cap": 2.0}},
            {},
            DataError,
            r"trajectory number 5 \(from 0\) has no rollout_logprobs, which the loss needs; give rollout_logprobs=",
        ),
        (lambda: partly("ref_logprobs"), {"loss": "ppo", "loss_kwargs": {"kl": 0.1}}, {}, DataError, "mix two"),
        (branching_rows, {"minibatches": 7}, {}, ValueError, "lower minibatches"),
    ],
)
def test_rows_and_losses_that_cannot_be_trained_are_refused(rows, settings, options, error, message) -> None:
    with pytest.raises(error, match=message):
        run(small_model(), rows(), options=options, max_steps=1, **settings)


def test_sft_trains_no_rejected_row_and_says_once_that_it_does_not_read_rewards(caplog) -> None:
    rows = [row.replace(reward=1.0) for row in branching_rows()]
    pair = [rows[0].replace(pair="p", chosen=True), rows[1].replace(pair="p", chosen=False)]
    for wrong in (pair, [rows[0], rows[1].replace(chosen=False)]):
        with pytest.raises(DataError, match=r"train_dataset: .*is rejected .*1 of 2 .*--loss dpo.*--where chosen=True"):
            TreeTrainer(small_model(), make_arguments(), wrong)
    with pytest.raises(DataError, match=r"eval_dataset: .*is rejected"):
        TreeTrainer(small_model(), make_arguments(), rows, pair)
    context = rows[1].replace(chosen=False, loss_weights=0.0)
    TreeTrainer(small_model(), make_arguments(), [rows[0].replace(pair="p", chosen=True), context])
    TreeTrainer(small_model(), make_arguments(loss="dpo"), [row.replace(ref_logprobs=[0.0] * len(row)) for row in pair])
    assert "rewards" not in caplog.text
    TreeTrainer(small_model(), make_arguments(), worse := [rows[0], rows[1].replace(reward=-1.0)], worse)
    assert caplog.text.count("rewards from -1 to 1, and the loss sft does not read them") == 1


def test_a_reference_model_that_nothing_asks_for_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference policy"):
        TreeTrainer(small_model(), make_arguments(), branching_rows(), ref_model=small_model())


def test_plain_training_arguments_are_refused() -> None:
    from transformers import TrainingArguments

    with pytest.raises(ValueError, match="give TreeArguments"):
        TreeTrainer(small_model(), TrainingArguments(use_cpu=True), branching_rows())


def test_dropout_is_refused_when_training_begins() -> None:
    model = small_model()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(UnsupportedModel, match="dropout"):
        run(model, branching_rows(), max_steps=1)


def test_weights_that_are_no_numbers_end_the_run_before_the_update() -> None:
    model = small_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with pytest.raises(FloatingPointError, match=r"not finite before step 1 \(model\.norm\.weight\)"):
        run(model, branching_rows(), max_steps=1)
    assert torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


def test_the_comparison_of_the_first_step_names_weights_that_are_no_numbers() -> None:
    model = small_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"differ by nan .* plain model are not finite: model\.norm\.weight is not"):
        compare_rows(TreeEngine(model), branching_rows())
