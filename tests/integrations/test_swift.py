"""ms-swift's trainer of supervised fine-tuning with shared prefixes and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("swift.trainers", reason="ms-swift wants older packages: make test-swift")

from swift import get_model_processor, get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from support.others_sft import ROWS, SETTINGS, assert_same_and_shared, model, outcome
from treetrain.integrations.swift import TreeSeq2SeqTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
    model(dtype="float32").save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<|im_end|>", *(f"w{k}" for k in range(62))])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder


def make(kind: type, folder: Path, out: Path, **settings: Any) -> Any:
    """A trainer as `SwiftSft` makes it."""
    loaded, processor = get_model_processor(str(folder), torch_dtype=torch.float32, model_type="qwen3")
    template = get_template(processor, template_type="qwen3")
    template.set_mode("train")
    own = {"gradient_checkpointing": False, "bf16": False}
    args = Seq2SeqTrainingArguments(output_dir=str(out), **SETTINGS | own | settings)
    return kind(model=loaded, args=args, template=template, train_dataset=ROWS)


def test_it_trains_as_without_shared_prefixes_and_computes_them_once(folder, tmp_path) -> None:
    plain = outcome(make(Seq2SeqTrainer, folder, tmp_path / "plain"))
    assert_same_and_shared(plain, outcome(make(TreeSeq2SeqTrainer, folder, tmp_path / "shared")))


def test_a_loss_from_logits_is_an_error(folder, tmp_path) -> None:
    trainer = make(TreeSeq2SeqTrainer, folder, tmp_path)
    trainer.train_dataset = [row | {"loss_scale": [0.5] * len(row["labels"])} for row in trainer.train_dataset]
    with pytest.raises(RuntimeError, match=r"compute_loss reads \.logits of the model's output"):
        trainer.train()


def test_logits_to_keep_are_refused(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="use_logits_to_keep is True, which cuts logits"):
        make(TreeSeq2SeqTrainer, folder, tmp_path, use_logits_to_keep=True)
