"""Axolotl's own trainer with and without the plugin, built by Axolotl from a configuration, on a CPU."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
pytest.importorskip("axolotl", reason="axolotl is not installed; it needs an environment of its own: make test-axolotl")

from axolotl.core.builders.causal import HFCausalTrainerBuilder
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from treetrain.trainers.groups import group_batches

PLUGIN = "treetrain.integrations.axolotl.TreePlugin"
SETTINGS = {
    "base_model": "none",
    "model_config_type": "qwen3",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.1,
    "optimizer": "sgd",
    "lr_scheduler": "constant",
    "max_steps": 3,
    "sequence_len": 64,
    "logging_steps": 1,
    "include_tkps": True,
    "val_set_size": 0,
    "num_epochs": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
}


def rows() -> list[dict[str, Any]]:
    """Six prompts with four answers each, in an order that mixes them."""
    draw, found = random.Random(0), []
    for _ in range(6):
        prompt = [draw.randrange(1, 64) for _ in range(12)]
        for _ in range(4):
            answer = [draw.randrange(1, 64) for _ in range(draw.randrange(2, 7))]
            ids = prompt + answer
            found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * 12 + answer})
    draw.shuffle(found)
    return found


def trained(folder: Path, *plugins: str, **changes: Any) -> Any:
    """The trainer that Axolotl builds from a configuration, after three steps."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    words = models.WordLevel({str(i): i for i in range(64)}, unk_token="0")
    settings = DictDefault({**SETTINGS, "plugins": list(plugins), "output_dir": str(folder), **changes})
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.cfg = settings
    for name in plugins:
        manager.register(name)
    builder = HFCausalTrainerBuilder(
        settings, model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0")
    )
    builder.train_dataset, builder.eval_dataset = Dataset.from_list(rows()), None
    trainer = builder.build(3)
    manager.post_trainer_create(settings, trainer)
    if not plugins:
        group_batches(trainer)
    trainer.train()
    return trainer


def test_losses_norms_and_weights_are_axolotls(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    tree = trained(tmp_path, PLUGIN, tree_groups="input_ids", tree_budget=20)
    for ours, theirs in zip(tree.state.log_history[:3], plain.state.log_history[:3], strict=True):
        assert ours["tree/overlap"] > 0.3 and ours["tree/parts"] > 1
        for name in ("loss", "grad_norm", "tokens/trainable"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    for ours, theirs in zip(tree.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_settings_are_part_of_axolotls_configuration_and_packing_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, PLUGIN, tree_groups=None, max_steps=1)
    settings = merge_input_args()[0].model_fields
    assert settings["tree_groups"].default == "input_ids" and settings["tree_budget"].default is None
    with pytest.raises(ValueError, match="sample_packing: true"):
        PluginManager.get_instance().post_trainer_create(DictDefault({"sample_packing": True}), None)
