"""Bad options, bad rows and bad shapes: each gets a message with both values and what to do."""

import inspect
import math

import pytest
import torch

from treetrain import losses
from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory

TWO = torch.zeros(2)
ROW = Trajectory([5, 6, 7], advantages=1.0, id="a")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.sft(reduction="mean"), "reduction is 'mean'; allowed are 'token', 'trajectory'"),
        (lambda: losses.ppo(reduction="batch"), "reduction is 'batch'; allowed are 'token', 'trajectory'"),
        (lambda: losses.grpo(kl_estimator="k4"), "kl_estimator is 'k4'; allowed are 'k1', 'k2', 'k3'"),
        (lambda: losses.reinforce(kl=-0.1), "kl is -0.1; allowed are numbers from 0 to any finite one"),
        (lambda: losses.reinforce(kl=math.inf), "kl is inf; allowed"),
        (lambda: losses.reinforce(entropy=math.nan), "entropy is nan; allowed"),
        (lambda: losses.ppo(clip=1.5), "clip is 1.5; allowed are numbers from 0 to 1"),
        (lambda: losses.ppo(clip=-0.2), "clip is -0.2; allowed"),
        (lambda: losses.ppo(clip_low=1.1), "clip_low is 1.1; allowed are numbers from 0 to 1"),
        (lambda: losses.grpo(clip_high=-1), "clip_high is -1; allowed are numbers from 0 to inf"),
        (lambda: losses.grpo(clip="0.2"), "clip is '0.2'; allowed"),
        (lambda: losses.grpo(kl=True), "kl is True; allowed"),
        (lambda: losses.grpo(on_policy=1), "on_policy is 1; allowed are True and False"),
        (lambda: losses.grpo(off_policy_kl=0), "off_policy_kl is 0; allowed are finite numbers above 0"),
        (
            lambda: losses.ppo(importance_cap=2.0, importance_floor=3.0),
            "importance_floor is 3.0 and importance_cap 2.0; the floor must not be above the cap",
        ),
        (lambda: losses.ppo(importance_cap=0), "importance_cap is 0; allowed are finite numbers above 0"),
        (
            lambda: losses.dapo(importance_mode="truncate"),
            "importance_mode is 'truncate'; allowed are 'token_truncate', ",
        ),
        (lambda: losses.dr_grpo(length=0), "length is 0; allowed are finite numbers above 0"),
        (lambda: losses.distill(estimator="k1"), "estimator is 'k1'; allowed are 'k2', 'k3'"),
        (lambda: losses.by_name("dr_grpo"), "loss 'dr_grpo' needs the option 'length', which has no default"),
    ],
)
def test_an_option_out_of_its_range_says_what_is_allowed(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("loss", "row", "message"),
    [
        (
            losses.reinforce(),
            ROW.replace(advantages=None),
            "trajectory 'a' has no advantages, .*give advantages=",
        ),
        (losses.ppo(), ROW, "trajectory 'a' has no old_logprobs, .*or pass on_policy=True"),
        (losses.grpo(), ROW, "trajectory 'a' has no old_logprobs, .*or pass on_policy=True"),
        (losses.grpo(on_policy=True, kl=0.1), ROW, "trajectory 'a' has no ref_logprobs, .*or set kl=0.0"),
        (
            losses.grpo(on_policy=True, importance_cap=2.0),
            ROW,
            "trajectory 'a' has no rollout_logprobs, .*or no importance_.* options",
        ),
        (losses.distill(), ROW, "trajectory 'a' has no teacher_logprobs, .*give teacher_logprobs="),
    ],
)
def test_a_missing_fact_is_named_before_the_step_and_in_the_step(loss, row, message):
    with pytest.raises(DataError, match=message):
        loss.normaliser([row])
    with pytest.raises(DataError, match=message):
        loss(TWO, None, row)


@pytest.mark.parametrize("reduction", ["token", "trajectory"])
def test_a_step_with_nothing_to_train_is_an_error(reduction):
    rows = [Trajectory([5, 6], loss_weights=[1, 0]), Trajectory([5]), Trajectory([])]
    loss = losses.sft(reduction=reduction)
    assert loss.total_weight(rows) == 0.0
    with pytest.raises(DataError, match="nothing to train: the loss weights of all 3 trajectories sum to 0"):
        loss.normaliser(rows)


@pytest.mark.parametrize("reduction", ["token", "trajectory"])
def test_a_mean_over_signed_weights_is_refused(reduction):
    row = Trajectory([5, 6, 7], loss_weights=[-9, 1, -0.5], id="a")
    message = r"trajectory 'a': loss_weights\[2\] = -0.5, but a mean needs weights of 0 or more"
    with pytest.raises(DataError, match=message):
        losses.sft(reduction=reduction).normaliser([row])
    if reduction == "trajectory":
        with pytest.raises(DataError, match=message):
            losses.sft(reduction=reduction)(TWO, None, row)
    else:  # a plain weighted sum, for callers with a normaliser of their own
        assert losses.sft()(torch.tensor([-2.0, -6.0]), None, row)[0].item() == -1.0


def test_shapes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"trajectory 'a' has 3 tokens, so 2 predictions, but logprobs .*\(3,\)"):
        losses.sft()(torch.zeros(3), None, ROW)
    facts = losses.Facts([ROW])
    with pytest.raises(ValueError, match=r"SFTLoss: logprobs have shape \(1,\), the facts 2 predictions"):
        losses.sft().packed(torch.zeros(1), None, facts)
    with pytest.raises(ValueError, match=r"entropies have shape \(2, 1\), the facts 2 predictions"):
        losses.sft().packed(TWO, torch.zeros(2, 1), facts)
    with pytest.raises(ValueError, match="ReinforceLoss needs entropies, got None"):
        losses.reinforce(entropy=0.1).packed(TWO, None, facts)


def test_a_loss_is_found_by_its_name_and_options():
    assert losses.by_name("grpo", clip=0.1, kl=0.01) == losses.grpo(clip=0.1, kl=0.01)
    assert losses.by_name("sft", reduction="trajectory") == losses.sft(reduction="trajectory")
    assert losses.by_name("reinforce") == losses.reinforce()
    assert losses.by_name("ppo", clip_high=0.3) == losses.ppo(clip_high=0.3)


def test_an_unknown_name_or_option_lists_what_exists():
    with pytest.raises(ValueError, match=r"unknown loss 'orpo'; did you mean grpo\?"):
        losses.by_name("orpo")
    with pytest.raises(ValueError, match="loss 'sft' has no option 'clip'; known: reduction"):
        losses.by_name("sft", clip=0.2)


def test_every_option_of_a_loss_is_a_keyword():
    kinds = {p.kind for make in losses.LOSSES.values() for p in inspect.signature(make).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (losses.reinforce, "clip"), (losses.reinforce, "on_policy"), (losses.ppo, "length"), (losses.grpo, "surrogate"),
        (losses.dapo, "clip"), (losses.gspo, "reduction"),
    ],
)  # fmt: skip
def test_a_policy_loss_refuses_options_that_it_has_no_use_for(make, option):
    assert option in inspect.signature(losses.PolicyLoss).parameters
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        make(**{option: 0.5})


def test_losses_do_not_change_after_they_are_made():
    with pytest.raises(AttributeError):
        losses.grpo().kl = 1.0  # type: ignore[misc]
