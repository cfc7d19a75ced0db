"""Advantages from the rewards of a group, and per-token advantages from rewards and a critic's values."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory, per_token
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
    of one conversation share its reward and count once. A group of one episode, or of equal rewards, is not divided;
    with `subtract_mean` its advantages are 0.

    Args:
        trajectories: rows with `reward` and `group`; rows of equal `group` and `episode` are one episode.
        subtract_mean: subtract the group's mean reward.
        divide_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation.
        leave_one_out: subtract the mean of the group's other episodes: RLOO (arXiv 2402.14740, section 2.3). RLOO
            itself does not divide by the standard deviation.
        clip: clamp advantages to [-clip, clip]; above 0.

    Returns:
        New trajectories in the same order, with `advantages` set.

    Raises:
        DataError: a row without reward or group; two rows of one episode with different rewards.
        ValueError: `leave_one_out` without `subtract_mean`, or a `clip` that is not above 0.
    """
    rows = list(trajectories)
    options = {"subtract_mean": subtract_mean, "divide_by_std": divide_by_std, "eps": eps}
    values = advantages_of_groups(rows, **options, leave_one_out=leave_one_out, clip=clip)
    return [row.replace(advantages=value) for row, value in zip(rows, values.tolist(), strict=True)]


def advantages_of_groups(
    rows: Sequence[Trajectory],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-4,
    leave_one_out: bool = False,
    clip: float | None = None,
) -> Float64[np.ndarray, "K"]:
    """The advantage of every row, computed from `columns_of(rows)`; see `group_advantages`."""
    if leave_one_out and not subtract_mean:
        raise ValueError("leave_one_out says which mean is subtracted, but subtract_mean is False; give one of them")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip!r}; allowed are numbers above 0, and None")
    columns = columns_of(rows)
    for fact, lacking in (("reward", np.isnan(columns.reward)), ("group", columns.group < 0)):
        if lacking.any():
            row = _name(rows, int(lacking.argmax()))
            raise DataError(f"{row} has no {fact}; group advantages need reward and group in every row")
    # A row without an episode is an episode by itself.
    episode = np.where(columns.episode < 0, -1 - np.arange(len(rows)), columns.episode)
    names = np.stack([columns.group, episode], axis=1)
    found, first, of_row = np.unique(names, axis=0, return_index=True, return_inverse=True)
    of_row, rewards = of_row.reshape(-1), columns.reward[first]
    differs = np.flatnonzero(columns.reward != rewards[of_row])
    if len(differs):
        number = int(differs[0])
        raise DataError(
            f"{_name(rows, number)} has reward {columns.reward[number]}, an earlier row of its episode "
            f"{rows[number].episode!r} has {rewards[of_row[number]]}; "
            "an episode has one reward: give rows of different episodes different `episode`s"
        )
    advantages = np.empty(len(rewards))
    # Episodes sorted by group, then by their first rows: this fixes the order of the sums.
    by_group = np.lexsort((first, found[:, 0]))
    for members in np.split(by_group, np.flatnonzero(np.diff(found[by_group, 0])) + 1):
        values = rewards[members]
        scaled = values - values.mean() if subtract_mean else values
        if leave_one_out and len(values) > 1:
            scaled = scaled * (len(values) / (len(values) - 1))  # turns r - mean of all into r - mean of the others
        if divide_by_std and np.ptp(values) > 0:
            scaled = scaled / (values.std(ddof=1) + eps)
        elif subtract_mean and np.ptp(values) == 0:
            scaled = np.zeros_like(values)  # exact zeros instead of the mean's rounding error
        advantages[members] = scaled if clip is None else scaled.clip(-clip, clip)
    return advantages[of_row]


def _name(rows: Sequence[Trajectory], number: int) -> str:
    return f"row {number}" + ("" if rows[number].id is None else f" ({rows[number].id})")


class Advantages(NamedTuple):
    """Per-token advantages and returns of a row; entry 0 is 0 and unused, as in a `Trajectory`."""

    advantages: Float64[np.ndarray, "L"]
    returns: Float64[np.ndarray, "L"]
    """Advantage plus value: the critic's target."""


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    actions: ArrayLike | None = None,
    last_value: float = 0.0,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the tokens of one row.

    A_t = d_t + gamma * lam * A_next, d_t = r_t + gamma * V_next - V_t, over the tokens that are actions. "next" is the
    next action, so neither gamma nor lam discounts text of users and tools. A reward on such text counts for the last
    action before it.

    Args:
        rewards: [L], entry t for token t; or one number for the last action.
        values: [L], entry t is the value of the state before token t (entry 0 is unused, as in `Trajectory.values`).
            `treetrain.values` returns it as entry t - 1, since it counts by the token just read.
        gamma: discount per step, 0 to 1.
        lam: how far advantages look past the critic, 0 (one step) to 1 (the whole row).
        actions: [L], non-zero where the policy chose the token, such as `loss_weights`; None for all but the first.
        last_value: value of the state after the last token: 0 if the episode ended, the critic's if it was truncated.

    Returns:
        advantages and returns, 0 at tokens that are not actions.

    Raises:
        DataError: lengths that differ, a number that is not finite, or a reward before the first action.
        ValueError: gamma or lam outside 0 to 1.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} is {number!r}; allowed are numbers from 0 to 1")
    value = _numbers("values", values)
    length = len(value)
    chosen = np.ones(length, bool) if actions is None else _numbers("actions", actions, length) != 0
    chosen[:1] = False
    steps = np.flatnonzero(chosen)
    reward = np.asarray(rewards, np.float64)
    if reward.ndim == 0:
        spread = np.zeros(length)
        spread[steps[-1:]] = reward
        reward = spread
    earned = _earned(_numbers("rewards", reward, length), steps)
    following = np.append(value[steps][1:], last_value)
    errors = earned + gamma * following - value[steps]
    found, advantage = np.zeros(len(steps)), 0.0
    for step in range(len(steps) - 1, -1, -1):
        advantage = errors[step] + gamma * lam * advantage
        found[step] = advantage
    advantages, returns = np.zeros(length), np.zeros(length)
    advantages[steps], returns[steps] = found, found + value[steps]
    return Advantages(advantages, returns)


def _earned(rewards: Float64[np.ndarray, "L"], steps: Int64[np.ndarray, "S"]) -> Float64[np.ndarray, "S"]:
    """The sum of the rewards from each action to the next."""
    before = rewards[1 : steps[0]] if len(steps) else rewards[1:]
    if before.any():
        at = 1 + int(np.flatnonzero(before)[0])
        raise DataError(
            f"rewards[{at}] = {rewards[at]:g} comes before any action; give it to an action, or leave it out"
        )
    return np.add.reduceat(rewards, steps) if len(steps) else np.zeros(0)


def _numbers(name: str, given: ArrayLike, length: int | None = None) -> Float64[np.ndarray, "L"]:
    array = np.array(given, np.float64)
    if array.ndim == 1:
        array[:1] = 0.0  # unused, so it is not checked
    return per_token(array, name, array.size if length is None else length)
