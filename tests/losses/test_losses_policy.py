"""DAPO, Dr. GRPO, GSPO and the correction for the sampler's numerics, against numbers worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from treetrain import losses
from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory

LN2 = math.log(2)
# Ratios r = now / old of row a: 2, 1/2 (weights 1, 3), of row b: 4; a third row trains nothing.
ROWS = [
    Trajectory([5, 6, 7], loss_weights=[9, 1, 3], advantages=1.0, old_logprobs=[9, -3 * LN2, -LN2], id="a"),
    Trajectory([5, 6], advantages=-2.0, old_logprobs=[9, -3 * LN2], id="b"),
    Trajectory([5, 6], loss_weights=0.0),
]
NOW = [[-2 * LN2, -2 * LN2], [-LN2], [-7.0]]


def step(loss, rows=ROWS, now=NOW):
    """Value, gradient of every row and mean metrics, one row after the other."""
    logprobs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in now]
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for given, row in zip(logprobs, rows):
        part, part_metrics = loss(given, None, row)
        total, metrics = total + part, losses.add_metrics(metrics, part_metrics)
    value = total / loss.normaliser(rows)
    found = torch.autograd.grad(value, logprobs, allow_unused=True, materialize_grads=True)
    return value.item(), [gradient.tolist() for gradient in found], losses.mean_metrics(metrics)


def test_dapo_clips_higher_above_and_takes_the_mean_over_tokens():
    # -min(r A, clip(r, 0.8, 1.28) A): -1.28 (clipped), -0.5 * 3, +4 * 2
    value, gradients, metrics = step(losses.dapo())
    assert value == pytest.approx((-1.28 - 1.5 + 8) / 5, rel=1e-14)
    assert gradients == [pytest.approx([0, -1.5 / 5]), pytest.approx([8 / 5]), [0]]
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 5)
    assert dataclasses.asdict(losses.dapo()) == dataclasses.asdict(losses.ppo(clip_low=0.2, clip_high=0.28))


def test_dr_grpo_divides_by_trained_rows_times_a_constant_length():
    value, gradients, metrics = step(losses.dr_grpo(length=10, clip=0.2, clip_high=0.28))
    assert value == pytest.approx((-1.28 - 1.5 + 8) / (2 * 10), rel=1e-14)
    assert gradients[1] == pytest.approx([8 / 20])
    assert metrics["ratio"] == pytest.approx((2 + 3 * 0.5 + 4) / 5)  # metrics are means over tokens
    with pytest.raises(DataError, match="nothing to train"):
        losses.dr_grpo(length=10).normaliser(ROWS[2:])


# s = exp of the weighted mean of l - old: row a: (ln 2 - 3 ln 2) / 4 = -ln 2 / 2, row b: ln 4.
ROOT = 2**-0.5


def test_gspo_clips_the_ratio_of_rows_and_takes_their_mean():
    # Row a, A = 1: s = 0.707 is below, which only a bound above would clip; row b, A = -2: s = 4, followed.
    value, gradients, metrics = step(losses.gspo(clip_low=0.2, clip_high=0.2))
    assert value == pytest.approx((-ROOT + 8) / 2, rel=1e-14)
    assert gradients == [pytest.approx([-ROOT / 8, -3 * ROOT / 8], rel=1e-13), pytest.approx([4]), [0]]
    assert metrics["ratio"] == pytest.approx((ROOT + 4) / 2)
    assert metrics["clip_fraction"] == 0
    # With the other signs both rows are clipped: +0.8 * 1 and -1.2 * 2.
    swapped = [row.replace(advantages=-row.advantages) for row in ROWS[:2]]
    value, gradients, metrics = step(losses.gspo(clip_low=0.2, clip_high=0.2), swapped, NOW[:2])
    assert value == pytest.approx((0.8 - 2.4) / 2, rel=1e-14)
    assert gradients == [[0, 0], [0]]
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.5, 0.5)


# old / rollout of row a: 4 and 1/2, of row b: 8.
SAMPLED = [
    ROWS[0].replace(rollout_logprobs=[9, -5 * LN2, 0.0]),
    ROWS[1].replace(rollout_logprobs=[9, -6 * LN2]),
    ROWS[2],
]


@pytest.mark.parametrize(
    ("mode", "factors", "capped"),
    [
        ("token_truncate", (3, 0.5, 3), 2 / 5),
        ("token_mask", (0, 0.5, 0), 2 / 5),
        ("sequence_truncate", (2, 2, 3), 1 / 5),  # row a: 4 * 1/2, whatever the weights
        ("sequence_mask", (2, 2, 0), 1 / 5),
    ],
)
def test_the_policy_term_is_multiplied_by_the_bounded_likelihood_ratio(mode, factors, capped):
    loss = losses.dapo(importance_cap=3.0, importance_mode=mode)
    value, gradients, metrics = step(loss, SAMPLED)
    x, y, z = factors
    assert value == pytest.approx((-1.28 * x - 1.5 * y + 8 * z) / 5, rel=1e-13)
    assert gradients == [pytest.approx([0, -1.5 * y / 5]), pytest.approx([8 * z / 5]), [0]]
    assert metrics["importance"] == pytest.approx((x + 3 * y + z) / 5)
    assert metrics["importance_square"] == pytest.approx((x**2 + 3 * y**2 + z**2) / 5)
    assert metrics["importance_capped"] == pytest.approx(capped)
    kl = (4 - 1 - 2 * LN2) + 3 * (0.5 - 1 + LN2) + (8 - 1 - 3 * LN2)  # e^d - 1 - d
    assert metrics["rollout_kl"] == pytest.approx(kl / 5)
    assert metrics["policy_loss"] == pytest.approx(value)
    assert (metrics["importance_max"], metrics["importance_min"]) == pytest.approx((max(factors), min(factors)))
    # Without a limit too, over the rows that were recorded.
    assert step(losses.dapo(), SAMPLED)[2]["rollout_kl"] == pytest.approx(kl / 5)
    some = [SAMPLED[0], ROWS[1], ROWS[2]]
    assert step(losses.dapo(), some)[2]["rollout_kl"] == pytest.approx((kl - (8 - 1 - 3 * LN2)) / 4)
    assert "rollout_kl" not in step(losses.dapo(), ROWS)[2]


def test_a_cap_that_nothing_reaches_leaves_the_ratio_as_it_is():
    value, _, metrics = step(losses.dapo(importance_cap=100.0), SAMPLED)
    assert value == pytest.approx((-1.28 * 4 - 1.5 * 0.5 + 8 * 8) / 5, rel=1e-13)
    assert metrics["importance_capped"] == 0


def test_penalties_are_not_corrected():
    rows = [row.replace(ref_logprobs=np.full(len(row), -1.5)) for row in SAMPLED]
    plain, corrected = losses.dapo(kl=0.1), losses.dapo(kl=0.1, importance_cap=3.0)
    without = losses.dapo(importance_cap=3.0)
    kl = step(plain, rows)[2]["kl"]
    assert step(corrected, rows)[0] == pytest.approx(step(without, rows)[0] + 0.1 * kl, rel=1e-13)


def test_on_policy_the_present_policy_is_the_one_that_is_compared_with_the_sampler():
    # now / rollout: 2^3 -> 3 and 2^-2; the factor has no gradient of its own.
    rows = [SAMPLED[0].replace(old_logprobs=None)]
    for loss in (losses.ppo(on_policy=True, importance_cap=3.0), losses.reinforce(importance_cap=3.0)):
        _, gradients, metrics = step(loss, rows, NOW[:1])
        assert gradients == [pytest.approx([-3 / 4, -3 * 0.25 / 4], rel=1e-13)]
        assert metrics["importance"] == pytest.approx((3 + 3 * 0.25) / 4)
        assert loss.coefficients(losses.Facts(rows)) is None


def test_a_correction_that_would_overflow_is_capped():
    row = Trajectory([5, 6], advantages=1.0, old_logprobs=[0, -1], rollout_logprobs=[0, -2000])
    for mode, expected in (("token_truncate", -2.0), ("token_mask", 0.0)):
        loss = losses.ppo(importance_cap=2.0, importance_mode=mode)
        logprobs = torch.tensor([-1.0], requires_grad=True)
        total, _ = loss(logprobs, None, row)
        assert total.item() == expected
        assert torch.autograd.grad(total, logprobs)[0].item() == expected
