"""Trainings by Axolotl's own builder on a CPU; as a script, on every process of torchrun.

Run: torchrun --nproc-per-node 2 tests/integrations/axolotl_runs.py FOLDER SETTINGS

SETTINGS is JSON and may name the plugin. Process 0 writes what it logged and the weights to FOLDER/outcome.pt.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")

import torch
from axolotl.core.builders.causal import HFCausalTrainerBuilder
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import prepare_optim_env
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from treetrain.trainers.group_batches import group_batches

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
    """The trainer that Axolotl builds from a configuration, after its steps."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    settings = DictDefault({**SETTINGS, "plugins": list(plugins), "output_dir": str(folder), **changes})
    prepare_optim_env(settings)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    words = models.WordLevel({str(i): i for i in range(64)}, unk_token="0")
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


def main(folder: str, settings: str) -> None:
    changes = json.loads(settings)
    if "fsdp_config" in changes:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from support.fsdp_on_cpus import let_accelerate_shard

        let_accelerate_shard()
    trainer = trained(Path(folder), *changes.pop("plugins", ()), **changes)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # a collective call where weights are sharded
    if trainer.is_world_process_zero():
        torch.save({"log": trainer.state.log_history, "weights": weights}, Path(folder) / "outcome.pt")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
