"""Supervised fine-tuning in trainers of other projects, with shared prefixes and without."""

from typing import Any, NamedTuple

import pytest
import torch

from support.framework_runs import small_model

STEPS = 4
ROWS = [
    {"input_ids": row, "labels": [-100] * 8 + row[8:]}
    for row in ([5, 6, 7, 8, 9, 10, 11, 12, k, 3 + k % 5, 4] for k in range(13, 29))
]
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


def model(**settings: Any) -> Any:
    """A Qwen3 of random weights."""
    return small_model(vocab_size=64, initializer_range=0.2, **settings)


class Outcome(NamedTuple):
    """What a run has logged, and its weights."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    log: list[dict[str, Any]]


def outcome(trainer: Any) -> Outcome:
    """Train."""
    trainer.train()
    log = trainer.state.log_history
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return Outcome([float(entry["loss"]) for entry in log if "loss" in entry], weights, log)


def assert_same_and_shared(plain: Outcome, shared: Outcome) -> None:
    """Losses and weights are equal, and rows shared a prefix."""
    assert len(plain.losses) == STEPS and plain.losses == pytest.approx(shared.losses, abs=2e-5)  # logged rounded
    for name, weights in plain.weights.items():
        assert (weights - shared.weights[name]).abs().max() <= 1e-5 * weights.abs().max(), name
    assert any(entry.get("tree/overlap", 0) > 0.4 for entry in shared.log)
