"""Uses that cannot be exact are refused at the call; those that only the first step finds stop the training."""

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks
from trainer_runs import BUILDERS, adapter, difference, make_scores_wrong, train
from transformers import Trainer, TrainingArguments

import treetrain as tt
from treetrain.trainers import outputs as module
from treetrain.trainers.first_step import rows_to_compare


def settings(tmp_path, **changes: Any) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False, **changes}


def set_on(trainer, patch, name, value):
    setattr(trainer.args, name, value)


def distribute_by_megatron(trainer, patch):
    patch.setattr(type(trainer.accelerator), "distributed_type", SimpleNamespace(value="MEGATRON_LM"))


def compile_by_accelerate(trainer, patch):
    patch.setattr(trainer.accelerator.state.dynamo_plugin, "backend", DynamoBackend.INDUCTOR)


def call_modules_otherwise(trainer, patch):
    patch.setattr(type(trainer.accelerator), "distributed_type", SimpleNamespace(value="FSDP"))
    plugins = {"fsdp_plugin": SimpleNamespace(fsdp_version=2), "dynamo_plugin": trainer.accelerator.state.dynamo_plugin}
    patch.setattr(trainer.accelerator, "state", SimpleNamespace(**plugins))
    patch.setattr(torch.nn.Module, "__call__", lambda self, *args, **kwargs: self.forward(*args, **kwargs))


SETTINGS = {
    "label_smoothing_factor": ("sft", 0.1),
    "neftune_noise_alpha": ("sft", 5.0),
    "use_liger_kernel": ("sft", True),
    "activation_offloading": ("dpo", True),
    "torch_compile": ("plain", True),
    "fp16": ("plain", True),
    "optim": ("plain", "adalomo"),
}


@pytest.mark.parametrize(
    "name, change, message",
    [
        *((name, partial(set_on, name=key, value=value), f"{key}={value}") for key, (name, value) in SETTINGS.items()),
        ("plain", distribute_by_megatron, "distributed_type=MEGATRON_LM"),
        ("plain", compile_by_accelerate, "dynamo_backend: INDUCTOR"),
        ("plain", call_modules_otherwise, "does not call the _call_impl of a module"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_exact_is_refused_by_name_and_nothing_is_changed(name, change, message, tmp_path, monkeypatch):
    trainer = BUILDERS[name](settings(tmp_path), torch.float32, tmp_path)
    change(trainer, monkeypatch)
    before, forward = type(trainer), trainer.model.forward
    with pytest.raises(ValueError, match=message):
        tt.share_prefixes(trainer)
    assert type(trainer) is before and trainer.model.forward == forward


def test_a_head_that_is_cast_is_refused_and_nothing_is_changed(tmp_path):
    trainer = BUILDERS["grpo"](settings(tmp_path, cast_lm_head_to_fp32=True), torch.float32, tmp_path)
    forward = trainer.model.forward
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True"):
        tt.share_prefixes(trainer)
    assert trainer.model.forward == forward


def test_dropout_of_a_model_or_an_adapter_is_refused_with_the_setting(tmp_path):
    with pytest.raises(tt.UnsupportedModel, match=r"dropout 0\.1"):
        tt.share_prefixes(
            Trainer(
                runs.model(attention_dropout=0.1), TrainingArguments(**settings(tmp_path))
            )  # eval mode until it trains
        )
    lora = adapter()
    lora.lora_dropout = 0.05
    from peft import get_peft_model

    model = get_peft_model(runs.model(), lora)
    model.eval()
    with pytest.raises(tt.UnsupportedModel, match=r"lora_dropout.* has dropout 0\.05.*Set it to 0"):
        tt.share_prefixes(Trainer(model, TrainingArguments(**settings(tmp_path))))
    assert not model.training


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    from transformers import Qwen3ForSequenceClassification

    model = runs.model(kind=Qwen3ForSequenceClassification, num_labels=1)
    with pytest.raises(tt.UnsupportedModel, match="loss_type"):
        tt.share_prefixes(Trainer(model, TrainingArguments(**settings(tmp_path))))
    with pytest.raises(TypeError, match="Linear"):
        tt.share_prefixes(nn.Linear(2, 2))


def test_a_tensor_parallel_model_is_refused(tmp_path):
    trainer = Trainer(runs.model(), TrainingArguments(**settings(tmp_path)))
    trainer.model._tp_size = 2
    with pytest.raises(ValueError, match="tensor-parallel model"):
        tt.share_prefixes(trainer)


def test_a_model_that_is_sharded_before_the_call_is_refused(tmp_path):
    trainer = Trainer(runs.model(), TrainingArguments(**settings(tmp_path)))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        fully_shard(trainer.model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="a model that is sharded already; let accelerate shard it"):
            tt.share_prefixes(trainer)
    finally:
        dist.destroy_process_group()
        # It holds the group: a fork in another thread, which clears the main thread's state, would end it for ever.
        torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]


def test_a_model_that_is_made_or_replaced_later_is_refused(tmp_path):
    arguments = TrainingArguments(**settings(tmp_path))
    with pytest.raises(ValueError, match="model_init"):
        tt.share_prefixes(Trainer(None, arguments, model_init=lambda: runs.model()))
    trainer = tt.share_prefixes(BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path))
    trainer.model = trainer.model_wrapped = runs.model()
    with pytest.raises(RuntimeError, match="another model"):
        trainer.train()


def test_a_loss_may_take_gradients_past_the_tree(tmp_path, monkeypatch):
    class Own(runs.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(input_ids=inputs["input_ids"]).logits.square().mean()

    monkeypatch.setattr(runs, "SFTTrainer", Own)
    trainer = tt.share_prefixes(BUILDERS["sft"](settings(tmp_path, max_steps=1), torch.float32, tmp_path))
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(2)])
    trainer.compute_loss(trainer.model, batch).backward()
    assert trainer.model.lm_head.weight.grad.abs().sum() > 0


