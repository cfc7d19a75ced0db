"""Every loss against numbers worked out by hand. Probabilities are powers of 2, so all is in terms of LN2."""

import math

import pytest
import torch
from torch import Tensor

from treetrain import losses
from treetrain.layers.trajectory import Trajectory

LN2 = 0.6931471805599453


def halvings(*powers: float) -> Tensor:
    """Log-probabilities of 1/2, 1/4, ... given as 1, 2, ..."""
    return torch.tensor([-LN2 * power for power in powers], dtype=torch.float64, requires_grad=True)


def whole_step(loss, logprobs: list[Tensor], trajectories, entropies=None):
    """Value and mean metrics of a step, one trajectory after the other as a user would write it."""
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for k, trajectory in enumerate(trajectories):
        part, part_metrics = loss(logprobs[k], None if entropies is None else entropies[k], trajectory)
        total, metrics = total + part, losses.add_metrics(metrics, part_metrics)
    return total / loss.normaliser(trajectories), losses.mean_metrics(metrics)


# Row a is trained on 1/2 with weight 1 and 1/8 with weight 2, not on 1/4; row b on 1/16 with weight 1.
# The weight 9 of entry 0 must not count.
SFT_ROWS = [Trajectory([5, 6, 7, 8], loss_weights=[9, 1, 0, 2]), Trajectory([5, 6], loss_weights=[9, 1])]


@pytest.mark.parametrize(
    ("reduction", "halves"),
    [
        ("token", 2.75),  # (1 * 1 + 2 * 3 + 1 * 4) / (1 + 2 + 1)
        ("trajectory", 19 / 6),  # ((1 * 1 + 2 * 3) / 3 + 4 / 1) / 2
    ],
)
def test_sft_is_the_weighted_mean_of_minus_log_p(reduction, halves):
    value, metrics = whole_step(losses.sft(reduction=reduction), [halvings(1, 2, 3), halvings(4)], SFT_ROWS)
    assert value.item() == pytest.approx(halves * LN2, rel=1e-15)
    assert metrics == {"nll": pytest.approx(halves * LN2, rel=1e-15)}


def test_sft_trains_every_token_but_the_first_where_no_weights_are_given():
    row = Trajectory([5, 6, 7])
    assert losses.sft().normaliser([row]) == 2.0
    assert losses.sft()(halvings(1, 2), None, row)[0].item() == pytest.approx(3 * LN2, rel=1e-15)


@pytest.mark.parametrize(
    ("options", "expected", "gradient"),
    [
        # -A l: -2 * -1 and 0.5 * -2; gradient -A
        ({}, 2.0 - 1.0, [-2.0, 0.5]),
        # + 0.1 (l - ref) = 0.1 * (2 - 1); its gradient is 0.1 everywhere
        ({"kl": 0.1, "kl_estimator": "k1"}, 1.0 + 0.1, [-1.9, 0.6]),
        # + 0.1 (l - ref)^2 / 2 = 0.1 * (2 + 0.5); gradient 0.1 (l - ref)
        ({"kl": 0.1, "kl_estimator": "k2"}, 1.0 + 0.25, [-1.8, 0.4]),
        # + 0.1 (e^-2 - 1 + 2 + e^1 - 1 - 1) = 0.1 * (1.1353352832366128 + 0.7182818284590452);
        # gradient 0.1 (1 - e^(ref - l)) = 0.1 * 0.8646647167633873 and 0.1 * -1.7182818284590452
        ({"kl": 0.1, "kl_estimator": "k3"}, 1.1853617111695658, [-1.9135335283236613, 0.3281718171540955]),
        # - 0.01 (0.5 + 1.5)
        ({"entropy": 0.01}, 1.0 - 0.02, [-2.0, 0.5]),
    ],
)
def test_reinforce_follows_the_advantage_with_each_penalty(options, expected, gradient):
    row = Trajectory([5, 6, 7], advantages=[9, 2, -0.5], ref_logprobs=[9, -3, -1])
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropies = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    loss = losses.reinforce(**options)
    total, metrics = loss(logprobs, entropies, row)
    assert total.item() == pytest.approx(expected, rel=1e-14)
    assert torch.autograd.grad(total, logprobs, retain_graph=True)[0].tolist() == pytest.approx(gradient, rel=1e-14)
    if "entropy" in options:
        assert torch.autograd.grad(total, entropies)[0].tolist() == [-0.01, -0.01]
    means = losses.mean_metrics(metrics)
    assert means["policy_loss"] == pytest.approx(0.5)  # (2 - 1) / 2, without the penalties
    assert means["advantage"] == pytest.approx(0.75)
    assert means["entropy"] == pytest.approx(1.0)


# r = now / old is 2, 1/2, 1/2, 4, 1; the first and the last token have weight 2.
PPO_ROW = Trajectory(
    [5, 6, 7, 8, 9, 10],
    loss_weights=[9, 2, 1, 1, 1, 2],
    advantages=[9, 1, 2, -1, -3, 1],
    old_logprobs=[9, -3 * LN2, -LN2, -LN2, -4 * LN2, -2 * LN2],
)
PPO_NOW = (2, 2, 2, 2, 2)


