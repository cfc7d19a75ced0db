import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.advantages import group_advantages


def rows(*rewards, group="g", episode=None):
    return [Trajectory([1, 2], reward=r, group=group, episode=episode) for r in rewards]


def first(trajectories):
    return [float(t.advantages[0]) for t in trajectories]


def test_advantages_are_the_hand_computed_ones_with_the_sample_standard_deviation():
    done = group_advantages(rows(0, 0, 1, 3) + rows(5, 7, group="h"))
    # mean 1, squares 1 1 0 4, variance 6 / 3; mean 6, squares 1 1, variance 2 / 1
    expected = [-1 / (2**0.5 + 1e-4), -1 / (2**0.5 + 1e-4), 0, 2 / (2**0.5 + 1e-4)]
    assert first(done[:4]) == pytest.approx(expected, rel=1e-12)
    assert first(done[4:]) == pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], rel=1e-12)
    assert done[0].advantages is not None and done[0].advantages.tolist() == [expected[0]] * 2


def test_the_std_can_be_turned_off_and_the_mean_taken_over_the_other_episodes():
    assert first(group_advantages(rows(1, 3), divide_by_std=False)) == [-1, 1]
    alone = group_advantages(rows(0, 3, 9), divide_by_std=False, leave_one_out=True)
    assert first(alone) == pytest.approx([0 - 6, 3 - 4.5, 9 - 1.5])


def test_a_group_of_one_and_a_group_of_equal_rewards_get_zero():
    assert first(group_advantages(rows(5))) == [0]
    assert first(group_advantages(rows(0.1, 0.1, 0.1))) == [0, 0, 0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6))
def test_the_number_of_calls_in_a_conversation_does_not_change_the_group_statistics(episodes):
    calls = [t for e, (reward, n) in enumerate(episodes) for t in rows(reward, episode=e) * n]
    once = group_advantages([t for e, (reward, _) in enumerate(episodes) for t in rows(reward, episode=e)])
    expected = np.repeat(first(once), [n for _, n in episodes])
    np.testing.assert_array_equal(first(group_advantages(calls)), expected)


def test_equal_episode_names_in_different_groups_are_different_episodes():
    done = group_advantages(rows(0, episode=0) + rows(1, episode=1) + rows(4, group="h", episode=0))
    assert first(done)[2] == 0 and first(done)[0] < 0 < first(done)[1]


def test_rows_without_reward_or_group_and_episodes_with_two_rewards_are_refused_by_name():
    with pytest.raises(DataError, match=r"row 1 \(x\) has no reward"):
        group_advantages([*rows(1), Trajectory([1], group="g", id="x")])
    with pytest.raises(DataError, match="row 0 has no group"):
        group_advantages([Trajectory([1], reward=1.0)])
    with pytest.raises(DataError, match=r"reward 2.0, an earlier row of its episode 'e' has 1.0"):
        group_advantages(rows(1, 2, episode="e"))
