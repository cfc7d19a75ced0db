"""Rows of count="once" train as one row for each sampled token does; only losses that sum over tokens are taken."""

from functools import cache

import numpy as np
import pytest
import torch

import treetrain as tt
from support import images
from support.models import make_model
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.logs.once import count_once
from treetrain.trainers.tree_trainer import checked_loss

FACTS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "values", "returns")
LOSSES = {
    "sft": tt.losses.sft(),
    "reinforce": tt.losses.reinforce(kl=0.2, entropy=0.05),
    "ppo": tt.losses.ppo(clip=0.2, kl=0.1),
    "dapo": tt.losses.dapo(importance_cap=2.0),
    "grpo of tokens": tt.losses.grpo(reduction="token"),
    "distill": tt.losses.distill(estimator="k2"),
    "value": tt.losses.value(),
    "actor_critic": tt.losses.ppo(value_coefficient=0.5),
}


def rows_and_tokens(seed: int) -> tuple[list[tt.Trajectory], list[tt.Trajectory]]:
    """Rows that repeat each other's tokens, with weights and facts of each token, and a row for each trained token.

    Two token ids make forks, duplicates and rows that are prefixes frequent. A token may be trained in some of the rows
    through it and context in others.
    """
    rng = np.random.default_rng(seed)

    @cache
    def known(path: tuple[int, ...]) -> tuple[float, ...]:
        means = [-4.0 if name.endswith("logprobs") else 0.0 for name in FACTS]
        return (rng.uniform(0.2, 2), *rng.normal(means))

    def row(ids: tuple[int, ...], mask) -> tt.Trajectory:
        weights, *facts = np.array([known(ids[: at + 1]) for at in range(len(ids))]).T
        return tt.Trajectory(ids, loss_weights=weights * mask, **dict(zip(FACTS, facts)))

    rows, trained = [], dict[tuple[int, ...], tt.Trajectory]()
    for _ in range(8):
        ids = (1, *rng.integers(2, 4, rng.integers(0, 6)).tolist())
        mask = rng.random(len(ids)) < 0.7
        rows.append(row(ids, mask))
        for at in np.flatnonzero(mask[1:]) + 1:
            trained[ids[: at + 1]] = row(ids[: at + 1], np.arange(at + 1) == at)
    return rows, list(trained.values())


def step(model, batch, loss, **options) -> tuple[tt.StepResult, torch.Tensor]:
    model.zero_grad()
    with PureFloat64():
        result = tt.TreeEngine(model, **options).forward_backward(batch, loss)
    return result, linear.gradients(model)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "budget"), [(name, (None, 3)[number % 2]) for number, name in enumerate(LOSSES)])
def test_a_step_is_that_of_one_row_for_each_sampled_token(name, budget):
    model, loss = make_model("qwen3", dtype=torch.float64), LOSSES[name]
    head = torch.nn.Linear(24, 1, dtype=torch.float64) if "predicted_values" in loss.needs else None
    for seed in range(2):
        rows, tokens = rows_and_tokens(seed)
        whole, expected = step(model, tokens, loss, value_head=head)
        result, found = step(model, count_once(rows), loss, value_head=head, budget=budget)
        often, _ = step(model, rows, loss, value_head=head)
        assert expected.norm() > 0 and linear.relative_error(found, expected) <= 1e-12
        assert result.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
        assert result.loss != pytest.approx(often.loss, rel=1e-6)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("budget", [None, 6])
def test_tokens_after_other_images_count_by_themselves(budget):
    model, rows = images.image_model("Qwen3-VL"), []
    for seed in (0, 1, 0):
        row = images.row(5, images.image(seed), 7, 8, 9, episode="e")
        rows.append(row.replace(loss_weights=[0.0] * (len(row) - 3) + [1.0] * 3))
    model.zero_grad()
    with PureFloat64():
        scores = images.plain_scores(model, rows[:2])
        expected = -sum(one[-3:].sum() for one in scores) / 6
        expected.backward()
    gradient = linear.gradients(model)
    result, found = step(model, count_once(rows), tt.losses.sft(), budget=budget)
    assert result.loss == pytest.approx(expected.item(), rel=1e-12)
    assert linear.relative_error(found, gradient) <= 1e-12


class OwnLoss:
    def normaliser(self, trajectories):
        return sum(row.weights.sum() for row in trajectories)

    def __call__(self, logprobs, entropies, trajectory):
        return -(torch.as_tensor(trajectory.weights[1:], dtype=logprobs.dtype) * logprobs).sum(), {}


REFUSED = {
    "sft": tt.losses.sft(reduction="trajectory"),
    "grpo": tt.losses.grpo(),
    "gspo": tt.losses.gspo(),
    "dr_grpo": tt.losses.dr_grpo(length=8),
    "dpo": tt.losses.dpo(),
    "reinforce": tt.losses.reinforce(importance_cap=2.0, importance_mode="sequence_mask"),
    "OwnLoss": OwnLoss(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_sum_over_tokens_is_refused_by_name(name):
    args, kind = tt.TreeArguments(output_dir="x", count="once"), type(REFUSED[name]).__name__
    with pytest.raises(ValueError, match=f"{kind} is no sum over tokens.*count='per trajectory'"):
        checked_loss(args, REFUSED[name])


def test_a_loss_of_ones_own_is_taken_when_it_says_that_it_sums_tokens():
    own = OwnLoss()
    own.sums_tokens = True
    checked_loss(tt.TreeArguments(output_dir="x", count="once"), own)
    model, rows = make_model("qwen3", dtype=torch.float64), count_once(rows_and_tokens(4)[0])
    expected, found = (step(model, rows, loss)[1] for loss in (tt.losses.sft(), own))
    assert linear.relative_error(found, expected) <= 1e-12 and expected.norm() > 0
