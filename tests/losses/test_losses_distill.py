"""Distillation and the value loss, against numbers worked out by hand."""

import math

import pytest
import torch

from treetrain import losses
from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory

LN2 = math.log(2)
# l - t of the tokens: ln 2, -ln 2 (weights 1, 3).
ROW = Trajectory([5, 6, 7], loss_weights=[9, 1, 3], teacher_logprobs=[9, -2 * LN2, -LN2])
NOW = [-LN2, -2 * LN2]


def step(loss, row=ROW, now=NOW):
    logprobs = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    total, metrics = loss(logprobs, None, row)
    value = total / loss.normaliser([row])
    return value.item(), torch.autograd.grad(value, logprobs)[0].tolist(), losses.mean_metrics(metrics)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # (l - t)^2 / 2; gradient l - t, that of -A l with A = t - l
        ("k2", LN2**2 / 2 + 3 * LN2**2 / 2, [LN2, -3 * LN2]),
        # e^(t - l) - 1 - (t - l): 1/2 - 1 + ln 2 and 2 - 1 - ln 2; gradient 1 - e^(t - l)
        ("k3", (LN2 - 0.5) + 3 * (1 - LN2), [0.5, -3]),
    ],
)
def test_the_student_is_drawn_to_the_teacher(estimator, value, gradient):
    found, slope, metrics = step(losses.distill(estimator=estimator))
    assert found == pytest.approx(value / 4, rel=1e-14)
    assert slope == pytest.approx([g / 4 for g in gradient], rel=1e-14)
    assert metrics == {
        "reverse_kl": pytest.approx((LN2 - 3 * LN2) / 4),
        "nll": pytest.approx((LN2 + 6 * LN2) / 4),
        "teacher_nll": pytest.approx((2 * LN2 + 3 * LN2) / 4),
    }


def test_the_expected_gradient_is_that_of_the_reverse_kl_and_for_k3_of_the_forward_kl():
    # Over a vocabulary of four, each token counted with the student's probability instead of being sampled.
    logits = torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.9, -0.4, 0.2], dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    divergences = {
        "reverse": (student.exp() * (student - teacher)).sum(),
        "forward": (teacher.exp() * (teacher - student)).sum(),
    }
    row = Trajectory(
        range(5), loss_weights=[0, *student.detach().exp().tolist()], teacher_logprobs=[0, *teacher.tolist()]
    )
    for name, kind in (("k2", "reverse"), ("k3", "forward")):
        total, _ = losses.distill(estimator=name)(student, None, row)
        found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, divergences[kind]))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# Old values 1, 0, 2; returns 2, 1, 0; predicted 1.1 (within the clip), 0.5 (clipped to 0.2), 3 (further off, clipped
# to 2.2, where the error is smaller: the larger one counts).
VALUES = Trajectory([4, 5, 6, 7], loss_weights=[9, 1, 2, 1], values=[9, 1, 0, 2], returns=[9, 2, 1, 0])
PREDICTED = [1.1, 0.5, 3.0]


def test_the_value_loss_takes_the_larger_of_the_clipped_and_the_plain_error():
    facts = losses.Facts([VALUES], dtype=torch.float64)
    predicted = torch.tensor(PREDICTED, dtype=torch.float64, requires_grad=True)
    total, metrics = losses.value(clip=0.2).packed(torch.zeros_like(predicted), None, facts, predicted)
    assert total.item() == pytest.approx((0.9**2 + 2 * 0.8**2 + 3.0**2) / 2, rel=1e-14)
    assert torch.autograd.grad(total, predicted)[0].tolist() == pytest.approx([-0.9, 0, 3.0], rel=1e-14)
    assert losses.mean_metrics(metrics) == {
        "value_loss": pytest.approx((0.9**2 + 2 * 0.8**2 + 3.0**2) / 2 / 4),
        "value": pytest.approx((1.1 + 2 * 0.5 + 3) / 4),
        "value_clip_fraction": pytest.approx(2 / 4),
        "value_error": pytest.approx((0.9**2 + 2 * 0.5**2 + 3.0**2) / 4),
        "return": pytest.approx((2 + 2 * 1 + 0) / 4),
        "return_square": pytest.approx((4 + 2 * 1 + 0) / 4),
    }


def test_without_a_clip_it_is_half_the_squared_error_and_old_values_are_not_read():
    facts = losses.Facts([VALUES.replace(values=None)], dtype=torch.float64)
    predicted = torch.tensor(PREDICTED, dtype=torch.float64, requires_grad=True)
    total, _ = losses.value(clip=None, reduction="trajectory").packed(
        torch.zeros_like(predicted), None, facts, predicted
    )
    assert total.item() == pytest.approx((0.9**2 + 2 * 0.5**2 + 3.0**2) / 2 / 4, rel=1e-14)
    gradient = torch.autograd.grad(total, predicted)[0].tolist()
    assert gradient == pytest.approx([-0.9 / 4, -2 * 0.5 / 4, 3.0 / 4], rel=1e-14)
    with pytest.raises(DataError, match="has no values, which the loss needs"):
        losses.value().packed(torch.zeros_like(predicted), None, facts, predicted)


def test_values_of_untrained_tokens_do_not_matter():
    row = VALUES.replace(loss_weights=[9, 1, 0, 1])
    facts = losses.Facts([row], dtype=torch.float64)
    predicted = torch.tensor([1.1, math.inf, 3.0], dtype=torch.float64, requires_grad=True)
    total, metrics = losses.value().packed(torch.zeros_like(predicted), None, facts, predicted)
    assert total.item() == pytest.approx((0.9**2 + 3.0**2) / 2, rel=1e-14)
    assert torch.autograd.grad(total, predicted)[0].tolist() == pytest.approx([-0.9, 0, 3.0])
    assert all(math.isfinite(value) for value in losses.mean_metrics(metrics).values())


def test_bad_arguments_of_the_value_loss_are_named():
    facts = losses.Facts([VALUES])
    with pytest.raises(ValueError, match=r"predicted_values have shape \(2,\), the facts 3 predictions"):
        losses.value().packed(torch.zeros(3), None, facts, torch.zeros(2))
    with pytest.raises(ValueError, match=r"clip is -0\.2; allowed are numbers from 0 to inf"):
        losses.value(clip=-0.2)
