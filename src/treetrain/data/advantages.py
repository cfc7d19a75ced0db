"""Group rewards to GRPO advantages."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import RowColumns, columns_of
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
    rows = list(trajectories)
    values = advantages_of_groups(
        rows,
        subtract_mean=subtract_mean,
        divide_by_std=divide_by_std,
        eps=eps,
        leave_one_out=leave_one_out,
        clip=clip,
    )
    return [row.replace(advantages=value) for row, value in zip(rows, values.tolist(), strict=True)]


def advantages_of_groups(
    rows: Sequence[Trajectory],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-4,
    leave_one_out: bool = False,
    clip: float | None = None,
) -> NDArray[np.float64]:
    """[K]: the advantage of every row, from the columns of the rows alone; see `group_advantages`."""
    if leave_one_out and not subtract_mean:
        raise ValueError("leave_one_out says which mean is subtracted, but subtract_mean is False; give one of them")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip!r}; allowed are numbers above 0, and None")
    columns = columns_of(rows)
    _check_rewards(rows, columns)
    episodes = _episodes(rows, columns)
    advantage = np.empty(len(episodes.reward))
    for members in np.split(episodes.by_group, episodes.group_start[1:]):
        values = episodes.reward[members]
        scaled = values - values.mean() if subtract_mean else values
        if leave_one_out and len(values) > 1:
            scaled = scaled * (len(values) / (len(values) - 1))  # r - mean of the others, from r - mean of all
        if divide_by_std and np.ptp(values) > 0:
            scaled = scaled / (values.std(ddof=1) + eps)
        elif subtract_mean and np.ptp(values) == 0:
            scaled = np.zeros_like(values)  # not the rounding error of the mean
        advantage[members] = scaled if clip is None else scaled.clip(-clip, clip)
    return advantage[episodes.of_row]


class _Episodes(NamedTuple):
    """E episodes of K rows."""

    of_row: NDArray[np.int64]
    """int64 [K]"""
    reward: NDArray[np.float64]
    """[E]"""
    by_group: NDArray[np.int64]
    """int64 [E]: episodes group by group, in the order of their first rows."""
    group_start: NDArray[np.int64]
    """int64 [groups]: where each group begins in that."""


def _check_rewards(rows: Sequence[Trajectory], columns: RowColumns) -> None:
    lacking = {"reward": np.isnan(columns.reward), "group": columns.group < 0}
    first = np.flatnonzero(lacking["reward"] | lacking["group"])
    if len(first):
        number = int(first[0])
        fact = "reward" if lacking["reward"][number] else "group"
        raise DataError(f"{_name(rows, number)} has no {fact}; group advantages need reward and group in every row")


def _episodes(rows: Sequence[Trajectory], columns: RowColumns) -> _Episodes:
    """A row without an episode is one by itself. Raises DataError for an episode of two rewards."""
    numbers = np.arange(len(rows))
    names = np.stack([columns.group, np.where(columns.episode < 0, -1 - numbers, columns.episode)], axis=1)
    _, first, of_row = np.unique(names, axis=0, return_index=True, return_inverse=True)
    of_row = of_row.reshape(-1)
    reward = columns.reward[first]
    differs = np.flatnonzero(columns.reward != reward[of_row])
    if len(differs):
        number = int(differs[0])
        raise DataError(
            f"{_name(rows, number)} has reward {columns.reward[number]}, an earlier row of its episode "
            f"{rows[number].episode!r} has {reward[of_row[number]]}; "
            "an episode has one reward: give rows of different episodes different `episode`s"
        )
    by_group = np.lexsort((first, columns.group[first]))
    groups = columns.group[first][by_group]
    return _Episodes(of_row, reward, by_group, np.flatnonzero(np.diff(groups, prepend=-1)))


def _name(rows: Sequence[Trajectory], number: int) -> str:
    return f"row {number}" + ("" if rows[number].id is None else f" ({rows[number].id})")
