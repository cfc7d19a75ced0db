"""A model small enough to be verified and timed in a test."""

import pytest

from support.models import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3, without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_model(vocab_size=64, max_position_embeddings=128, tie_word_embeddings=True).save_pretrained(folder)
    return str(folder)
