"""GRPO and RLOO shuffle groups over the micro-batches of a step; they are one tree all the same, with TRL's numbers."""

import pytest
import torch
from trainer_runs import BUILDERS, difference, train

from treetrain.engine import TreeEngine

TORN = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_generations": 4}
"""Micro-batches of two rows, and groups of four."""
SETTINGS = {
    # The loss and the entropy bonus are divided within a micro-batch, so they tell which rows it had.
    "grpo": {**TORN, "loss_type": "bnpo", "entropy_coef": 0.01},
    "grpo reused": {
        **TORN, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1,
    },
    "rloo": TORN,
}  # fmt: skip


def scored_rows(monkeypatch):
    """Rows of every score, and whether it takes gradients."""
    seen, score = [], TreeEngine.score

    def watched(self, rows, **options):
        found = score(self, rows, **options)
        seen.append((len(found.logprobs), torch.is_grad_enabled()))
        return found

    monkeypatch.setattr(TreeEngine, "score", watched)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "grpo reused", "rloo"])
def test_groups_torn_over_micro_batches_are_one_tree_and_give_the_trainers_own_numbers(case, tmp_path, monkeypatch):
    name, settings = case.split()[0], SETTINGS[case]
    seen = scored_rows(monkeypatch)
    shared = train(BUILDERS[name], tmp_path, shared=True, steps=3, **settings)
    trained = [rows for rows, gradients in seen if gradients]
    step = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    assert [rows for rows in trained if rows == step] == [step] * 3  # the others are the first step's check
    monkeypatch.undo()
    found = difference(shared, train(BUILDERS[name], tmp_path, shared=False, steps=3, **settings))
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found


def test_a_generation_is_scored_by_its_old_and_reference_policy_in_one_call(tmp_path, monkeypatch):
    settings = {**SETTINGS["grpo reused"], "num_iterations": 2}
    seen = scored_rows(monkeypatch)
    train(BUILDERS["grpo"], tmp_path, shared=True, steps=1, **settings)
    assert [rows for rows, gradients in seen if not gradients and rows >= 8] == [8, 8]
