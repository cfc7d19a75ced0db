"""A model small enough to train in a test."""

from pathlib import Path
from typing import Any

import pytest
from branching import VOCABULARY, branching_rows, write_rows
from checkpointed import copied, make_run, two
from small_runs import small_run

from support.saved import save_small_model
from support.threads import one_thread
from treetrain.train.config import TrainConfig

__all__ = ["copied", "make_run", "one_thread", "two"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3 of 20 thousand weights, without a tokenizer."""
    return save_small_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY, positions=128)


@pytest.fixture
def data_file(tmp_path: Path) -> str:
    """Six groups of three rows of 20 tokens."""
    return write_rows(tmp_path / "rows.jsonl", branching_rows())


@pytest.fixture
def make_config(request: pytest.FixtureRequest, data_file: str, model_folder: str, tmp_path: Path):
    """Makes the settings of a small run: the shared ones, then the module's RUN_SETTINGS, then what a test gives."""
    given = small_run(data_file, model_folder, tmp_path / "out") | getattr(request.module, "RUN_SETTINGS", {})

    def make(**changes: Any) -> TrainConfig:
        return TrainConfig(**given | changes)

    return make
