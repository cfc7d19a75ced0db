"""Properties of every loss: packing, unused predictions, coefficients, gradients, dtypes, devices."""

import numpy as np
import pytest
import torch

from treetrain import losses
from treetrain.layers.trajectory import Trajectory
from treetrain.losses import Facts

LOSSES = {
    "sft": losses.sft(),
    "sft per trajectory": losses.sft(reduction="trajectory"),
    "reinforce": losses.reinforce(),
    "reinforce k1": losses.reinforce(kl=0.3, kl_estimator="k1", reduction="trajectory"),
    "reinforce k2": losses.reinforce(kl=0.3, kl_estimator="k2"),
    "reinforce entropy": losses.reinforce(entropy=0.1),
    "ppo": losses.ppo(),
    "ppo k3 entropy": losses.ppo(kl=0.2, entropy=0.05),
    "grpo": losses.grpo(clip=0.1, kl=0.2),
    "grpo on policy": losses.grpo(on_policy=True, kl=0.2, kl_estimator="k1"),
    "ppo corrected": losses.ppo(importance_cap=1.2),
    "reinforce masked": losses.reinforce(importance_cap=1.2, importance_mode="token_mask"),
    "dapo of whole rows": losses.dapo(importance_cap=1.2, importance_mode="sequence_truncate"),
    "grpo masked by rows": losses.grpo(on_policy=True, importance_cap=1.2, importance_mode="sequence_mask"),
    "ppo with a floor": losses.ppo(importance_cap=1.2, importance_floor=0.8, importance_mode="token_mask"),
    "dapo with a floor by rows": losses.dapo(importance_floor=0.8, importance_mode="sequence_truncate"),
    "grpo without stale rows": losses.grpo(off_policy_kl=0.1),
    "dr_grpo": losses.dr_grpo(length=11.0, kl=0.1),
    "gspo": losses.gspo(clip_low=0.05, clip_high=0.1, kl=0.1),
    "gspo on policy": losses.gspo(on_policy=True),
    "distill": losses.distill(),
    "distill k2": losses.distill(estimator="k2", reduction="trajectory"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
CONSTANT_GRADIENT = {"sft", "sft per trajectory", "reinforce", "reinforce k1", "grpo on policy", "gspo on policy"}
WITH_ENTROPY = {"reinforce entropy", "ppo k3 entropy"}
FACTS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs")


def make_rows(seed: int = 0) -> list[Trajectory]:
    """Rows of 0 to 9 tokens, about a third of the tokens untrained, one row untrained as a whole."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in (7, 0, 1, 9, 5, 2, 6):
        weights = rng.uniform(0.2, 2, length) * (rng.uniform(size=length) > 0.3)
        weights[:2] = 1.0  # entry 1, so that rows of two tokens have something to train
        rows.append(
            Trajectory(
                rng.integers(0, 50, length),
                loss_weights=weights if length != 5 else np.zeros(5),
                advantages=rng.normal(size=length),
                **{name: rng.uniform(-3, -0.1, length) for name in FACTS},
            )
        )
    return rows


def make_logprobs(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropies = torch.rand(2, count, dtype=torch.float64, generator=generator)
    return (-3 * logprobs).requires_grad_(), (2 * entropies).requires_grad_()


def predictions(rows) -> int:
    return sum(max(len(row) - 1, 0) for row in rows)


def gradients(total, *inputs):
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


@every_loss
def test_packed_over_many_trajectories_is_the_sum_over_single_calls(loss):
    rows = make_rows()
    logprobs, entropies = make_logprobs(predictions(rows))
    total, metrics = loss.packed(logprobs, entropies, Facts(rows, dtype=torch.float64))
    single, single_metrics, start = torch.zeros((), dtype=torch.float64), {}, 0
    for row in rows:
        end = start + max(len(row) - 1, 0)
        part, part_metrics = loss(logprobs[start:end], entropies[start:end], row)
        single, single_metrics = single + part, losses.add_metrics(single_metrics, part_metrics)
        start = end
    torch.testing.assert_close(total, single, rtol=1e-13, atol=0)
    for one, other in zip(gradients(total, logprobs, entropies), gradients(single, logprobs, entropies)):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    assert losses.mean_metrics(metrics) == pytest.approx(losses.mean_metrics(single_metrics), rel=1e-13)


@every_loss
def test_predictions_of_weight_0_do_not_matter_whatever_they_hold(loss):
    rows = make_rows()
    used = np.concatenate([row.weights[1:] for row in rows]) != 0
    logprobs, entropies = make_logprobs(predictions(rows))
    keep = torch.from_numpy(used)
    few = Facts(rows, dtype=torch.float64, used=used)
    expected, expected_metrics = loss.packed(logprobs[keep], entropies[keep], few)
    expected_gradients = gradients(expected, logprobs, entropies)

    garbage = torch.full_like(logprobs, -torch.inf)
    logprobs_and_garbage = torch.where(keep, logprobs, garbage)
    entropies_and_garbage = torch.where(keep, entropies, torch.nan)
    garbled = ("advantages", *FACTS)
    worse = [
        row.replace(**{name: np.where(row.weights == 0, -1e300, getattr(row, name)) for name in garbled})
        for row in rows
    ]
    facts = Facts(worse, dtype=torch.float64)
    total, metrics = loss.packed(logprobs_and_garbage, entropies_and_garbage, facts)
    torch.testing.assert_close(total, expected, rtol=1e-14, atol=0)
    assert losses.mean_metrics(metrics) == pytest.approx(losses.mean_metrics(expected_metrics), rel=1e-14)
    for one, other in zip(gradients(total, logprobs, entropies), expected_gradients):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)
        assert not one[~keep].any()


@every_loss
def test_a_normaliser_of_parts_adds_up(loss):
    rows = make_rows()
    parts = loss.total_weight(rows[:3]) + loss.total_weight(rows[3:])
    assert parts > 0
    assert loss.normaliser(rows) == pytest.approx(parts, rel=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_coefficients_are_the_gradient_and_given_just_where_it_is_constant(name):
    rows = make_rows()
    used = np.concatenate([row.weights[1:] for row in rows]) != 0
    logprobs, _ = make_logprobs(int(used.sum()))
    facts = Facts(rows, dtype=torch.float64, used=used)
    coefficients = LOSSES[name].coefficients(facts)
    assert (coefficients is not None) == (name in CONSTANT_GRADIENT)
    if coefficients is not None:
        total, _ = LOSSES[name].packed(logprobs, None, facts)
        torch.testing.assert_close(gradients(total, logprobs)[0], coefficients, rtol=1e-14, atol=0)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_autograd_gradient_is_that_of_finite_differences(kl):
    rows = make_rows()
    facts = Facts(rows, dtype=torch.float64)
    logprobs, entropies = make_logprobs(predictions(rows))
    for make in (losses.reinforce, losses.ppo, losses.grpo):
        loss = make(kl=0.3, kl_estimator=kl, entropy=0.1)
        assert torch.autograd.gradcheck(
            lambda *inputs, loss=loss: loss.packed(*inputs, facts)[0], (logprobs, entropies)
        )


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computing_is_in_the_dtype_of_the_logprobs(loss, dtype):
    rows = make_rows()
    used = np.concatenate([row.weights[1:] for row in rows]) != 0
    logprobs, entropies = (x.to(dtype) for x in make_logprobs(int(used.sum())))
    total, metrics = loss.packed(logprobs, entropies, Facts(rows, dtype=dtype, used=used))
    assert total.dtype == dtype
    assert {x.dtype for pair in metrics.values() for x in pair} == {dtype}


@every_loss
def test_value_and_metrics_need_no_copy_from_the_device(loss):
    # Numbers cannot be read from the meta device: an .item() or a boolean index would raise.
    rows = make_rows()
    logprobs, entropies = (x.detach().to("meta").requires_grad_() for x in make_logprobs(predictions(rows)))
    facts = Facts(rows, device="meta", dtype=torch.float64)
    total, metrics = loss.packed(logprobs, entropies, facts)
    total.backward()
    assert all(x.is_meta and not x.requires_grad for pair in metrics.values() for x in pair)


def test_a_ratio_that_overflows_where_it_is_clipped_gives_gradient_0():
    row = Trajectory([5, 6, 7], advantages=[0, 1, -1], old_logprobs=[0, -500, -1])
    logprobs = torch.tensor([-1.0, -500.0], requires_grad=True)
    total, _ = losses.ppo(clip=0.2)(logprobs, None, row)
    assert total.item() == pytest.approx(-1.2 + 0.8, rel=1e-6)
    assert gradients(total, logprobs)[0].tolist() == [0.0, 0.0]


def test_rows_without_predictions_give_a_sum_of_0_with_a_gradient():
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for row in (Trajectory([]), Trajectory([7])):
        total, metrics = losses.grpo(kl=0.1)(empty, None, row)
        assert total.item() == 0.0
        assert gradients(total, empty)[0].shape == (0,)
        assert losses.mean_metrics(metrics) == {}


def test_metrics_of_parts_add_up_to_those_of_the_whole():
    a = {"nll": (6.0, 2.0), "kl": (torch.tensor(1.0), torch.tensor(4.0))}
    b = {"nll": (torch.tensor(4.0), 3.0), "entropy": (0.0, 0.0)}
    assert losses.mean_metrics(losses.add_metrics(a, b)) == {"nll": 2.0, "kl": 0.25}
    assert a["nll"] == (6.0, 2.0)
    assert losses.mean_metrics({}) == {}


def test_entropies_are_asked_for_only_by_an_entropy_bonus():
    assert {name for name, loss in LOSSES.items() if "entropies" in loss.needs} == WITH_ENTROPY
    assert {loss.scope for loss in LOSSES.values()} == {"trajectory"}
