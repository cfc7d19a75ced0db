"""A model small enough to be verified and timed in a test."""

import pytest

from support.saved import save_small_model
from support.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3 of 20 thousand weights, without a tokenizer."""
    return save_small_model(tmp_path_factory.mktemp("model"), vocabulary=64, positions=128)