def test_sharing_twice_is_refused(tmp_path):
    trainer = tt.share_prefixes(BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path))
    with pytest.raises(ValueError, match="already"):
        tt.share_prefixes(trainer)


def test_the_mixin_does_the_same_for_a_subclass(tmp_path, monkeypatch):
    plain = train(BUILDERS["dpo"], tmp_path, shared=False, steps=2)

    class Shared(tt.SharePrefixesMixin, runs.DPOTrainer):
        pass

    monkeypatch.setattr(runs, "DPOTrainer", Shared)
    shared = train(BUILDERS["dpo"], tmp_path, shared=False, steps=2)
    assert any("tree/overlap" in logs for logs in shared.logs)
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5


def drop_a_row(rows):
    masks = [*rows.masks[:-1], rows.masks[-1] & False]
    return rows._replace(masks=masks)


def shift_the_masks(rows):
    import numpy as np

    return rows._replace(masks=[np.roll(mask, 1) for mask in rows.masks])


def swap_two_rows(rows):
    ids, masks = ([xs[1], xs[0], *xs[2:]] for xs in (rows.ids, rows.masks))
    return rows._replace(ids=ids, masks=masks)


@pytest.mark.few(1)
@pytest.mark.parametrize("mutation", [swap_two_rows, drop_a_row, shift_the_masks], ids=lambda f: f.__name__)
def test_the_comparison_of_trainers_sees_a_mutated_adapter(mutation, tmp_path, monkeypatch):
    name = "sft" if mutation is drop_a_row else "dpo"
    plain = train(BUILDERS[name], tmp_path, shared=False, steps=1)
    rows_of = module.rows_of
    monkeypatch.setattr(module, "rows_of", lambda *args, **options: mutation(rows_of(*args, **options)))
    try:
        shared = train(BUILDERS[name], tmp_path, shared=True, steps=1)
    except (tt.DataError, RuntimeError) as error:  # rows of another length than their places, or the first step's check
        assert "differ by" in str(error) or "rows" in str(error)
        return
    found = difference(shared, plain)
    assert max(found.metrics, found.updates) > 1e-3


