"""Whole runs, the tree beside each row by itself: losses of every step, final log-probabilities and weights.

In float64, since a difference in the last bit grows over the steps of a run (Adam divides by small numbers): what is
left after the run says whether the gradients were the same, and not how well conditioned the run is.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import VOCABULARY, write_rows

from support.pure import PureFloat64
from treetrain.engine.linear import LinearEngine
from treetrain.models.loading import load_model
from treetrain.train import trainer as trainer_module
from treetrain.train.config import TrainConfig
from treetrain.train.save import save_result
from treetrain.train.trainer import Trainer

STEPS = 50
FEW = 12
"""Steps where every run of the tests pays for them."""
TOLERANCE = 1e-8
"""Of losses (absolute), log-probabilities (absolute) and weights (relative, global) after 50 steps in float64.

Measured: 4e-10 at most (the log-probabilities of DPO); one gradient of one step 0.1% too large makes 3e-2.
Steps so large that training is unstable (an adapter with lr 2e-2) make 1e-4 of 1e-16,
in losses that agree to the last bits for 20 steps; at the lr below an adapter's runs agree to 1e-14.
"""


def rows_with_everything(groups: int = 5, answers: int = 4, seed: int = 3) -> list[dict]:
    """Answers that branch twice, with rewards, recorded log-probabilities of three kinds, and pairs within groups."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        asked = random.integers(8, VOCABULARY, 9).tolist()
        thought = [random.integers(1, 6, 4).tolist() for _ in range(2)]
        for answer in range(answers):
            said = thought[answer % 2] + random.integers(1, 6, int(random.integers(2, 7))).tolist()
            ids = asked + said
            recorded = {
                name: (-3.5 + 0.3 * random.standard_normal(len(ids))).tolist()
                for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs")
            }
            row = {"input_ids": ids, "loss_mask": [0] * len(asked) + [1] * len(said), "group_id": group, **recorded}
            row |= {"reward": float(random.random()), "chosen": answer < 2, "pair": f"{group} {answer % 2}"}
            rows.append(row)
    return rows


CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl": 0.05, "entropy": 0.01},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "dpo": {"beta": 0.3},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    losses: np.ndarray
    scores: torch.Tensor
    """Log-probabilities of every row after the run, by the rows themselves."""
    weights: torch.Tensor


def converge(monkeypatch, config: TrainConfig) -> Outcome:
    """A run in float64."""
    trained: list[torch.nn.Module] = []
    monkeypatch.setattr(
        "treetrain.train.model.load_model", lambda *args, **kwargs: load_model(*args, **kwargs).double()
    )

    def keep(folder, model, *rest, **more) -> None:
        trained.append(model)
        save_result(folder, model, *rest, **more)

    monkeypatch.setattr(trainer_module, "save_result", keep)
    with PureFloat64():
        trainer = Trainer(config)
        result = trainer.run()
        scores = torch.cat(LinearEngine(trained[0]).logprobs(trainer.prepared.rows))
    return Outcome(np.array(result.losses), scores, torch.cat([p.detach().flatten() for p in trained[0].parameters()]))


def difference(one: Outcome, other: Outcome) -> float:
    weights = float((one.weights - other.weights).norm() / other.weights.norm())
    return max(np.abs(one.losses - other.losses).max(), float((one.scores - other.scores).abs().max()), weights)


@pytest.fixture
def run(monkeypatch, model_folder: str, tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl", rows_with_everything())

    def run(name: str, **changes: Any) -> Outcome:
        given: dict[str, Any] = {
            "data": (data,),
            "model": model_folder,
            "output": str(tmp_path / "out"),
            "overwrite": True,
            "report": False,
            "loss": name,
            "steps": STEPS,
            "tokens_per_step": 150,
            "lr": 2e-3,
            "schedule": "constant",
        }
        return converge(monkeypatch, TrainConfig(**given | CASES[name] | changes))

    return run


@pytest.mark.parametrize("steps", [FEW, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_run_as_a_tree_is_the_run_row_by_row(run, name, steps) -> None:
    linear, tree = (run(name, execution=execution, steps=steps) for execution in ("linear", "tree"))
    assert len(tree.losses) == steps and np.abs(linear.losses - linear.losses[0]).max() > 1e-3
    assert difference(tree, linear) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 12},
        {"tokens_per_call": 70, "tokens_per_step": 300},
        {"gradient_checkpointing": True, "budget": 30},
        {"lora_rank": 4},
        {"optimizer": "sgd", "lr": 0.05, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_fifty_steps_in_parts_in_calls_with_adapters_and_other_optimisers_are_the_same(run, name, changes) -> None:
    plain = {key: changes[key] for key in changes if key not in ("budget", "tokens_per_call", "gradient_checkpointing")}
    linear, tree = run(name, **plain, execution="linear"), run(name, **changes, execution="tree")
    assert np.abs(linear.losses - linear.losses[0]).max() > 1e-3
    assert difference(tree, linear) < TOLERANCE


def test_a_gradient_that_is_wrong_once_is_seen_at_the_end(run, monkeypatch) -> None:
    linear = run("sft", execution="linear", steps=FEW)
    update, steps = trainer_module.TrainLoop._update, []

    def wrong_once(self, loss: float) -> float:
        steps.append(1)
        if len(steps) == 7:
            next(p for p in self.model.parameters() if p.grad is not None).grad.mul_(1.001)
        return update(self, loss)

    monkeypatch.setattr(trainer_module.TrainLoop, "_update", wrong_once)
    assert difference(run("sft", execution="tree", steps=FEW), linear) > 10 * TOLERANCE
