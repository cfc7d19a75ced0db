"""TRL's other trainers: those whose model has TRL's fused head are let through, those that read logits are refused.

Nothing here goes by a trainer's name; docs/integrations.md lists them.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs as runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer_runs import difference, train
from transformers import PreTrainedTokenizerFast

import treetrain as tt


def experimental(name: str) -> Any:
    """A trainer and its configuration."""
    module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def build_gmpo(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    return runs._online(*experimental("GMPO"), settings, runs.model(dtype=dtype), folder, False)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte: GOLD takes byte-level tokenizers alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*letters, "<eos>", "<pad>"])}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(["<eos>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def build_distillation(name: str) -> Any:
    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        words = bytes_tokenizer() if name == "GOLD" else runs.tokenizer()
        words.chat_template = runs.CHAT_TEMPLATE
        return trainer(
            runs.model(dtype=dtype, vocab_size=300),
            teacher_model=runs.model(seed=1, dtype=dtype, vocab_size=300),
            args=config(**{"max_length": 256, "lmbda": 0.0, **settings}),
            train_dataset=runs.chats(32),
            processing_class=words,
        )

    return build


def build_preference(name: str) -> Any:
    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        rows = runs.preferences(8)
        if name == "TPO":
            rows = rows.map(lambda row: {"reference": row["chosen"]})
        return trainer(
            model=runs.model(dtype=dtype),
            args=config(**{name: value for name, value in settings.items()}),
            train_dataset=rows,
            processing_class=runs.tokenizer(),
        )

    return build


def test_a_trainer_that_scores_by_the_fused_head_learns_the_same(tmp_path):
    shared, plain = (train(build_gmpo, tmp_path, shared=share, steps=2) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found
    assert any("tree/overlap" in logs for logs in shared.logs)


@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_a_trainer_that_has_the_fused_head_and_reads_logits_learns_the_same_and_is_told(name, tmp_path):
    build = build_distillation(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shared = train(build, tmp_path, shared=True, steps=3)
    found = difference(shared, train(build, tmp_path, shared=False, steps=3))
    assert max(found.metrics, found.weights) <= 1e-5, found
    assert any("asked for logits, which no tree gives" in str(each.message) for each in told)


@pytest.mark.parametrize("name", ["CPO", "ORPO", "TPO"])
def test_a_trainer_that_reads_logits_without_the_fused_head_is_refused_before_training(name, tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = build_preference(name)(settings, torch.float32, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}Trainer of TRL asks its model for logits.*tt\.token_logprobs"):
        tt.share_prefixes(trainer)


def test_a_wrong_score_of_such_a_trainer_stops_the_first_step(tmp_path, monkeypatch):
    runs.make_scores_wrong(monkeypatch)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02"):
        train(build_gmpo, tmp_path, shared=True, steps=1)
