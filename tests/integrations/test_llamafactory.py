"""LLaMA-Factory's trainer of supervised fine-tuning with shared prefixes and without."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("llamafactory", reason="llamafactory wants older packages: make test-llamafactory")

if importlib.util.find_spec("torchaudio") is None:  # LLaMA-Factory imports it, for rows with sounds alone
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

import treetrain as tt

ROWS = [[5, 6, 7, 8, 9, 10, 11, 12, k, 3 + k % 5, 4] for k in range(13, 29)]
STEPS = 4
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.05,
    "optim": "sgd",
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config)


def data() -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": [-100] * 8 + row[8:]} for row in ROWS]


def collator(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def make(folder: Path) -> Any:
    """The trainer as `run_sft` makes it."""
    args = TrainingArguments(output_dir=str(folder), **SETTINGS)
    given = {"model": model(), "args": args, "data_collator": collator, "train_dataset": data(), "tokenizer": None}
    return CustomSeq2SeqTrainer(finetuning_args=FinetuningArguments(), processor=None, **given)


def outcome(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return [float(entry["loss"]) for entry in logs], weights, trainer.state.log_history


def test_it_trains_as_without_shared_prefixes_and_computes_them_once(tmp_path) -> None:
    plain = outcome(make(tmp_path / "plain"))
    trainer = make(tmp_path / "shared")
    shared = outcome(tt.share_prefixes(trainer))
    assert len(plain[0]) == STEPS and plain[0] == pytest.approx(shared[0], abs=2e-5)  # they are logged rounded
    for name, weights in plain[1].items():
        assert (weights - shared[1][name]).abs().max() <= 1e-5 * weights.abs().max(), name
    assert any(entry.get("tree/overlap", 0) > 0.4 for entry in shared[2])
