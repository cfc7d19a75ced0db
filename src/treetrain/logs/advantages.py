"""Advantages from the rewards of a group."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float64

from treetrain.core.errors import DataError, expect
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import RowColumns


def group_advantages(
    trajectories: Iterable[Trajectory],
    *,
    divide_by_std: bool = True,
    eps: float = 1e-4,
    leave_one_out: bool = False,
) -> list[Trajectory]:
    """Give every row its reward relative to its group, as one advantage for all of its tokens.

    A = (reward - mean of the group) / (std of the group + eps), GRPO's outcome supervision (arXiv 2402.03300,
    section 4.1.2), with TRL's conventions: sample standard deviation (n - 1), eps 1e-4. Without
    `divide_by_std` this is Dr. GRPO's advantage (arXiv 2503.20783). Mean and std are over episodes: the calls
    of one conversation share its reward and count once. The advantages of a group of one episode, or of equal rewards,
    are 0.

    Args:
        trajectories: rows with `reward` and `group`; rows of equal `group` and `episode` are one episode.
        divide_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation.
        leave_one_out: subtract the mean of the group's other episodes: RLOO (arXiv 2402.14740, section 2.3). RLOO
            itself does not divide by the standard deviation.

    Returns:
        New trajectories in the same order, with `advantages` set.

    Raises:
        DataError: a row without reward or group; two rows of one episode with different rewards.
    """
    expect("trajectories", trajectories, Iterable, "a list of Trajectory with reward and group")
    rows = list(trajectories)
    values = advantages_of_groups(rows, divide_by_std=divide_by_std, eps=eps, leave_one_out=leave_one_out)
    return [row.replace(advantages=value) for row, value in zip(rows, values.tolist(), strict=True)]


def advantages_of_groups(
    rows: Sequence[Trajectory], *, divide_by_std: bool = True, eps: float = 1e-4, leave_one_out: bool = False
) -> Float64[np.ndarray, " K"]:
    """The advantage of every row, computed from `RowColumns(rows)`; see `group_advantages`."""
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < np.inf:
        raise ValueError(f"group_advantages: eps is {eps!r}; give a finite number from 0")
    if not rows:
        return np.zeros(0)
    columns = RowColumns(rows)
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
        scaled = values - values.mean()
        if leave_one_out and len(values) > 1:
            scaled = scaled * (len(values) / (len(values) - 1))  # turns r - mean of all into r - mean of the others
        if np.ptp(values) == 0:
            scaled = np.zeros_like(values)  # exact zeros instead of the mean's rounding error
        elif divide_by_std:
            scaled = scaled / (values.std(ddof=1) + eps)
        advantages[members] = scaled
    return advantages[of_row]


def _name(rows: Sequence[Trajectory], number: int) -> str:
    return f"row {number}" + ("" if rows[number].id is None else f" ({rows[number].id})")