@pytest.mark.slow
def test_a_model_that_gives_a_tree_something_else_stops_the_first_step(tmp_path, monkeypatch):
    make_scores_wrong(monkeypatch)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02.*check=False"):
        train(BUILDERS["sft"], tmp_path, shared=True, steps=1)
    trainer = BUILDERS["sft"](settings(tmp_path, max_steps=1, save_strategy="no"), torch.float32, tmp_path)
    tt.share_prefixes(trainer, check=False).train()


def test_the_first_step_logs_how_far_it_is_from_the_plain_path(tmp_path):
    logs = train(BUILDERS["dpo"], tmp_path, shared=True, steps=2).logs
    assert 0 < logs[0]["tree/score_difference"] < 1e-6
    assert 0 < logs[0]["tree/gradient_difference"] < 1e-5
    assert logs[0]["tree/overlap"] > 0.4 and logs[0]["tree/ideal_speedup"] > 1.5 and logs[0]["tree/parts"] == 1
    assert logs[1]["tree/measured_speedup"] > 0
    assert "tree/score_difference" not in logs[1]


def test_the_rows_that_are_compared_are_those_that_share_most():
    import numpy as np

    ids = [np.array(row) for row in ([7, 8, 9], [1, 2, 3, 4], [5], [1, 2, 3, 9, 9], [1, 7], [6, 6])]
    masks = [np.ones(len(row) - 1, bool) for row in ids]
    assert sorted(rows_to_compare(ids, masks)) == [1, 3, 4]


@pytest.mark.slow
def test_micro_batches_of_a_step_share_as_one_batch_does(tmp_path):
    overlaps = []
    for settings_ in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        logs = train(BUILDERS["grpo"], tmp_path, shared=True, steps=1, **settings_).logs
        overlaps.append(logs[0]["tree/overlap"])
    assert overlaps[0] == overlaps[1] > 0.3


def test_evaluation_that_wants_logits_gets_them_from_the_model(tmp_path):
    trainer = BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path)
    expected = trainer.predict(trainer.eval_dataset)
    found = tt.share_prefixes(trainer).predict(trainer.eval_dataset)
    assert found.predictions.shape == expected.predictions.shape
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
    loss = trainer.evaluate()["eval_loss"]
    assert loss == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


def test_the_model_answers_other_calls_as_before(tmp_path):
    trainer = BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(3)])
    with torch.no_grad():
        expected = trainer.model(**batch)
        text = trainer.model.generate(batch["input_ids"][:, :8], max_new_tokens=4, do_sample=False)
        tt.share_prefixes(trainer)
        found = trainer.model(**batch)
        assert torch.equal(trainer.model.generate(batch["input_ids"][:, :8], max_new_tokens=4, do_sample=False), text)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)


def test_a_call_that_is_not_understood_is_refused_while_training(tmp_path):
    trainer = tt.share_prefixes(BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path))
    batch = dict(trainer.data_collator([trainer.train_dataset[k] for k in range(3)]))
    with pytest.raises(ValueError, match="called with cache_position"):
        trainer.compute_loss(trainer.model, {**batch, "cache_position": torch.arange(3)})
    trainer.compute_loss(trainer.model, batch)


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_without_shared_prefixes(tmp_path):
    exact = train(BUILDERS["dpo"], tmp_path, shared=False, steps=2)
    plain = train(BUILDERS["dpo"], tmp_path, shared=False, steps=2, bf16=True)
    shared = train(BUILDERS["dpo"], tmp_path, shared=True, steps=2, bf16=True)
    assert not torch.is_autocast_enabled("cpu")
    ours, theirs = difference(shared, exact), difference(plain, exact)
    assert 1e-4 < ours.updates <= 1.5 * theirs.updates
    assert shared.logs[0]["tree/gradient_difference"] > 1e-4


def test_a_trainer_that_is_gone_leaves_no_hook_on_optimizers(tmp_path, monkeypatch):
    hooks = _global_optimizer_pre_hooks
    trainer = BUILDERS["plain"](settings(tmp_path), torch.float32, tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    tt.share_prefixes(trainer)
    before = len(hooks)
    del trainer
    gc.collect()
    assert len(hooks) == before - 1
