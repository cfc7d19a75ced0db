"""KTO against numbers worked out by hand, its reference points, and what is refused."""

import pytest
import torch

from support.loss_rows import sigmoid, value_and_gradients
from treetrain import losses
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

# Scores, sums of w (l - ref): a: 1 * 1 + 2 * 0.5 = 2, b: -1, c: 3; row d trains nothing.
ROWS = [
    Trajectory([1, 2, 3], loss_weights=[9, 1, 2], ref_logprobs=[9, -2, -1], chosen=True, id="a"),
    Trajectory([1, 5], ref_logprobs=[9, -1], chosen=False, id="b"),
    Trajectory([4, 6], ref_logprobs=[9, -4], chosen=True, id="c"),
    Trajectory([4, 6], loss_weights=0.0, id="d"),
]
NOW = [[-1.0, -0.5], [-2.0], [-1.0], [-9.0]]
# Two prompts with each other's answers: scores 1 and -0.5.
MISMATCHED = [Trajectory([1, 6], ref_logprobs=[9, -3]), Trajectory([4, 5], ref_logprobs=[9, -1.5])]
MISMATCHED_NOW = [[-2.0], [-2.0]]


def step(loss, rows=ROWS, now=NOW):
    return value_and_gradients(loss, rows, now)


def by_hand(z: float, beta: float = 0.5, good: float = 1.0, bad: float = 1.0) -> float:
    desirable = (1 - sigmoid(beta * (2 - z))) + (1 - sigmoid(beta * (3 - z)))
    return (good * desirable + bad * (1 - sigmoid(beta * (z + 1)))) / 3


def test_by_default_the_reference_point_is_the_mean_score_of_the_rows():
    value, gradients, metrics = step(losses.kto(beta=0.5))
    z = (2 - 1 + 3) / 3
    assert value == pytest.approx(by_hand(z), rel=1e-14)
    # d (1 - sigmoid(x)) = -sigmoid(x) sigmoid(-x); z has no gradient.
    slope = {x: 0.5 * sigmoid(0.5 * x) * sigmoid(-0.5 * x) / 3 for x in (2 - z, z + 1, 3 - z)}
    assert gradients[0] == pytest.approx([-slope[2 - z], -2 * slope[2 - z]], rel=1e-13)
    assert gradients[1:] == [pytest.approx([slope[z + 1]]), pytest.approx([-slope[3 - z]]), [0]]
    assert metrics == {
        "kl": pytest.approx(z),
        "accuracy": 1.0,
        "chosen_reward": pytest.approx(0.5 * 2.5),
        "rejected_reward": pytest.approx(-0.5),
        "chosen_logps": pytest.approx((-2 - 1) / 2),
        "rejected_logps": pytest.approx(-2),
    }


def test_rows_are_weighted_by_their_kind():
    loss = losses.kto(beta=0.5, desirable_weight=1.5, undesirable_weight=0.25)
    assert step(loss)[0] == pytest.approx(by_hand(4 / 3, good=1.5, bad=0.25), rel=1e-14)


def test_the_reference_point_of_mismatched_rows_is_their_mean_score():
    rows, now = [*ROWS, *MISMATCHED], [*NOW, *MISMATCHED_NOW]
    loss = losses.kto(beta=0.5, reference_point="mismatched")
    value, gradients, metrics = step(loss, rows, now)
    assert value == pytest.approx(by_hand(0.25), rel=1e-14)
    assert metrics["kl"] == pytest.approx(0.25)
    assert gradients[-2:] == [[0], [0]] and loss.normaliser(rows) == 3.0


def test_the_reference_point_is_never_below_0():
    low = [row.replace(ref_logprobs=[9, -0.5]) for row in MISMATCHED]  # scores -1.5
    loss = losses.kto(beta=0.5, reference_point="mismatched")
    assert step(loss, [*ROWS, *low], [*NOW, *MISMATCHED_NOW])[0] == pytest.approx(by_hand(0.0), rel=1e-14)
    poor = [ROWS[1], ROWS[1].replace(chosen=True)]  # scores -1
    value, _, metrics = step(losses.kto(beta=0.5), poor, [[-2.0], [-2.0]])
    assert (value, metrics["kl"]) == (pytest.approx((sigmoid(-0.5) + sigmoid(0.5)) / 2), 0.0)


def test_a_given_reference_point_lets_a_step_be_spread_over_calls():
    loss = losses.kto(beta=0.5, reference_point=0.75)
    assert step(loss)[0] == pytest.approx(by_hand(0.75), rel=1e-14)
    parts = [loss([torch.tensor(row, dtype=torch.float64)], None, [own])[0] for row, own in zip(NOW, ROWS)]
    assert float(sum(parts)) / loss.normaliser(ROWS) == pytest.approx(by_hand(0.75), rel=1e-14)
    assert not loss.needs_step


def test_a_part_of_the_step_is_refused_where_the_reference_point_is_of_the_whole():
    loss = losses.kto()
    assert loss.needs_step
    bound = loss.for_step(ROWS)
    assert not bound.needs_step and bound.normaliser(ROWS) == 3.0
    with pytest.raises(ValueError, match="reference point is a mean over 3 rows of the step, this call has 2 of them"):
        bound.check(ROWS[:2])
    rows = [*ROWS, *MISMATCHED]
    with pytest.raises(ValueError, match="over 5 rows of the step, this call has 4"):
        losses.kto(reference_point="mismatched").for_step(rows).check(rows[:-1])


@pytest.mark.parametrize(
    ("loss", "rows", "message"),
    [
        (losses.kto(), [*ROWS, *MISMATCHED], r"trajectory number 4 \(from 0\) does not say whether it is desirable"),
        (losses.kto(reference_point="mismatched"), ROWS, "no row for KTO's reference point: .*without `chosen`"),
        (losses.kto(), [ROWS[0].replace(ref_logprobs=None)], "'a' has no ref_logprobs"),
        (losses.kto(), [ROWS[0].replace(loss_weights=-1.0)], "a mean needs weights of 0 or more"),
        (losses.kto(), ROWS[3:], "nothing to train"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_step(loss, rows, message):
    with pytest.raises(DataError, match=message):
        loss.normaliser(rows)


def test_pairs_may_be_used_without_being_pairs():
    paired = [row.replace(pair="p") for row in ROWS]
    assert step(losses.kto(beta=0.5), paired)[0] == step(losses.kto(beta=0.5))[0]
