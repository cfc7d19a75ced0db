"""Losses against the numbers that TRL 1.16 gives for the same log-probabilities.

The constants were printed by `support.trl_losses`, which calls TRL's own loss code; where TRL is installed the second
test of each kind computes them again.
"""

from typing import NamedTuple

import pytest
import torch

from support import trl_losses
from treetrain import losses


class Pair(NamedTuple):
    """A loss of ours, TRL's call, and the number it gave."""

    ours: losses.Loss
    theirs: tuple
    value: float


PAIRS = {
    "dpo": Pair(losses.dpo(beta=0.1), ("sigmoid", 0.1), 0.6757527245000325),
    "dpo steep": Pair(losses.dpo(beta=0.7), ("sigmoid", 0.7), 0.6373400603140347),
}
LOGGED = {
    "chosen_reward": ("rewards/chosen", -0.07093333333333336),
    "rejected_reward": ("rewards/rejected", -0.3371666666666666),
    "accuracy": ("rewards/accuracies", 0.6666666865348816),
    "margin": ("rewards/margins", 0.26623333333333327),
    "chosen_logps": ("logps/chosen", -2.0453333333333332),
    "rejected_logps": ("logps/rejected", -3.000666666666667),
}
POLICY = {
    "grpo": Pair(losses.grpo(kl=0.1), ("grpo", {"beta": 0.1}), -0.017389225437469458),
    "dapo": Pair(losses.dapo(), ("dapo", {"epsilon_high": 0.28}), 0.16052812205659125),
    "dr_grpo": Pair(losses.dr_grpo(length=8, kl=0.05), ("dr_grpo", {"beta": 0.05}), 0.07187870738633673),
    "gspo": Pair(
        losses.gspo(),
        ("grpo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
        0.05801277285426552,
    ),
    "gspo with kl": Pair(
        losses.gspo(clip_low=0.1, clip_high=0.1, kl=0.2),
        ("grpo", {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1, "beta": 0.2}),
        0.009331528472553826,
    ),
}
# TRL's "grpo" with beta 0.1 and each of its corrections, capped at 1.5
CORRECTED = {
    "token_truncate": 0.2808555584498946,
    "token_mask": -0.006321063229943987,
    "sequence_truncate": 0.1094459856423653,
    "sequence_mask": -0.09842501963608268,
}


@pytest.fixture
def with_trl():
    trl = pytest.importorskip("trl", reason="TRL is not installed: its numbers stand as constants")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the constants are of TRL 1.16, this is {trl.__version__}")


def ours(loss) -> tuple[float, dict[str, float]]:
    """Value and metrics on TRL's rows."""
    rows = trl_losses.rows()
    if loss.scope == "batch":
        total, metrics = loss(trl_losses.logprobs(), None, rows)
    else:
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for row, now in zip(rows, trl_losses.logprobs()):
            part, part_metrics = loss(now, None, row)
            total, metrics = total + part, losses.add_metrics(metrics, part_metrics)
    return float(total) / loss.normaliser(rows), losses.mean_metrics(metrics)


@pytest.mark.parametrize("name", PAIRS)
def test_pair_losses_are_those_of_trl(name):
    assert ours(PAIRS[name].ours)[0] == pytest.approx(PAIRS[name].value, rel=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_trl_still_gives_the_pair_losses(name, with_trl):
    assert trl_losses.dpo(*PAIRS[name].theirs)[0] == pytest.approx(PAIRS[name].value, rel=1e-12)


def test_what_dpo_reports_is_what_trl_logs():
    _, metrics = ours(PAIRS["dpo steep"].ours)
    assert metrics == {name: pytest.approx(value, rel=1e-7) for name, (_, value) in LOGGED.items()}


def test_trl_still_logs_it(with_trl):
    _, logged = trl_losses.dpo("sigmoid", 0.7)
    assert {name: logged[key] for name, (key, _) in LOGGED.items()} == {
        name: pytest.approx(value, rel=1e-12) for name, (_, value) in LOGGED.items()
    }


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_are_those_of_trl(name):
    assert ours(POLICY[name].ours)[0] == pytest.approx(POLICY[name].value, rel=1e-12)


@pytest.mark.parametrize("name", POLICY)
def test_trl_still_gives_the_policy_losses(name, with_trl):
    kind, options = POLICY[name].theirs
    assert trl_losses.grpo(kind, **options) == pytest.approx(POLICY[name].value, rel=1e-12)


@pytest.mark.parametrize("mode", CORRECTED)
def test_corrected_policy_losses_are_those_of_trl(mode):
    loss = losses.grpo(kl=0.1, importance_cap=1.5, importance_mode=mode)
    assert ours(loss)[0] == pytest.approx(CORRECTED[mode], rel=1e-12)


@pytest.mark.parametrize("mode", CORRECTED)
def test_trl_still_gives_the_corrected_policy_losses(mode, with_trl):
    found = trl_losses.grpo("grpo", beta=0.1, correction=trl_losses.correction(mode, 1.5))
    assert found == pytest.approx(CORRECTED[mode], rel=1e-12)
