"""A model small enough to train in a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from branching import VOCABULARY, branching_rows, write_rows
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """So small a model is slower on several threads, much slower where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3 of 20 thousand weights, without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data_file(tmp_path: Path) -> str:
    """Six groups of three rows of 20 tokens."""
    return write_rows(tmp_path / "rows.jsonl", branching_rows())
