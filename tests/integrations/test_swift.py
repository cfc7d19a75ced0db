"""ms-swift's trainer of supervised fine-tuning with shared prefixes and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("swift.trainers", reason="ms-swift wants older packages: make test-swift")

from swift import get_model_processor, get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from treetrain.integrations.swift import TreeSeq2SeqTrainer

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
    "gradient_checkpointing": False,
    "bf16": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
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
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<|im_end|>", *(f"w{k}" for k in range(62))])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder


def make(kind: type, folder: Path, out: Path, **settings: Any) -> Any:
    """A trainer as `SwiftSft` makes it."""
    model, processor = get_model_processor(str(folder), torch_dtype=torch.float32, model_type="qwen3")
    template = get_template(processor, template_type="qwen3")
    template.set_mode("train")
    args = Seq2SeqTrainingArguments(output_dir=str(out), **SETTINGS | settings)
    rows = [{"input_ids": row, "labels": [-100] * 8 + row[8:]} for row in ROWS]
    return kind(model=model, args=args, template=template, train_dataset=rows)


def outcome(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return [float(entry["loss"]) for entry in logs], weights, trainer.state.log_history


def test_it_trains_as_without_shared_prefixes_and_computes_them_once(folder, tmp_path) -> None:
    plain = outcome(make(Seq2SeqTrainer, folder, tmp_path / "plain"))
    shared = outcome(make(TreeSeq2SeqTrainer, folder, tmp_path / "shared"))
    assert len(plain[0]) == STEPS and plain[0] == pytest.approx(shared[0], abs=2e-5)  # they are logged rounded
    for name, weights in plain[1].items():
        assert (weights - shared[1][name]).abs().max() <= 1e-5 * weights.abs().max(), name
    assert any(entry.get("tree/overlap", 0) > 0.4 for entry in shared[2])


def test_a_loss_from_logits_is_an_error(folder, tmp_path) -> None:
    trainer = make(TreeSeq2SeqTrainer, folder, tmp_path)
    trainer.train_dataset = [row | {"loss_scale": [0.5] * len(row["labels"])} for row in trainer.train_dataset]
    with pytest.raises(RuntimeError, match=r"compute_loss reads \.logits of the model's output"):
        trainer.train()


def test_logits_to_keep_are_refused(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="use_logits_to_keep is True, which cuts logits"):
        make(TreeSeq2SeqTrainer, folder, tmp_path, use_logits_to_keep=True)
