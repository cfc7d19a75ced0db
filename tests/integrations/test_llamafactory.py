"""LLaMA-Factory's trainer of supervised fine-tuning with shared prefixes and without."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("llamafactory", reason="llamafactory wants older packages: make test-llamafactory")

if importlib.util.find_spec("torchaudio") is None:  # LLaMA-Factory imports it, for rows with sounds alone
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

import treetrain as tt
from support.others_sft import ROWS, SETTINGS, assert_same_and_shared, model, outcome


def collator(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def make(folder: Path) -> Any:
    """The trainer as `run_sft` makes it."""
    args = TrainingArguments(output_dir=str(folder), **SETTINGS)
    given = {"model": model(), "args": args, "data_collator": collator, "train_dataset": ROWS, "tokenizer": None}
    return CustomSeq2SeqTrainer(finetuning_args=FinetuningArguments(), processor=None, **given)


def test_it_trains_as_without_shared_prefixes_and_computes_them_once(tmp_path) -> None:
    plain = outcome(make(tmp_path / "plain"))
    assert_same_and_shared(plain, outcome(tt.share_prefixes(make(tmp_path / "shared"))))
