"""Generalised advantage estimation against its definition."""

import numpy as np
import pytest

import treetrain as tt


def by_definition(rewards, values, gamma, lam, last):
    """A_t = sum over l of (gamma lam)^l d_{t+l}, the sum written out."""
    following = [*values[1:], last]
    d = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [sum((gamma * lam) ** (s - t) * d[s] for s in range(t, len(d))) for t in range(len(d))]


@pytest.mark.parametrize("last", [0.0, 0.7])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (0.9, 0.0)])
def test_advantages_are_the_discounted_sums_of_the_critics_errors(gamma, lam, last):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    found = tt.gae(rewards, values, gamma, lam, last_value=last)
    expected = by_definition(rewards[1:], values[1:], gamma, lam, last)
    np.testing.assert_allclose(found.advantages, [0, *expected], rtol=1e-12)
    np.testing.assert_allclose(found.returns[1:], np.array(expected) + values[1:], rtol=1e-12)


def test_with_lambda_one_returns_are_the_discounted_rewards_to_come():
    found = tt.gae([0, 1, 2, 4], [9, 5, 6, 7], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(found.returns, [0, 1 + 1 + 1, 2 + 2, 4])


def test_text_of_tools_costs_no_time_and_its_rewards_go_to_the_action_before():
    actions = [0, 1, 1, 0, 0, 1, 0]
    rewards, values = [0, 0.5, 0, 0, 2.0, 1.0, 3.0], [0, 0.1, 0.2, 99, 99, 0.3, 99]
    found = tt.gae(rewards, values, 0.9, 0.8, actions=actions)
    expected = by_definition([0.5, 2.0, 4.0], [0.1, 0.2, 0.3], 0.9, 0.8, 0.0)
    np.testing.assert_allclose(found.advantages, [0, expected[0], expected[1], 0, 0, expected[2], 0], rtol=1e-12)
    assert found.returns[3] == 0


def test_one_reward_is_that_of_the_last_action():
    one = tt.gae(1.0, [0, 0.5, 0.5, 0.5], actions=[0, 1, 1, 0])
    np.testing.assert_array_equal(one.advantages, tt.gae([0, 0, 1, 0], [0, 0.5, 0.5, 0.5], actions=[0, 1, 1, 0])[0])


@pytest.mark.parametrize("length", [0, 1])
def test_rows_without_predictions_have_no_advantages(length):
    found = tt.gae(1.0, np.zeros(length))
    assert found.advantages.shape == found.returns.shape == (length,) and not found.advantages.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tt.gae([0, 1], [0, 1, 2]), "rewards has 2 entries, but there are 3 token ids"),
        (lambda: tt.gae([0, 1], [0, np.nan]), r"values\[1\] is nan"),
        (lambda: tt.gae([0, 5, 0], [0, 1, 2], actions=[0, 0, 1]), r"rewards\[1\] = 5 comes before any action"),
        (lambda: tt.gae([0, 1], [0, 1], gamma=1.5), "gamma is 1.5"),
        (lambda: tt.gae([0, 1], [0, 1], lam=-1), "lam is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