def test_ppo_clips_each_side_only_where_that_lowers_the_objective():
    # -min(r A, clip(r, 0.8, 1.28) A), weighted:
    #   A =  1, r = 2    clipped      -1.28 * 2     gradient 0
    #   A =  2, r = 1/2  followed     -1                     -1
    #   A = -1, r = 1/2  clipped      +0.8                    0
    #   A = -3, r = 4    followed    +12                    +12
    #   A =  1, r = 1    followed     -1 * 2                 -2
    loss, logprobs = losses.ppo(clip_low=0.2, clip_high=0.28), halvings(*PPO_NOW)
    total, _ = loss(logprobs, None, PPO_ROW)
    assert total.item() == pytest.approx(7.24, rel=1e-14)
    assert loss.normaliser([PPO_ROW]) == 7.0
    gradient = torch.autograd.grad(total, logprobs)[0].tolist()
    assert gradient == pytest.approx([0, -1, 0, 12, -2], rel=1e-14, abs=0)


def test_ppo_reports_what_people_watch():
    _, metrics = losses.ppo(clip=0.2, clip_high=0.28)(halvings(*PPO_NOW), None, PPO_ROW)
    assert losses.mean_metrics(metrics) == {
        "policy_loss": pytest.approx(7.24 / 7),
        "advantage": pytest.approx(2 / 7),  # (2 * 1 + 2 - 1 - 3 + 2 * 1) / 7
        "ratio": pytest.approx(11 / 7),  # (2 * 2 + 0.5 + 0.5 + 4 + 2 * 1) / 7
        # r - 1 - ln r: (2 (1 - LN2) + 2 (-0.5 + LN2) + (3 - 2 LN2) + 2 * 0) / 7
        "approx_kl": pytest.approx((4 - 2 * LN2) / 7),
        "clip_fraction": pytest.approx(3 / 7),
        "clip_fraction_low": pytest.approx(1 / 7),
        "clip_fraction_high": pytest.approx(2 / 7),
        "ratio_max": pytest.approx(4),
        "ratio_min": pytest.approx(0.5),
    }


def test_extremes_of_parts_are_those_of_the_whole():
    loss, parts = losses.ppo(), {}
    for old in ([0.0, -1.0, -2.0], [0.0, -3.0, -1.5]):
        row = Trajectory([5, 6, 7], advantages=1.0, old_logprobs=old, loss_weights=[0, 1, 1])
        parts = losses.add_metrics(parts, loss(torch.tensor([-2.0, -2.0]), None, row)[1])
    found = losses.mean_metrics(parts)
    assert found["ratio_max"] == pytest.approx(math.e) and found["ratio_min"] == pytest.approx(math.exp(-1))


def test_one_clip_bounds_both_sides():
    # 0.5 and 1.5: -1.5 * 2 - 1 + 0.5 + 12 - 2
    assert losses.ppo(clip=0.5)(halvings(*PPO_NOW), None, PPO_ROW)[0].item() == pytest.approx(6.5, rel=1e-14)


def test_the_widest_bounds_never_clip():
    # -2 * 2 - 1 + 0.5 + 12 - 2
    loss = losses.ppo(clip_low=1.0, clip_high=math.inf)
    assert loss(halvings(*PPO_NOW), None, PPO_ROW)[0].item() == pytest.approx(5.5, rel=1e-14)


# Row a: r = 2 and 1, A = 1, reference twice and half as likely; row b: r = 1, A = -1, reference alike.
GRPO_ROWS = [
    Trajectory([5, 6, 7], advantages=1.0, old_logprobs=[9, -3 * LN2, -2 * LN2], ref_logprobs=[9, -LN2, -3 * LN2]),
    Trajectory([5, 6], advantages=-1.0, old_logprobs=[9, -LN2], ref_logprobs=[9, -LN2]),
]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Row a: -1.2 - 1 + 0.1 * ((2 - 1 - LN2) + (0.5 - 1 + LN2)) = -2.15; row b: +1
        ("trajectory", -0.0375),  # (-2.15 / 2 + 1) / 2
        ("token", -1.15 / 3),
    ],
)
def test_grpo_is_the_mean_of_clipped_surrogate_and_k3(reduction, expected):
    loss = losses.grpo(clip=0.2, kl=0.1, reduction=reduction)
    value, metrics = whole_step(loss, [halvings(2, 2), halvings(1)], GRPO_ROWS)
    assert value.item() == pytest.approx(expected, rel=1e-13)
    kl = {"trajectory": 0.125, "token": 0.5 / 3}[reduction]  # (0.5 / 2 + 0) / 2
    assert metrics["kl"] == pytest.approx(kl, rel=1e-13)
    assert metrics["policy_loss"] + 0.1 * metrics["kl"] == pytest.approx(expected, rel=1e-13)


def test_grpo_takes_the_mean_per_trajectory_and_ppo_per_token_by_default():
    assert (losses.grpo().reduction, losses.ppo().reduction) == ("trajectory", "token")


def test_a_step_on_policy_has_ratio_1_and_the_policy_gradient():
    row = PPO_ROW.replace(old_logprobs=None)
    logprobs = halvings(*PPO_NOW)
    total, metrics = losses.ppo(on_policy=True)(logprobs, None, row)
    assert total.item() == pytest.approx(-2.0)  # -(2 * 1 + 2 - 1 - 3 + 2 * 1)
    assert torch.autograd.grad(total, logprobs)[0].tolist() == [-2, -2, 1, 3, -2]
    means = losses.mean_metrics(metrics)
    assert (means["ratio"], means["clip_fraction"], means["approx_kl"]) == (1.0, 0.0, 0.0)


def test_k3_keeps_its_digits_where_policy_and_reference_nearly_agree():
    # e^x - 1 - x = x^2 / 2 + ... = 2^-25 for x = 2^-12; computed in that order, float32 has no digit of it.
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-12])
    assert losses.KL_ESTIMATORS["k3"](logprobs, reference).item() == pytest.approx(2.0**-25, rel=2e-3)
