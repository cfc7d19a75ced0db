"""Mixtures: several losses on the same rows, or on rows of their own."""

import numpy as np
import pytest
import torch

from treetrain import losses
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

FACTS = {"old_logprobs": [9, -2, -1], "ref_logprobs": [9, -1, -2]}
POLICY = [
    Trajectory([1, 2, 3], loss_weights=[9, 1, 2], advantages=1.0, **FACTS, id="p"),
    Trajectory([1, 2, 4], advantages=-0.5, **FACTS, id="q"),
]
PLAIN = [Trajectory([7, 8, 9, 5], loss_weights=[9, 0, 1, 1], id="s"), Trajectory([7, 8], id="t")]
PAIR = [Trajectory([5, 6, k], ref_logprobs=[9, -1, -2], pair="x", chosen=k == 1, id=f"pair {k}") for k in (0, 1)]
NOW = {
    "p": [-1.0, -2.0],
    "q": [-1.0, -0.5],
    "s": [-3.0, -1.5, -0.25],
    "t": [-0.75],
    "pair 0": [-1, -1.5],
    "pair 1": [-1, -2.5],
}


def given(rows) -> list[torch.Tensor]:
    return [torch.tensor(NOW[row.id], dtype=torch.float64, requires_grad=True) for row in rows]


def packed(loss, rows, entropies=None):
    """Value, gradient and metrics of rows packed together, only what is trained."""
    used = np.concatenate([row.weights[1:] for row in rows]) != 0
    flat = torch.cat(given(rows)).detach()[torch.from_numpy(used)].requires_grad_()
    spread = None if entropies is None else torch.full_like(flat, entropies)
    facts = losses.Facts.pack(rows, dtype=torch.float64, used=used)
    total, metrics = loss.packed(flat, spread, facts)
    return total, torch.autograd.grad(total, flat, materialize_grads=True)[0], losses.mean_metrics(metrics), facts


def alone(loss, rows):
    """Value, gradient and metrics of a loss for its rows by itself."""
    total, gradient, metrics, _ = packed(loss, rows)
    normaliser = loss.normaliser(rows)
    return total.item() / normaliser, gradient / normaliser, metrics


def test_losses_on_the_same_rows_add_up_by_weight_each_with_its_own_mean():
    grpo, sft = losses.grpo(kl=0.1), losses.sft()
    mixed = losses.mix({"policy": grpo, "sft": sft}, weights={"sft": 0.1}).for_step(POLICY)
    total, gradient, metrics, _ = packed(mixed, POLICY)
    one, other = alone(grpo, POLICY), alone(sft, POLICY)
    assert total.item() == pytest.approx(one[0] + 0.1 * other[0], rel=1e-14)
    torch.testing.assert_close(gradient, one[1] + 0.1 * other[1], rtol=1e-13, atol=0)
    assert mixed.normaliser(POLICY) == 1.0
    named = {f"policy/{name}": value for name, value in one[2].items()} | {"sft/nll": other[2]["nll"]}
    named |= {"policy/loss": one[0], "sft/loss": other[0]}
    assert metrics == {name: pytest.approx(value, rel=1e-13) for name, value in named.items()}


ROWS = [PLAIN[0], POLICY[0], PAIR[0], POLICY[1], PLAIN[1], PAIR[1]]
LOSSES = {"policy": losses.grpo(), "preference": losses.dpo(), "sft": losses.sft()}
BY_NAME = {"p": "policy", "q": "policy", "s": "sft", "t": "sft", "pair 0": "preference", "pair 1": "preference"}


def by_name(row: Trajectory) -> str:
    return BY_NAME[row.id]


