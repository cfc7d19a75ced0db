"""A model small enough to train in a test."""

from pathlib import Path

import pytest
from branching import VOCABULARY, branching_rows, write_rows
from checkpointed import copied, make_run, two

from support.saved import save_small_model
from support.threads import one_thread

__all__ = ["copied", "make_run", "one_thread", "two"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3 of 20 thousand weights, without a tokenizer."""
    return save_small_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY, positions=128)


@pytest.fixture
def data_file(tmp_path: Path) -> str:
    """Six groups of three rows of 20 tokens."""
    return write_rows(tmp_path / "rows.jsonl", branching_rows())
