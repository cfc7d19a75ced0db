"""DPO: numbers worked out by hand, what a pair is, and what is refused."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from treetrain import losses
from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def value_and_gradients(
    loss: Any, rows: Sequence[Trajectory], now: Sequence[Sequence[float]]
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Value, gradient of every row and mean metrics, at the rows' log-probabilities `now`."""
    logprobs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in now]
    total, metrics = loss(logprobs, None, rows)
    value = total / loss.normaliser(rows)
    found = torch.autograd.grad(value, logprobs, allow_unused=True, materialize_grads=True)
    return value.item(), [gradient.tolist() for gradient in found], losses.mean_metrics(metrics)


# Pair p: tokens b and c of row 0, token d of row 2, weighted 1, 2 and 1; the prompt is not trained.
# Pair q: one token each. Row 1 belongs to no pair and is context.
ROWS = [
    Trajectory([1, 2, 3], loss_weights=[9, 1, 2], ref_logprobs=[9, -2, -1], pair="p", chosen=True, id="a"),
    Trajectory([1, 2, 9], loss_weights=0.0),
    Trajectory([1, 2, 5], loss_weights=[9, 0, 1], ref_logprobs=[9, 9, -1.5], pair="p", chosen=False, id="b"),
    Trajectory([4, 5], ref_logprobs=[9, -1], pair="q", chosen=False, id="c"),
    Trajectory([4, 6], ref_logprobs=[9, -3], pair="q", chosen=True, id="d"),
]
NOW = [[-1.0, -0.5], [-7.0, -7.0], [-7.0, -2.0], [-2.0], [-1.0]]
# Scores, sums of w (l - ref):
#   a: 1 (-1 + 2) + 2 (-0.5 + 1) = 2      b: -2 + 1.5 = -0.5     c: -2 + 1 = -1      d: -1 + 3 = 2
# so chosen - rejected is 2.5 and 3.


def step(loss, rows=ROWS, now=NOW):
    return value_and_gradients(loss, rows, now)


def test_dpo_is_minus_the_mean_log_sigmoid_of_the_margin():
    value, gradients, metrics = step(losses.dpo(beta=0.5))
    assert value == pytest.approx((-math.log(sigmoid(1.25)) - math.log(sigmoid(1.5))) / 2, rel=1e-14)
    p, q = 0.5 * sigmoid(-1.25) / 2, 0.5 * sigmoid(-1.5) / 2
    expected = [[-p, -2 * p], [0, 0], [0, p], [q], [-q]]
    for found, row in zip(gradients, expected):
        assert found == pytest.approx(row, rel=1e-13)
    assert metrics == {
        "accuracy": 1.0,
        "margin": pytest.approx((1.25 + 1.5) / 2),
        "chosen_reward": pytest.approx(0.5 * (2 + 2) / 2),
        "rejected_reward": pytest.approx(0.5 * (-0.5 - 1) / 2),
        "chosen_logps": pytest.approx((-2 - 1) / 2),
        "rejected_logps": pytest.approx((-2 - 2) / 2),
    }


def test_a_normaliser_is_the_number_of_pairs_that_have_something_to_train():
    loss = losses.dpo()
    idle = [row.replace(pair="r", loss_weights=0.0) for row in (ROWS[0], ROWS[2])]
    assert loss.normaliser([*ROWS, *idle]) == 2.0
    value, _, _ = step(loss)
    blank = [[-3.0, -4.0], [-5.0, -6.0]]
    assert step(loss, [*ROWS, *idle], [*NOW, *blank])[0] == pytest.approx(value, rel=1e-15)
    with pytest.raises(DataError, match="nothing to train"):
        loss.normaliser(idle)


def test_a_row_without_weights_scores_0_in_its_pair():
    rows = [ROWS[0], ROWS[2].replace(loss_weights=0.0)]
    assert step(losses.dpo(beta=0.5), rows, [NOW[0], NOW[2]])[0] == pytest.approx(-math.log(sigmoid(1.0)))
    empty = [ROWS[0], Trajectory([], pair="p", chosen=False)]
    assert step(losses.dpo(beta=0.5), empty, [NOW[0], []])[0] == pytest.approx(-math.log(sigmoid(1.0)))


def test_what_is_packed_together_is_what_lists_give():
    loss = losses.dpo()
    used = np.concatenate([row.weights[1:] for row in ROWS]) != 0
    facts = losses.Facts(ROWS, dtype=torch.float64, used=used)
    flat = torch.tensor(np.concatenate(NOW)[used], dtype=torch.float64)
    total, metrics = loss.packed(flat, None, facts)
    lists, list_metrics = loss([torch.tensor(row, dtype=torch.float64) for row in NOW], None, ROWS)
    torch.testing.assert_close(total, lists, rtol=1e-15, atol=0)
    assert losses.mean_metrics(metrics) == pytest.approx(losses.mean_metrics(list_metrics), rel=1e-15)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:2], r"pair 'p' has 1 chosen and 0 rejected rows \(chosen trajectory 'a'; rejected none\)"),
        ([*ROWS, ROWS[0].replace(id="e")], "pair 'p' has 2 chosen and 1 rejected rows .*'a', trajectory 'e'; rejected"),
        ([*ROWS[:4], ROWS[4].replace(chosen=False)], "pair 'q' has 0 chosen and 2 rejected rows"),
        ([ROWS[0].replace(chosen=None), ROWS[2]], "trajectory 'a' of pair 'p' does not say whether it is chosen"),
        ([*ROWS, ROWS[0].replace(pair=None, id=None)], r"trajectory number 5 \(from 0\) is trained but has no pair"),
        (
            [ROWS[0].replace(ref_logprobs=None), ROWS[2]],
            "'a' has no ref_logprobs, .*the engine computes them",
        ),
        ([ROWS[0].replace(loss_weights=-1.0), ROWS[2]], r"'a': loss_weights\[1\] = -1, but a mean needs weights"),
    ],
)
def test_rows_that_are_no_pairs_are_refused_before_the_step(rows, message):
    with pytest.raises(DataError, match=message):
        losses.dpo().normaliser(rows)


def test_pairs_are_found_by_any_hashable_name():
    names = [(1, "x"), None, (1, "x"), 0, 0]
    rows = [row.replace(pair=name) for row, name in zip(ROWS, names)]
    assert step(losses.dpo(beta=0.5), rows)[0] == pytest.approx(step(losses.dpo(beta=0.5))[0], rel=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.dpo(beta=0), "beta is 0; allowed are finite numbers above 0"),
        (lambda: losses.dpo(beta=math.inf), "beta is inf; allowed"),
        (lambda: losses.dpo(beta="0.1"), "beta is '0.1'; allowed"),
    ],
)
def test_an_option_out_of_its_range_says_what_is_allowed(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


def test_lists_of_another_length_or_shape_are_named():
    with pytest.raises(ValueError, match=r"trajectory 'a' has 3 tokens, so 2 predictions, but .*\(3,\)"):
        losses.dpo()([torch.zeros(3), *map(torch.tensor, NOW[1:])], None, ROWS)
