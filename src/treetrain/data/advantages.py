"""Group rewards to GRPO advantages."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError


def group_advantages(
    trajectories: Iterable[Trajectory],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-4,
    leave_one_out: bool = False,
    clip: float | None = None,
) -> list[Trajectory]:
    """Give every row its reward relative to its group, as one advantage for all of its tokens.

    A = (reward - mean of the group) / (std of the group + eps), GRPO's outcome supervision (arXiv 2402.03300,
    section 4.1.2), with TRL's conventions: sample standard deviation (n - 1), eps 1e-4. Without
    `divide_by_std` this is Dr. GRPO's advantage (arXiv 2503.20783). Mean and std are over episodes: the calls
    of one conversation share its reward and count once. A group of one, or of equal rewards, is not divided:
    with the mean subtracted its advantages are 0.

    Args:
        trajectories: rows with `reward` and `group`; rows of equal `group` and `episode` are one episode.
        subtract_mean: subtract the group's mean reward.
        divide_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in units of the reward.
        leave_one_out: subtract the mean of the group's other episodes instead, which an episode's own reward has no
            part in: RLOO (arXiv 2402.14740, section 2.3), there without the division.
        clip: above 0; what is further from 0 is set to this distance.

    Returns:
        New trajectories in the same order, with `advantages` set.

    Raises:
        DataError: a row without reward or group; two rows of one episode with different rewards.
        ValueError: `leave_one_out` without `subtract_mean`, or a `clip` that is not above 0.
    """
    if leave_one_out and not subtract_mean:
        raise ValueError("leave_one_out says which mean is subtracted, but subtract_mean is False; give one of them")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip!r}; allowed are numbers above 0, and None")
    rows = list(trajectories)
    rewards = _episode_rewards(rows)
    advantage: dict[tuple[Hashable, Hashable], float] = {}
    for group, episodes in rewards.items():
        values = np.array(list(episodes.values()))
        scaled = values - values.mean() if subtract_mean else values
        if leave_one_out and len(values) > 1:
            scaled = scaled * (len(values) / (len(values) - 1))  # r - mean of the others, from r - mean of all
        if divide_by_std and np.ptp(values) > 0:
            scaled = scaled / (values.std(ddof=1) + eps)
        elif subtract_mean and np.ptp(values) == 0:
            scaled = np.zeros_like(values)  # not the rounding error of the mean
        scaled = scaled if clip is None else scaled.clip(-clip, clip)
        advantage |= {(group, episode): float(value) for episode, value in zip(episodes, scaled)}
    return [row.replace(advantages=advantage[row.group, _episode(row, number)]) for number, row in enumerate(rows)]


def _episode_rewards(rows: Sequence[Trajectory]) -> dict[Hashable, dict[Hashable, float]]:
    """Reward of every episode of every group."""
    rewards: dict[Hashable, dict[Hashable, float]] = {}
    for number, row in enumerate(rows):
        name = f"row {number}" + ("" if row.id is None else f" ({row.id})")
        for fact in ("reward", "group"):
            if getattr(row, fact) is None:
                raise DataError(f"{name} has no {fact}; group advantages need reward and group in every row")
        assert row.reward is not None
        known = rewards.setdefault(row.group, {}).setdefault(_episode(row, number), row.reward)
        if known != row.reward:
            raise DataError(
                f"{name} has reward {row.reward}, an earlier row of its episode {row.episode!r} has {known}; "
                "an episode has one reward: give rows of different episodes different `episode`s"
            )
    return rewards


def _episode(row: Trajectory, number: int) -> Hashable:
    """What tells episodes of a group apart; a row without one is an episode by itself."""
    return ("row", number) if row.episode is None else ("episode", row.episode)