def test_every_row_goes_to_its_own_loss():
    mixed = losses.mix(LOSSES, weights={"preference": 2.0, "sft": 0.5}, select=by_name).for_step(ROWS)
    assert mixed.scope == "batch"
    total, gradient, metrics, facts = packed(mixed, ROWS)
    parts = {"policy": alone(LOSSES["policy"], POLICY), "preference": alone(LOSSES["preference"], PAIR)}
    parts["sft"] = alone(LOSSES["sft"], PLAIN)
    assert total.item() == pytest.approx(parts["policy"][0] + 2 * parts["preference"][0] + 0.5 * parts["sft"][0])
    rows = facts.rows.numpy()
    for name, weight, numbers in (("policy", 1, (1, 3)), ("preference", 2, (2, 5)), ("sft", 0.5, (0, 4))):
        own = gradient[torch.from_numpy(np.isin(rows, numbers))]
        torch.testing.assert_close(own, weight * parts[name][1], rtol=1e-13, atol=1e-16)
        assert metrics[f"{name}/loss"] == pytest.approx(parts[name][0])


def test_rows_that_a_function_gives_to_no_loss_are_not_trained():
    mixed = losses.mix({"sft": losses.sft()}, select=lambda row: None if row.id == "s" else "sft").for_step(PLAIN)
    total, gradient, _, _ = packed(mixed, PLAIN)
    assert total.item() == pytest.approx(0.75)
    assert gradient.tolist() == [0, 0, -1]


def test_parts_of_a_step_add_up_to_the_whole():
    mixed = losses.mix({"policy": losses.ppo(), "sft": losses.sft()}, weights={"sft": 0.3}, select=by_name)
    rows = [*POLICY, *PLAIN]
    bound = mixed.for_step(rows)
    whole, gradient, metrics, _ = packed(bound, rows)
    pieces = [packed(bound, piece) for piece in (rows[:1], rows[1:3], rows[3:])]
    assert sum(piece[0].item() for piece in pieces) == pytest.approx(whole.item(), rel=1e-14)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces]), gradient, rtol=1e-13, atol=0)
    assert sum(bound.total_weight(piece) for piece in (rows[:1], rows[1:3], rows[3:])) == pytest.approx(1.0)
    one_by_one = {}
    for row, now in zip(rows, given(rows)):
        one_by_one = losses.add_metrics(one_by_one, bound(now, None, row)[1])
    assert losses.mean_metrics(one_by_one) == pytest.approx(metrics, rel=1e-13)


def test_a_loss_of_which_the_step_has_no_row_counts_nothing():
    mixed = losses.mix({"policy": losses.ppo(), "sft": losses.sft()}, select=by_name).for_step(PLAIN)
    total, _, metrics, _ = packed(mixed, PLAIN)
    assert total.item() == pytest.approx(alone(losses.sft(), PLAIN)[0], rel=1e-14)
    assert set(metrics) == {"sft/nll", "sft/loss"}


def test_coefficients_are_the_gradient_where_every_loss_is_linear():
    linear = {"policy": losses.grpo(on_policy=True), "sft": losses.sft()}
    for select, rows in ((by_name, [*POLICY, *PLAIN]), (None, POLICY)):
        mixed = losses.mix(linear, weights={"sft": 0.25}, select=select).for_step(rows)
        _, gradient, _, facts = packed(mixed, rows)
        found = mixed.coefficients(facts)
        assert found is not None
        torch.testing.assert_close(found, gradient, rtol=1e-13, atol=0)
    curved = losses.mix({"policy": losses.grpo(), "sft": losses.sft()}).for_step(POLICY)
    assert curved.coefficients(losses.Facts.pack(POLICY)) is None


def test_needs_of_the_losses_are_those_of_the_mixture():
    mixed = losses.mix({"a": losses.ppo(entropy=0.1, kl=0.1), "b": losses.distill(), "c": losses.sft()})
    assert mixed.scope == "trajectory" and not mixed.mergeable
    assert mixed.needs == (
        "logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropies", "teacher_logprobs", "step"
    )  # fmt: skip
    assert losses.mix({"c": losses.sft()}).needs == ("logprobs", "step")
    _, _, metrics, _ = packed(losses.mix({"a": losses.ppo(entropy=0.1)}).for_step(POLICY), POLICY, entropies=0.5)
    assert metrics["a/entropy"] == pytest.approx(0.5)


