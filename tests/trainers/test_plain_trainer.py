"""Seams of a plain `transformers.Trainer`: autocast around its model, labels that are shifted, gradients by hand."""

from typing import Any

import pytest
import torch
import trainer_runs as runs
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_runs import BUILDERS, difference, train

import treetrain as tt
from treetrain.trainers.share_prefixes import SharesPrefixes


def plain_trainer(folder: Any, **settings: Any) -> Any:
    settings = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False, **settings}
    return BUILDERS["plain"](settings, torch.float32, folder)


def test_a_plain_trainer_trains_in_bfloat16(tmp_path):
    exact, plain, shared = (
        train(BUILDERS["plain"], tmp_path, steps=2, bf16=bf16, shared=share)
        for bf16, share in ((False, False), (True, False), (True, True))
    )
    assert 1e-4 < difference(shared, exact).updates <= 1.5 * difference(plain, exact).updates


def test_an_output_has_no_attributes_that_no_output_has(tmp_path):
    trainer = tt.share_prefixes(plain_trainer(tmp_path))
    batch = dict(trainer.data_collator([trainer.train_dataset[k] for k in range(2)]))
    seen = []
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: seen.append(outputs)
    trainer.compute_loss(trainer.model, batch)
    assert not hasattr(seen[0], "dtype") and not hasattr(seen[0], "shape")
    for name in ("logits", "hidden_states", "past_key_values", "to_tuple"):
        with pytest.raises(RuntimeError, match=rf"reads \.{name}"):
            getattr(seen[0], name)


# ---- labels that are shifted


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


class GivesShiftedLabels:
    """A collator whose ``shift_labels`` say what is trained; ``labels`` say another thing."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
        batch = dict(self.collator(rows))
        labels = batch["labels"].clone()
        labels[:, ::3] = -100
        return {**batch, "shift_labels": shifted(labels)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_shift_labels_say_what_is_trained_as_they_do_for_the_plain_model(accumulation, tmp_path, monkeypatch):
    build = BUILDERS["plain"]

    def built(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.data_collator = GivesShiftedLabels(trainer.data_collator)
        trainer._signature_columns = None
        return trainer

    settings = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    shared, plain = (train(built, tmp_path, shared=share, steps=2, **settings) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found


def test_shift_labels_that_are_other_tokens_are_refused(tmp_path):
    trainer = tt.share_prefixes(plain_trainer(tmp_path))
    batch = dict(trainer.data_collator([trainer.train_dataset[k] for k in range(2)]))
    with pytest.raises(tt.DataError, match="row 0 of the batch has label"):
        trainer.compute_loss(trainer.model, batch | {"shift_labels": shifted(shifted(batch["labels"]))})
    beyond = shifted(batch["labels"])
    beyond[0, -1] = 7
    with pytest.raises(tt.DataError, match="last column of shift_labels"):
        trainer.compute_loss(trainer.model, batch | {"shift_labels": beyond})


def test_the_head_of_trl_gives_shift_labels_a_column_for_the_last_token(tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = BUILDERS["sft"](settings, torch.float32, tmp_path)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    labels = torch.tensor([[-100, 7, 8, -100], [6, -100, -100, -100]])
    call = {"input_ids": ids, "attention_mask": (ids != 0).long(), "shift_labels": labels, "fused_lm_head": True}
    expected = trainer.model(**call)
    found = tt.share_prefixes(trainer).model(**call)
    assert found.log_probs.shape == (2, 4)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.label_mask, expected.label_mask)


# ---- gradients by hand


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_gradients_that_are_asked_for_by_hand_are_refused_in_words(kind, tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = tt.share_prefixes(BUILDERS[kind](settings, torch.float32, tmp_path))
    rows = [{k: trainer.train_dataset[n][k] for k in ("input_ids", "labels")} for n in range(4)]
    parameters = list(trainer.model.parameters())
    for ask in (
        lambda loss: torch.autograd.grad(loss, parameters, allow_unused=True),
        lambda loss: torch.autograd.grad(loss, parameters[-1:], allow_unused=True),
        lambda loss: loss.backward(inputs=parameters),
    ):
        loss = trainer.compute_loss(trainer.model, dict(trainer.data_collator(rows)))
        with pytest.raises(RuntimeError, match=r"call loss\.backward\(\) and read \.grad"):
            ask(loss)
    trainer.compute_loss(trainer.model, dict(trainer.data_collator(rows))).backward()
    assert all(bool(p.grad.any()) for p in parameters)


# ---- other calls


def test_a_peft_model_without_a_task_takes_arguments_by_position(tmp_path):
    class ByPosition(runs.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            rest = {"labels": inputs["labels"], "num_items_in_batch": num_items_in_batch}
            return model(inputs["input_ids"], inputs["attention_mask"], **rest).loss

    def build(*args: Any) -> Any:
        plain = BUILDERS["plain"](*args)
        model = get_peft_model(runs.model(), LoraConfig(r=4, target_modules=["q_proj"]))
        return ByPosition(model, plain.args, plain.data_collator, plain.train_dataset)

    found = difference(*(train(build, tmp_path, shared=share, steps=2) for share in (True, False)))
    assert max(found.metrics, found.weights) <= 1e-5, found


def test_a_mask_that_says_which_token_sees_which_is_refused_by_its_shape(tmp_path):
    trainer = tt.share_prefixes(plain_trainer(tmp_path))
    batch = dict(trainer.data_collator([trainer.train_dataset[k] for k in range(2)]))
    rows, length = batch["input_ids"].shape
    mask = torch.ones(length, length).tril().bool().expand(rows, 1, length, length)
    for call in (trainer.compute_loss, tt.token_logprobs):
        with pytest.raises(tt.DataError, match=rf"attention_mask .*\({rows}, 1, {length}, {length}\).*position_ids"):
            call(trainer.model, batch | {"attention_mask": mask})


def test_an_evaluation_of_ones_own_may_read_logits(tmp_path, monkeypatch):
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    class Own(runs.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
            seen[isinstance(self, SharesPrefixes)] += [outputs.logits, outputs[1], loss]
            return loss, None, None

    monkeypatch.setattr(runs, "Trainer", Own)
    for share in (True, False):
        train(BUILDERS["plain"], tmp_path, shared=share, steps=1, evaluate=True)
    for ours, theirs in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [None, 20])
def test_activations_that_a_hook_takes_into_the_loss_are_refused_in_words(tmp_path, monkeypatch, budget):
    class Penalised(runs.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            taken: list[torch.Tensor] = []
            handle = self.model.model.layers[1].mlp.register_forward_hook(lambda _m, _a, out: taken.append(out))
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            handle.remove()
            return loss + 0.1 * sum(x.square().mean() for x in taken)

    monkeypatch.setattr(runs, "Trainer", Penalised)
    if budget is not None:
        with pytest.raises(tt.UnsupportedModel, match=r"hook <lambda> on model.layers.1.mlp .* part of the loss"):
            train(BUILDERS["plain"], tmp_path, shared=True, steps=1, budget=budget)
        return
    with pytest.raises(RuntimeError) as caught:
        train(BUILDERS["plain"], tmp_path, shared=True, steps=1)
    assert "forward hook keeps activations for a penalty" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="forward hook that keeps activations for a penalty"):
        train(BUILDERS["plain"], tmp_path, shared=True, steps=1, check=False)