def test_a_mixture_that_was_not_told_of_the_step_is_refused():
    mixed = losses.mix({"policy": losses.grpo(), "sft": losses.sft()})
    assert "step" in mixed.needs
    for call in (lambda: packed(mixed, POLICY), lambda: mixed.normaliser(POLICY)):
        with pytest.raises(ValueError, match=r"mixture of policy, sft divides .* call mixture\.for_step"):
            call()
    bound = mixed.for_step(POLICY)
    assert "step" not in bound.needs and bound.normaliser(POLICY) == 1.0


@pytest.mark.parametrize(
    ("mixed", "rows", "message"),
    [
        (
            losses.mix({"policy": losses.grpo(), "sft": losses.sft()}), PLAIN,
            "loss 'policy' of the mixture: .*'s' has no advantages",
        ),
        (
            losses.mix(LOSSES, select=by_name), [*POLICY, PAIR[0]],
            "loss 'preference' of the mixture: pair 'x' has 0 chosen and 1 rejected .*counted among its own 1",
        ),
        (losses.mix({"sft": losses.sft()}, select=lambda row: None), PLAIN, "nothing to train"),
        (losses.mix({"sft": losses.sft()}, weights={"sft": 0}), PLAIN, "nothing to train"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused_before_the_step(mixed, rows, message):
    with pytest.raises(DataError, match=message):
        mixed.for_step(rows).normaliser(rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.mix({}), r"the losses are \[\]; give a mapping such as"),
        (lambda: losses.mix({"a": losses.sft()}, weights={"b": 1.0}), r"weights name \['b'\], the losses are \['a'\]"),
        (lambda: losses.mix({"a": losses.sft()}, weights={"a": -1.0}), "the weight of 'a' is -1.0; allowed"),
        (lambda: losses.mix({"a": "sft"}), "'a' is a str; mix takes losses of tt.losses.Loss"),
        (lambda: losses.mix({"a": losses.mix({"b": losses.sft()})}), "'a' is a Mixture; mix takes .* no mixtures"),
        (lambda: losses.mix({"a": losses.sft()}, select="rows"), "select is 'rows'; give a function of a trajectory"),
        (
            lambda: losses.mix({"a": losses.sft()}, select=lambda row: "b").for_step(PLAIN),
            "select gave 'b' for trajectory 's'; the mixed losses are a, and",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_loss_whose_rows_are_all_untrained_counts_nothing():
    rows = [POLICY[0].replace(loss_weights=0.0), *PLAIN]
    mixed = losses.mix({"policy": losses.ppo(), "sft": losses.sft()}, select=by_name).for_step(rows)
    assert mixed.totals == (0.0, 3.0)
    assert packed(mixed, rows)[0].item() == pytest.approx(alone(losses.sft(), PLAIN)[0], rel=1e-14)


def test_a_policy_with_a_value_loss_mixes_with_another_loss():
    rows = [row.replace(returns=[9, 0.5, -1]) for row in POLICY]
    policy = losses.ppo(value_coefficient=0.5, value_clip=None)
    mixed = losses.mix({"policy": policy, "sft": losses.sft()}, weights={"sft": 0.1}).for_step(rows)
    facts, values = losses.Facts.pack(rows, dtype=torch.float64), torch.linspace(-1, 1, 4, dtype=torch.float64)
    now = torch.cat(given(rows)).detach()
    total, metrics = mixed.packed(now, None, facts, values)
    alone_total = policy.packed(now, None, facts, values)[0] / policy.normaliser(rows)
    nll = losses.sft().packed(now, None, facts)[0] / losses.sft().normaliser(rows)
    assert total.item() == pytest.approx((alone_total + 0.1 * nll).item(), rel=1e-14)
    assert "policy/value_loss" in metrics
